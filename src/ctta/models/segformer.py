"""SegFormer without weights, in the sizes of its paper."""

from dataclasses import dataclass

from torch import nn

from ctta.models.from_transformers import FromTransformers
from ctta.models.normalized import IMAGENET_MEAN, IMAGENET_STD
from ctta.models.other_libraries import library, part_of


@dataclass(frozen=True)
class Size:
    """What tells one SegFormer from another."""

    hidden_sizes: tuple[int, int, int, int]  # channels of each stage
    depths: tuple[int, int, int, int]  # blocks of each stage
    decoder_hidden_size: int


NARROW, WIDE = (32, 64, 160, 256), (64, 128, 320, 512)
SIZES = {
    "b0": Size(NARROW, (2, 2, 2, 2), 256),
    "b1": Size(WIDE, (2, 2, 2, 2), 256),
    "b2": Size(WIDE, (3, 4, 6, 3), 768),
    "b3": Size(WIDE, (3, 4, 18, 3), 768),
    "b4": Size(WIDE, (3, 8, 27, 3), 768),
    "b5": Size(WIDE, (3, 6, 40, 3), 768),
}


def segformer(size: str, *, num_classes: int = 19) -> nn.Module:
    """A SegFormer of random weights for RGB in [0, 1], which it normalises itself; in eval mode.

    For tests, benchmarks and training; ``ctta.models.load("hf:NAME")`` gives trained ones. Needs the extra
    ``segmentation``. Its logits have a quarter of the image's size, and methods resize them. Images must have at least
    32 pixels on each side, also in the smallest view.

    Args:
        size: ``"b0"`` (3.7 million parameters) to ``"b5"`` (85 million).
        num_classes: number of logits of each pixel.

    >>> import torch
    >>> segformer("b0")(torch.rand(1, 3, 32, 64)).logits.shape
    torch.Size([1, 19, 8, 16])

    Reference: Xie et al., "SegFormer: simple and efficient design for semantic segmentation with transformers",
    NeurIPS 2021.
    """
    if size not in SIZES:
        raise ValueError(f"a SegFormer comes in the sizes {', '.join(SIZES)}, got {size!r}")
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}")
    transformers = library("transformers")
    chosen = SIZES[size]
    config = part_of(transformers, "SegformerConfig")(
        hidden_sizes=list(chosen.hidden_sizes),
        depths=list(chosen.depths),
        decoder_hidden_size=chosen.decoder_hidden_size,
        num_labels=num_classes,
    )
    net = part_of(transformers, "SegformerForSemanticSegmentation")(config)
    return FromTransformers(net, IMAGENET_MEAN, IMAGENET_STD).eval()

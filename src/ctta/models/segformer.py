"""SegFormer in the sizes of its paper without weights, and the tiny trained one that ships with the library."""

from dataclasses import dataclass
from importlib.resources import as_file, files

from safetensors.torch import load_file
from torch import nn

from ctta.errors import ConfigError
from ctta.models.huggingface import TransformersModel
from ctta.models.normalized import IMAGENET_MEAN, IMAGENET_STD
from ctta.models.pretrained import get_attribute, import_library


@dataclass(frozen=True)
class SegFormerSize:
    """Hyperparameters in which the published SegFormers differ."""

    hidden_sizes: tuple[int, int, int, int]  # channels of each stage
    depths: tuple[int, int, int, int]  # blocks of each stage
    decoder_hidden_size: int


_NARROW, _WIDE = (32, 64, 160, 256), (64, 128, 320, 512)
SIZES = {
    "b0": SegFormerSize(_NARROW, (2, 2, 2, 2), 256),
    "b1": SegFormerSize(_WIDE, (2, 2, 2, 2), 256),
    "b2": SegFormerSize(_WIDE, (3, 4, 6, 3), 768),
    "b3": SegFormerSize(_WIDE, (3, 4, 18, 3), 768),
    "b4": SegFormerSize(_WIDE, (3, 8, 27, 3), 768),
    "b5": SegFormerSize(_WIDE, (3, 6, 40, 3), 768),
}


def segformer(size: str, *, num_classes: int = 19) -> nn.Module:
    """Return a randomly initialized SegFormer for RGB images in [0, 1], in eval mode.

    Use it for tests, benchmarks and training; ``ctta.models.load("hf:NAME")`` returns trained ones. Its logits have a
    quarter of the image's resolution; methods resize them. Images need at least 32 pixels per side, in the smallest
    view too. Needs the extra ``segmentation``.

    Args:
        size: ``"b0"`` (3.7 million parameters) to ``"b5"`` (85 million).
        num_classes: Number of logits per pixel.

    Returns:
        The network, which normalizes its input.

    Raises:
        ConfigError: If the size is unknown or ``num_classes`` is below 1.

    >>> import torch
    >>> segformer("b0")(torch.rand(1, 3, 32, 64)).logits.shape
    torch.Size([1, 19, 8, 16])

    Reference: Xie et al., "SegFormer: simple and efficient design for semantic segmentation with transformers",
    NeurIPS 2021.
    """
    if size not in SIZES:
        raise ConfigError(f"size must be one of {', '.join(SIZES)}, got {size!r}")
    if num_classes < 1:
        raise ConfigError(f"num_classes must be at least 1, got {num_classes}")
    transformers = import_library("transformers")
    chosen = SIZES[size]
    config = get_attribute(transformers, "SegformerConfig")(
        hidden_sizes=list(chosen.hidden_sizes),
        depths=list(chosen.depths),
        decoder_hidden_size=chosen.decoder_hidden_size,
        num_labels=num_classes,
    )
    net = get_attribute(transformers, "SegformerForSemanticSegmentation")(config)
    return TransformersModel(net, IMAGENET_MEAN, IMAGENET_STD).eval()


def tiny_segformer() -> TransformersModel:
    """Return a randomly initialized SegFormer with a fifth of the parameters of B0 and no BatchNorm.

    Needs the extra ``segmentation``.
    """
    from ctta.data.streets import CLASSES  # here, since drawing scenes has many modules

    transformers = import_library("transformers")
    config = get_attribute(transformers, "SegformerConfig")(
        num_labels=len(CLASSES),
        depths=[1, 1, 2, 1],
        hidden_sizes=[24, 48, 96, 128],
        num_attention_heads=[1, 2, 4, 4],
        mlp_ratios=[4, 4, 3, 3],
        decoder_hidden_size=96,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    net = get_attribute(transformers, "SegformerForSemanticSegmentation")(config)
    # The decoder head has the only BatchNorm. A group norm with one group is a layer norm over the whole feature map.
    net.decode_head.batch_norm = nn.GroupNorm(1, config.decoder_hidden_size)
    return TransformersModel(net, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))  # trained on images in [0, 1], unnormalized


def streets() -> TransformersModel:
    """Return the tiny SegFormer trained on drawn street scenes in clear weather, in eval mode.

    It has 0.8 million parameters and layer norms only, takes images in [0, 1] and predicts the nine classes of
    :data:`ctta.data.streets.CLASSES`; ``PROVENANCE.md`` documents its training. Needs the extra ``segmentation``.

    >>> import torch
    >>> streets()(torch.rand(1, 3, 128, 256)).logits.shape
    torch.Size([1, 9, 32, 64])
    """
    net = tiny_segformer()
    with as_file(files("ctta.models") / "streets.safetensors") as path:
        net.net.load_state_dict(load_file(path))
    return net.eval()

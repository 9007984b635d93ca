"""Segmentation: SegFormer, of which a tiny trained one ships with the library, and sliding windows."""

from importlib.resources import as_file, files
from itertools import product
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.parallel import StopPassError
from ctta.core.validation import check_integer
from ctta.errors import ConfigError, InputError
from ctta.functional import at_least_float32
from ctta.models.pretrained import IMAGENET_MEAN, IMAGENET_STD, TransformersModel, get_attribute, import_library
from ctta.nn.surgery import ExtractLogits, Output

_NARROW, _WIDE = (32, 64, 160, 256), (64, 128, 320, 512)
#: Channels and number of blocks of each stage of the published SegFormers, and channels of the decoder.
SIZES = {
    "b0": (_NARROW, (2, 2, 2, 2), 256),
    "b1": (_WIDE, (2, 2, 2, 2), 256),
    "b2": (_WIDE, (3, 4, 6, 3), 768),
    "b3": (_WIDE, (3, 4, 18, 3), 768),
    "b4": (_WIDE, (3, 8, 27, 3), 768),
    "b5": (_WIDE, (3, 6, 40, 3), 768),
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
    channels, depths, decoder = SIZES[size]
    net = _build_segformer(
        hidden_sizes=list(channels), depths=list(depths), decoder_hidden_size=decoder, num_labels=num_classes
    )
    return TransformersModel(net, IMAGENET_MEAN, IMAGENET_STD).eval()


def _build_segformer(**config: Any) -> Any:
    transformers = import_library("transformers")
    return get_attribute(transformers, "SegformerForSemanticSegmentation")(
        get_attribute(transformers, "SegformerConfig")(**config)
    )


def tiny_segformer() -> TransformersModel:
    """Return a randomly initialized SegFormer with a fifth of the parameters of B0 and no BatchNorm.

    Needs the extra ``segmentation``.
    """
    from ctta.data.streets import CLASSES  # here, since drawing scenes has many modules

    net = _build_segformer(
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
    # The decoder head has the only BatchNorm. A group norm with one group is a layer norm over the whole feature map.
    net.decode_head.batch_norm = nn.GroupNorm(1, net.config.decoder_hidden_size)
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


class SlidingWindow(nn.Module):
    """A segmentation network applied to overlapping windows of a large image; its logits are the mean over windows.

    Windows start every ``stride`` pixels; the last one of a row or column is moved back to end at the border. An image
    no larger than the window is passed on whole. Any method can adapt the network through the windows. With
    ``batch_stats`` above 0, BatchNorm computes its statistics per window.

    Args:
        net: Network for images (N, C, H, W) that returns one prediction per pixel.
        window: Side of the square window in pixels; the default is the reference implementation's for Cityscapes.
        stride: Step of the window in pixels, at most ``window``.
        output: Where the logits are in the network's output, if they are not found automatically.

    >>> net = SlidingWindow(nn.Conv2d(3, 19, 1), window=32, stride=24)
    >>> net(torch.rand(1, 3, 50, 70)).shape
    torch.Size([1, 19, 50, 70])

    Reference: the inference mode ``slide`` of the reference implementations of CoTTA and SegFormer.
    """

    def __init__(self, net: nn.Module, *, window: int = 1024, stride: int = 768, output: Output = None) -> None:
        super().__init__()
        self.net = net
        self.window = check_integer("window", window, 1)
        self.stride = check_integer("stride", stride, 1, self.window)  # a larger stride would skip pixels
        self.logits_of = ExtractLogits(output)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes, H, W) of images (N, C, H, W)."""
        if x.ndim != 4:
            raise InputError(f"expected images (N, C, height, width), got shape {tuple(x.shape)}")
        rows, columns = (compute_window_slices(side, self.window, self.stride) for side in x.shape[2:])
        if len(rows) == len(columns) == 1:
            return self._predict_window(x)
        total: Tensor | None = None
        stopped: StopPassError | None = None
        for row, column in product(rows, columns):
            part = x[:, :, row, column].clone()  # the network may write to its input
            try:
                logits = at_least_float32(self._predict_window(part))
            except StopPassError as error:  # the hook that raised it needs what it finds in the other windows too
                stopped = error
                continue
            if total is None:
                total = logits.new_zeros(*logits.shape[:2], *x.shape[2:])
            total[:, :, row, column] += logits
        if stopped is not None:
            raise stopped
        assert total is not None
        counts = _count_windows(rows, total.shape[2]).unsqueeze(1) * _count_windows(columns, total.shape[3])
        return total / counts.to(total)

    def _predict_window(self, x: Tensor) -> Tensor:
        """Return the network's logits at the size of the window."""
        logits = self.logits_of(self.net, (x,), self.net(x))
        if logits.ndim != x.ndim:
            raise ConfigError(
                f"a sliding window needs a prediction per pixel, but the network returned shape {tuple(logits.shape)} "
                f"for images of shape {tuple(x.shape)}: use a segmentation network"
            )
        return logits

    @override
    def extra_repr(self) -> str:
        return f"window={self.window}, stride={self.stride}"


def compute_window_slices(side: int, window: int, stride: int) -> list[slice]:
    """Return the extent of each window along an axis; the last one ends at the border.

    >>> compute_window_slices(1920, 1024, 768)
    [slice(0, 1024, None), slice(768, 1792, None), slice(896, 1920, None)]
    """
    last = max(side - window, 0)
    return [slice(start, min(start + window, side)) for start in (*range(0, last, stride), last)]


def _count_windows(slices: list[slice], side: int) -> Tensor:
    """Return how many windows cover each position of an axis."""
    count = torch.zeros(side)
    for part in slices:
        count[part] += 1
    return count

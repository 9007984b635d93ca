"""Sliding-window inference for images larger than those a segmentation network was trained on."""

from itertools import product

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.validation import check_integer
from ctta.errors import ConfigError, InputError
from ctta.functional import at_least_float32
from ctta.nn.surgery import ExtractLogits, Output


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
        for row, column in product(rows, columns):
            part = x[:, :, row, column].clone()  # the network may write to its input
            logits = at_least_float32(self._predict_window(part))
            if total is None:
                total = logits.new_zeros(*logits.shape[:2], *x.shape[2:])
            total[:, :, row, column] += logits
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

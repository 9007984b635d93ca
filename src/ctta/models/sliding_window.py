"""Images that are larger than a network was trained on, seen through a window that slides over them."""

from itertools import product

import torch
from torch import Tensor, nn

from ctta.functional import at_least_float32
from ctta.surgery import ExtractLogits, Output
from ctta.validation import check_integer


class SlidingWindow(nn.Module):
    """A segmentation network that sees a large image window by window; its logits are the mean over windows.

    Windows start every ``stride`` pixels, and the last one of a row or column is moved back to end at the border. An
    image that is no larger than the window goes through whole. It can be given to any method, and learns through the
    windows. With ``batch_stats`` above 0, BatchNorm takes its statistics window by window.

    Args:
        net: a network for images (N, C, height, width) with one answer per pixel.
        window: sides of the square window, in pixels; the default is the authors' for Cityscapes.
        stride: how far the window moves at a time, at most ``window``.
        output: where the logits are in what the network returns, if not found by itself.

    >>> net = SlidingWindow(nn.Conv2d(3, 19, 1), window=32, stride=24)
    >>> net(torch.rand(1, 3, 50, 70)).shape
    torch.Size([1, 19, 50, 70])

    Reference: the inference mode ``slide`` of the CoTTA and SegFormer authors' code.
    """

    def __init__(self, net: nn.Module, *, window: int = 1024, stride: int = 768, output: Output = None) -> None:
        super().__init__()
        self.net = net
        self.window = check_integer("window", window, 1)
        self.stride = check_integer("stride", stride, 1, self.window)  # a longer one would leave pixels unseen
        self.logits_of = ExtractLogits(output)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ValueError(f"expected images (N, C, height, width), got shape {tuple(x.shape)}")
        rows, columns = (window_slices(side, self.window, self.stride) for side in x.shape[2:])
        if len(rows) == len(columns) == 1:
            return self.answer(x)
        total: Tensor | None = None
        for row, column in product(rows, columns):
            logits = at_least_float32(self.answer(x[:, :, row, column].clone()))  # the net may write to its input
            if total is None:
                total = logits.new_zeros(*logits.shape[:2], *x.shape[2:])
            total[:, :, row, column] += logits
        assert total is not None
        return total / (coverage(rows, total.shape[2]).unsqueeze(1) * coverage(columns, total.shape[3])).to(total)

    def answer(self, x: Tensor) -> Tensor:
        """The network's logits for a window, at the window's size."""
        logits = self.logits_of(self.net, (x,), self.net(x))
        if logits.ndim != x.ndim:
            raise ValueError(
                f"a sliding window needs one answer per pixel, and the network answered shape {tuple(logits.shape)} "
                f"to images of shape {tuple(x.shape)}: give it a network for segmentation"
            )
        return logits

    def extra_repr(self) -> str:
        return f"window={self.window}, stride={self.stride}"


def window_slices(side: int, window: int, stride: int) -> list[slice]:
    """Where windows lie along an axis; the last one ends with it.

    >>> window_slices(1920, 1024, 768)
    [slice(0, 1024, None), slice(768, 1792, None), slice(896, 1920, None)]
    """
    last = max(side - window, 0)
    return [slice(start, min(start + window, side)) for start in (*range(0, last, stride), last)]


def coverage(slices: list[slice], side: int) -> Tensor:
    """How many windows cover each place of an axis."""
    count = torch.zeros(side)
    for part in slices:
        count[part] += 1
    return count

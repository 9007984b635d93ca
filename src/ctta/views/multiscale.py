"""The views for segmentation: several scales, as they are and flipped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ctta.surgery import resize
from ctta.views.average import Model


def multiscale_flip(
    scales: Sequence[float] = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0),
) -> tuple["ScaledView", ...]:
    """The authors' views for segmentation: each scale, as it is and flipped left to right.

    >>> len(multiscale_flip())
    14
    """
    if not scales or not all(0 < scale < math.inf for scale in scales):
        raise ValueError(f"multiscale_flip needs finite scales above 0, got {scales!r}")
    return tuple(ScaledView(float(scale), flip) for scale in scales for flip in (False, True))


@dataclass(frozen=True)
class ScaledView:
    """The batch resized and perhaps flipped; a dense answer is brought back to the batch's size and side."""

    scale: float
    flip: bool

    def __call__(self, model: Model, x: Tensor) -> Tensor:
        return self.align(model(self.augment(x)), x)

    def augment(self, x: Tensor) -> Tensor:
        """The batch as this view shows it."""
        size = [max(1, round(side * self.scale)) for side in x.shape[2:]]
        return resize(x.flip(-1) if self.flip else x, size)

    def align(self, logits: Tensor, x: Tensor) -> Tensor:
        """The answer to the view of this batch, at the batch's size and side."""
        if logits.ndim < x.ndim:
            return logits  # one answer per image: nothing has moved
        if logits.shape[2:] != x.shape[2:]:
            logits = resize(logits, x.shape[2:])
        return logits.flip(-1) if self.flip else logits

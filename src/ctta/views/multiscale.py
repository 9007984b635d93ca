"""Views for segmentation: several scales, each with its mirror image."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from torch import Tensor
from typing_extensions import override

from ctta.errors import ConfigError
from ctta.surgery import resize
from ctta.views.average import SplitView

#: Larger images are a mistake: they take over 256 times the memory.
MAX_SCALE = 16


def multiscale_flip(
    scales: Sequence[float] = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0),
) -> tuple["ScaledView", ...]:
    """Return the views of CoTTA's reference implementation for segmentation: each scale, unflipped and flipped.

    Args:
        scales: Factors of height and width; the defaults are the reference's.

    Returns:
        Two views per scale.

    Raises:
        ConfigError: There is no scale, or one that is not above 0 and at most 16.

    >>> len(multiscale_flip())
    14
    """
    if not scales:
        raise ConfigError("multiscale_flip needs at least one scale")
    return tuple(ScaledView(float(scale), flip) for scale in scales for flip in (False, True))


@dataclass(frozen=True)
class ScaledView(SplitView):
    """The batch resized and, if asked, flipped horizontally; dense logits are brought back.

    Attributes:
        scale: The factor of height and width, above 0 and at most 16.
        flip: Whether to flip the images horizontally.
    """

    scale: float
    flip: bool

    def __post_init__(self) -> None:
        if not isinstance(self.scale, Real) or not 0 < self.scale <= MAX_SCALE:
            raise ConfigError(f"the scale of a view must be above 0 and at most {MAX_SCALE}, got {self.scale!r}")

    @override
    def augment(self, x: Tensor) -> Tensor:
        size = [max(1, round(side * self.scale)) for side in x.shape[2:]]
        return resize(x.flip(-1) if self.flip else x, size)

    @override
    def align(self, logits: Tensor, x: Tensor) -> Tensor:
        if logits.ndim < x.ndim:
            return logits  # one prediction per image: no position to undo
        if logits.shape[2:] != x.shape[2:]:
            logits = resize(logits, x.shape[2:])
        return logits.flip(-1) if self.flip else logits

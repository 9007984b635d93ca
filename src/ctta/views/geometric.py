"""Views that flip and move images and leave their values alone, so they suit any range and number of channels."""

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor
from typing_extensions import override

from ctta.errors import ConfigError
from ctta.functional import at_least_float32
from ctta.views.average import DrawnViews, SplitView
from ctta.views.multiscale import ScaledView
from ctta.views.sampling import MAX_VIEWS, MOTION_RANGES, balance, shrink_range
from ctta.views.transforms import Motion


def geometric_views(num_views: int = 4, *, motion: float = 0.5) -> "GeometricViews":
    """Return the flipped images, and random rotations, translations, scalings and flips of them.

    Unlike :func:`image_views` they leave values as they are: images may be in [0, 1], normalized for the network, or
    have any number of channels.

    Args:
        num_views: The number of views that a step averages over, from 1 to 4096. The first only flips.
        motion: The fraction of the ranges of CoTTA's views to draw from, about the middle of each range.

    Returns:
        An object that draws the moved views of each step together, so that they cover the ranges evenly.

    Raises:
        ConfigError: A value is out of range.

    >>> views = geometric_views(2).draw(torch.Generator().manual_seed(0))
    >>> [view(lambda x: x.mean((2, 3)), torch.ones(1, 5, 8, 8)).shape for view in views]
    [torch.Size([1, 5]), torch.Size([1, 5])]
    """
    return GeometricViews(num_views, motion)


@dataclass(frozen=True)
class GeometricViews(DrawnViews):
    """A flip and random :class:`MovedView` draws, as :func:`geometric_views` documents them.

    Attributes:
        num_views: The number of views of a step.
        motion: The fraction of the ranges.
    """

    num_views: int
    motion: float

    def __post_init__(self) -> None:
        if not hasattr(self.num_views, "__index__") or not 1 <= self.num_views <= MAX_VIEWS:
            raise ConfigError(f"geometric_views takes 1 to {MAX_VIEWS} views, got {self.num_views!r}; for none give ()")
        if not isinstance(self.motion, Real) or not 0 <= self.motion <= 1:
            raise ConfigError(f"motion is a fraction of CoTTA's ranges, from 0 to 1, got {self.motion!r}")

    @property
    def is_random(self) -> bool:
        """Whether draws differ: the first view, which only flips, is always the same."""
        return self.num_views > 1

    @override
    def draw(self, generator: torch.Generator) -> list[SplitView]:
        views: list[SplitView] = [ScaledView(1.0, flip=True, multiple_of=None)]  # as sharp as the images
        if self.num_views == 1:
            return views
        ranges = [shrink_range(*bounds, self.motion) for bounds in MOTION_RANGES.values()]
        uniform = torch.rand(self.num_views - 1, len(ranges) + 1, generator=generator, dtype=torch.float64)
        for *drawn, flip in balance(uniform, generator).tolist():
            values = [low + (high - low) * value for (low, high), value in zip(ranges, drawn, strict=True)]
            views.append(MovedView(**dict(zip(MOTION_RANGES, values, strict=True)), flip=flip < 0.5))
        return views


@dataclass(frozen=True)
class MovedView(SplitView):
    """One motion, the same for all images of the batch.

    Attributes:
        degrees: Rotation of the image.
        translate_x: Translation as a fraction of twice the width.
        translate_y: Translation as a fraction of twice the height.
        scale: Scaling of the image.
        flip: Whether to flip the image horizontally.
    """

    degrees: float
    translate_x: float
    translate_y: float
    scale: float
    flip: bool

    @override
    def augment(self, x: Tensor) -> Tensor:
        # 16 bits are too few for positions in a large image, and torch samples by them unsoundly on the CPU.
        moved = self._motion(x).apply(at_least_float32(x), margin=0)
        return (moved.flip(-1) if self.flip else moved).to(x.dtype)

    @override
    def align(self, logits: Tensor, x: Tensor) -> Tensor:
        return self._motion(x).align(logits, x, self.flip)

    def _motion(self, image: Tensor) -> Motion:
        height, width = image.shape[2:]
        return Motion(
            self.degrees, self.scale, round(2 * self.translate_x * width), round(2 * self.translate_y * height)
        )

"""Random views for classification, drawn as in the reference implementation of CoTTA."""

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, TypeGuard, get_args

import torch
from torch import Tensor
from typing_extensions import override

from ctta.errors import ConfigError
from ctta.views.average import DrawnViews
from ctta.views.image_view import ImageNormalization, ImageView
from ctta.views.transforms import Padding

#: The uniform ranges of the reference implementation. A translation is a fraction of the padded size, which is twice
#: the image's.
COLOR_RANGES = {
    "brightness": (0.6, 1.4),
    "contrast": (0.7, 1.3),
    "saturation": (0.5, 1.5),
    "hue": (-0.06, 0.06),
    "gamma": (0.7, 1.3),
}
MOTION_RANGES = {
    "degrees": (-15.0, 15.0),
    "translate_x": (-1 / 16, 1 / 16),
    "translate_y": (-1 / 16, 1 / 16),
    "scale": (0.9, 1.1),
}
BLUR_RANGES = {"sigma": (0.001, 0.5)}
#: The largest number of views of a step, 128 times the reference's: more are a mistake.
MAX_VIEWS = 4096


def image_views(
    num_views: int = 32,
    *,
    color: float = 1.0,
    motion: float = 1.0,
    balanced: bool = False,
    blur_and_noise: bool = True,
    padding: Padding = "edge",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> "ImageViews":
    """Return CoTTA's random views for classification: color, affine motion, blur, flip and noise.

    Images are RGB or gray with values in [0, 1]. For images normalized outside the model give the ``mean`` and ``std``
    of that normalization: a view then undoes it, augments, and normalizes again.

    Args:
        num_views: The number of views that a step averages over, from 1 to 4096.
        color: The fraction of the reference's ranges of brightness, contrast, saturation, hue and gamma to draw from,
            about the middle of each range.
        motion: Likewise for rotation, translation and scale.
        balanced: Draw the views of a step together so that they cover the ranges evenly, instead of independently.
        blur_and_noise: Whether views are blurred and noisy; ROID's are not.
        padding: How an image goes on beyond its edges: by the values of its ``"edge"``, or by a ``"reflect"`` as in
            ROID.
        mean: The mean of a normalization outside the model, one value per channel.
        std: The standard deviation of that normalization.

    Returns:
        An object that draws the views of each step.

    Raises:
        ConfigError: A value is out of range, or only one of ``mean`` and ``std`` is given.

    >>> views = image_views(2).draw(torch.Generator().manual_seed(0))
    >>> [view(lambda x: x.mean((2, 3)), torch.ones(1, 3, 8, 8)).shape for view in views]
    [torch.Size([1, 3]), torch.Size([1, 3])]
    """
    means, stds = (None if values is None else tuple(float(value) for value in values) for values in (mean, std))
    return ImageViews(
        num_views,
        mean=means,
        std=stds,
        color=color,
        motion=motion,
        balanced=balanced,
        blur_and_noise=blur_and_noise,
        padding=padding,
    )


def fast_image_views(
    num_views: int = 8, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> "ImageViews":
    """Return few views that replace the reference's 32: balanced, and drawn from narrower ranges.

    The constants were chosen by ``benchmarks/choose/fast_views.py``; ``docs/how-to/speed.md`` shows the error against
    the number of views.

    Args:
        num_views: The number of views.
        mean: See :func:`image_views`.
        std: See :func:`image_views`.

    Returns:
        An object that draws the views of each step.
    """
    return image_views(num_views, color=0.75, motion=0.5, balanced=True, mean=mean, std=std)


class NormalizedViews(DrawnViews):
    """Views of images in [0, 1], or normalized outside the model.

    Attributes:
        mean: The mean of that normalization; None for images in [0, 1].
        std: Its standard deviation.
    """

    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @property
    def normalization(self) -> ImageNormalization:
        """The normalization outside the model."""
        return ImageNormalization(self.mean, self.std)

    def check(self, x: Tensor) -> None:
        """Raise an InputError unless x is a batch of images with values in the declared range.

        Args:
            x: The batch.
        """
        self.normalization.check(x)


@dataclass(frozen=True)
class ImageViews(NormalizedViews):
    """Random :class:`ImageView` draws, as :func:`image_views` documents them.

    Attributes:
        num_views: The number of views of a step.
        mean: The mean of a normalization outside the model.
        std: The standard deviation of that normalization.
        color: The fraction of the color ranges.
        motion: The fraction of the motion ranges.
        balanced: Whether the views of a step cover the ranges evenly.
        blur_and_noise: Whether the views are blurred and noisy.
        padding: How an image goes on beyond its edges.
    """

    num_views: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    color: float = 1.0
    motion: float = 1.0
    balanced: bool = False
    blur_and_noise: bool = True
    padding: Padding = "edge"

    def __post_init__(self) -> None:
        if not isinstance(self.blur_and_noise, bool):
            raise TypeError(f"blur_and_noise must be True or False, got {self.blur_and_noise!r}")
        if self.padding not in get_args(Padding):
            raise ConfigError(f"padding must be 'edge' or 'reflect', got {self.padding!r}")
        if not hasattr(self.num_views, "__index__") or not 1 <= operator.index(self.num_views) <= MAX_VIEWS:
            raise ConfigError(
                f"image_views takes 1 to {MAX_VIEWS} views, got {self.num_views!r}; for none at all give views=()"
            )
        for name, fraction in (("color", self.color), ("motion", self.motion)):
            if not isinstance(fraction, Real) or not 0 <= fraction <= 1:
                raise ConfigError(f"{name} is a fraction of the reference's ranges, from 0 to 1, got {fraction!r}")
        check_normalization(self.mean, self.std)

    @override
    def __repr__(self) -> str:
        # Folders of 0.1 compare this text, so later settings are shown only where they are not the defaults.
        later = {"blur_and_noise": True, "padding": "edge"}
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        shown = {name: value for name, value in shown.items() if name not in later or value != later[name]}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The range of each uniformly drawn parameter."""
        return (
            {name: shrink_range(*bounds, self.color) for name, bounds in COLOR_RANGES.items()}
            | {name: shrink_range(*bounds, self.motion) for name, bounds in MOTION_RANGES.items()}
            | BLUR_RANGES
        )

    @override
    def draw(self, generator: torch.Generator) -> list[ImageView]:
        ranges = self.ranges
        orders, uniform, noise_seeds = [], [], []
        for _ in range(self.num_views):
            orders.append(torch.randperm(len(COLOR_RANGES), generator=generator).tolist())
            uniform.append(torch.rand(len(ranges) + 1, generator=generator, dtype=torch.float64))
            noise_seeds.append(int(torch.randint(2**62, (), generator=generator)))
        rows = torch.stack(uniform)
        if self.balanced:
            rows = balance(rows, generator)
            if self.num_views % 2 == 0:  # the order of colors is mirrored within a pair as well
                orders[self.num_views // 2 :] = [order[::-1] for order in orders[: self.num_views // 2]]
        views = []
        for number, row in enumerate(rows.tolist()):
            pairs = zip(ranges.items(), row, strict=False)  # the last number of a row decides the flip
            parameters: dict[str, Any] = {name: low + (high - low) * value for (name, (low, high)), value in pairs}
            views.append(
                ImageView(
                    normalization=self.normalization,
                    check_range=number == 0,  # all views of a step get the same images
                    color_order=tuple(orders[number]),
                    flip=row[-1] < 0.5,
                    noise_seed=noise_seeds[number],
                    blur_and_noise=self.blur_and_noise,
                    padding=self.padding,
                    **parameters,
                )
            )
        return views


def check_normalization(mean: tuple[float, ...] | None, std: tuple[float, ...] | None) -> None:
    """Raise a ConfigError unless both or none of these are given, and make sense.

    Args:
        mean: One value per channel.
        std: One value above 0 per channel.
    """
    if mean is None and std is None:
        return
    if not (_are_finite(mean) and _are_finite(std) and len(mean) == len(std)):
        raise ConfigError(f"give mean and std together, one value per channel each, got {mean!r} and {std!r}")
    if min(std) <= 0:
        raise ConfigError(f"std must be above 0, got {std!r}")


def _are_finite(values: object) -> TypeGuard[tuple[float, ...]]:
    """Return whether these are numbers, at least one."""
    if not isinstance(values, tuple) or not values:
        return False
    return all(isinstance(value, int | float) and abs(value) <= sys.float_info.max for value in values)


def balance(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Spread uniform numbers so that each column has one in each of ``len(rows)`` equal intervals.

    An even number of rows comes in mirrored pairs: row i of the first half and row i of the second add up to 1. A
    randomly picked row is as uniform as before, so a mean over the rows estimates the same quantity with less variance:
    a Latin hypercube stratifies what varies slowly with a parameter, and antithetic pairs cancel what is linear in it.

    >>> rows = balance(torch.rand(4, 2), torch.Generator().manual_seed(0))
    >>> (4 * rows).long().sort(0).values.T.tolist(), torch.allclose(rows[:2] + rows[2:], torch.ones(2, 2))
    ([[0, 1, 2, 3], [0, 1, 2, 3]], True)
    """
    num_rows, num_columns = rows.shape
    if num_rows % 2:  # without pairs: a row that mirrors itself would always be the middle of the range
        return (_permute_columns(num_rows, num_columns, generator) + rows) / num_rows
    lower = (_permute_columns(num_rows // 2, num_columns, generator) + rows[: num_rows // 2]) / num_rows
    first = torch.where(torch.rand(lower.shape, generator=generator) < 0.5, lower, 1 - lower)
    return torch.cat([first, 1 - first])


def _permute_columns(num_rows: int, num_columns: int, generator: torch.Generator) -> Tensor:
    """Return a matrix whose columns are independent permutations of 0, ..., num_rows - 1."""
    return torch.stack([torch.randperm(num_rows, generator=generator) for _ in range(num_columns)], 1)


def shrink_range(low: float, high: float, fraction: float) -> tuple[float, float]:
    """Return the middle ``fraction`` of a range."""
    middle, half = (low + high) / 2, fraction * (high - low) / 2
    return (low, high) if fraction == 1 else (middle - half, middle + half)

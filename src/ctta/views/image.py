"""The views for classification, as the authors of CoTTA draw them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ctta.views.balance import balance
from ctta.views.image_view import ImageView
from ctta.views.unit_range import UnitRange

#: What the authors draw from, uniformly; a shift is a share of the padded size, which is twice the image's.
COLOUR = {
    "brightness": (0.6, 1.4),
    "contrast": (0.7, 1.3),
    "saturation": (0.5, 1.5),
    "hue": (-0.06, 0.06),
    "gamma": (0.7, 1.3),
}
MOTION = {
    "degrees": (-15.0, 15.0),
    "translate_x": (-1 / 16, 1 / 16),
    "translate_y": (-1 / 16, 1 / 16),
    "scale": (0.9, 1.1),
}
BLUR = {"sigma": (0.001, 0.5)}


def image_views(
    n: int = 32,
    *,
    colour: float = 1.0,
    motion: float = 1.0,
    balanced: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> "ImageViews":
    """CoTTA's n random views for classification: colour, affine, blur, flip and noise.

    Images are RGB or grey in [0, 1]. For images normalised outside the model give the ``mean`` and ``std`` of that
    normalisation: a view then undoes it, augments, and normalises again.

    Args:
        n: how many views a step averages over.
        colour: share of the authors' ranges of brightness, contrast, saturation, hue and gamma, about their middle.
        motion: share of the authors' ranges of rotation, shift and scale.
        balanced: draw the views of a step together so that they cover the ranges evenly, not each by itself.
        mean: of a normalisation outside the model, one value per channel.
        std: likewise.

    >>> views = image_views(2).draw(torch.Generator().manual_seed(0))
    >>> [view(lambda x: x.mean((2, 3)), torch.ones(1, 3, 8, 8)).shape for view in views]
    [torch.Size([1, 3]), torch.Size([1, 3])]
    """
    if n < 1:
        raise ValueError(f"image_views needs at least one view, got {n}; for none at all give views=()")
    for name, share in (("colour", colour), ("motion", motion)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} is a share of the authors' ranges, from 0 to 1, got {share!r}")
    means, stds = (None if values is None else tuple(float(value) for value in values) for values in (mean, std))
    if (means is None) != (stds is None) or (means and stds and len(means) != len(stds)):
        raise ValueError(f"give mean and std together, one value per channel each, got {mean!r} and {std!r}")
    if stds is not None and min(stds) <= 0:
        raise ValueError(f"std must be above 0, got {std!r}")
    return ImageViews(n, mean=means, std=stds, colour=colour, motion=motion, balanced=balanced)


def fast_image_views(
    n: int = 8, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> "ImageViews":
    """Few views that do for the authors' 32: drawn together, and gentler.

    Chosen by benchmarks/choose_fast_views.py; docs/performance.md shows error against number of views.
    """
    return image_views(n, colour=0.75, motion=0.5, balanced=True, mean=mean, std=std)


@dataclass(frozen=True)
class ImageViews:
    """See :func:`image_views`."""

    n: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    colour: float = 1.0
    motion: float = 1.0
    balanced: bool = False

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """What the parameters of a view are drawn from."""
        return (
            {name: _about_the_middle(*bounds, self.colour) for name, bounds in COLOUR.items()}
            | {name: _about_the_middle(*bounds, self.motion) for name, bounds in MOTION.items()}
            | BLUR
        )

    def draw(self, generator: torch.Generator) -> list[ImageView]:
        ranges = self.ranges
        orders, uniform, noise_seeds = [], [], []
        for _ in range(self.n):
            orders.append(torch.randperm(len(COLOUR), generator=generator).tolist())
            uniform.append(torch.rand(len(ranges) + 1, generator=generator, dtype=torch.float64))
            noise_seeds.append(int(torch.randint(2**62, (), generator=generator)))
        rows = torch.stack(uniform)
        if self.balanced:
            rows = balance(rows, generator)
            if self.n % 2 == 0:  # what comes first with one of a pair comes last with the other
                orders[self.n // 2 :] = [order[::-1] for order in orders[: self.n // 2]]
        views = []
        for number, row in enumerate(rows.tolist()):
            values = zip(ranges.items(), row, strict=False)  # the last number of a row is the flip's
            parameters: dict[str, Any] = {name: low + (high - low) * share for (name, (low, high)), share in values}
            views.append(
                ImageView(
                    unit_range=self.unit_range,
                    checks_range=number == 0,  # the images are the same for all views of a step
                    colour_order=tuple(orders[number]),
                    flip=row[-1] < 0.5,
                    noise_seed=noise_seeds[number],
                    **parameters,
                )
            )
        return views

    @property
    def unit_range(self) -> UnitRange:
        """How the images relate to [0, 1]."""
        return UnitRange(self.mean, self.std)

    def check(self, x: Tensor) -> None:
        """Raise unless x is a batch of images in the declared range."""
        self.unit_range.check(x)


def _about_the_middle(low: float, high: float, share: float) -> tuple[float, float]:
    middle, half = (low + high) / 2, share * (high - low) / 2
    return (low, high) if share == 1 else (middle - half, middle + half)

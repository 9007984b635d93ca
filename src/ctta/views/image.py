"""Random views for classification, drawn as in the reference implementation of CoTTA.

torchvision would be a further dependency; its transforms draw from the global generator, and allocate a batch for each
change of color, which costs more than the arithmetic. These work in place where they can, on the images of several
views at once (views, N, C, H, W), each with numbers of its own (views, 1, 1, 1, 1).
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, fields
from enum import IntEnum
from numbers import Real
from typing import Any, ClassVar, TypeGuard, get_args

import torch
from torch import Tensor
from typing_extensions import override

from ctta.core.parallel import check_flag, current_reducer
from ctta.errors import ConfigError, InputError
from ctta.functional import at_least_float32
from ctta.views.average import DrawnViews, SplitView
from ctta.views.geometric import (
    MOTION_RANGES,
    Motion,
    Numbers,
    Padding,
    balance,
    check_num_views,
    find_positions,
    move_numbers,
    sample_bilinear,
    shrink_range,
    stack_views,
)

#: ITU-R 601 luma, to the four digits that torchvision uses.
LUMA = (0.2989, 0.587, 0.114)


class Color(IntEnum):
    """The changes of color, in the order in which they are drawn."""

    BRIGHTNESS = 0
    CONTRAST = 1
    SATURATION = 2
    HUE = 3
    GAMMA = 4


def to_grayscale(image: Tensor) -> Tensor:
    """Return the luma of every pixel, (..., 1, H, W)."""
    if image.shape[-3] == 1:
        return image
    red, green, blue = image.split(1, dim=-3)
    luma: Tensor = red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])
    return luma


def scale_distances_(images: Tensor, factor: Numbers, factors: Sequence[float], centers: Sequence[Tensor]) -> None:
    """Scale the distance of values from centers, of the first views from those given and of the others from zero.

    The factors are given on the device and on the host: with a tensor of factors torch's kernels for the CPU would
    round the second half of this otherwise.
    """
    images.mul_(factor)
    for image, center, each in zip(images, centers, factors, strict=False):
        image.add_(center, alpha=1 - each)
    images.clamp_(0, 1)


def adjust_gamma_(images: Tensor, gammas: Sequence[float]) -> None:
    """Raise values to a power; values stay above zero, where the power may have no derivative."""
    images.clamp_(1e-8, 1)
    torch._foreach_pow_(list(images), list(gammas))


def adjust_hue_(images: Tensor, turns: Numbers) -> None:
    """Rotate the hue of every pixel in HSV space, by at most a sixth of the circle; the turns are given in sixths."""
    red, green, blue = images.unbind(-3)
    value, low = images.amax(-3), images.amin(-3)
    spread = value - low
    # The hue in sixths of the circle is the peak of the largest channel (red 0, green 2, blue 4) plus the position
    # between the other two. lerp by a weight of 0 or 1 selects exactly, and several times faster than where.
    red_leads, green_leads = (red == value).to(images.dtype), (green == value).to(images.dtype)
    sixths = (red - green).lerp_(blue - red, green_leads).lerp_(green - blue, red_leads)
    sixths /= spread.clamp_min(torch.finfo(images.dtype).tiny)  # the hue of gray does not matter
    sixths += green_leads.mul_(-2).add_(4).mul_(1 - red_leads).unsqueeze(-3).add_(turns).squeeze(-3)
    for channel, peak in ((red, 0), (green, 2), (blue, 4)):
        # A channel is full within a sixth of its peak, zero from two sixths on, and linear between;
        # | |distance| - 3 | is the distance from the opposite side of the circle, also across its seam.
        fullness = sixths.sub(peak).abs_().sub_(3).abs_().sub_(1).clamp_(0, 1)
        torch.addcmul(low, spread, fullness, out=channel)


def adjust_colors_(images: Tensor, colors: Sequence[int], amounts: Sequence[float], numbers: Numbers) -> None:
    """Change the colors of several views, by one step of :func:`schedule`; the amounts are given on the device too."""
    match colors[0]:
        case Color.HUE:
            assert all(abs(sixths) <= 1 for sixths in amounts), "the distance of a hue is folded only once"
            adjust_hue_(images, numbers)
        case Color.GAMMA:
            adjust_gamma_(images, amounts)
        case _:
            num_contrasts, num_centers = colors.count(Color.CONTRAST), len(colors) - colors.count(Color.BRIGHTNESS)
            centers: list[Tensor] = []
            if num_centers:
                gray = to_grayscale(images[:num_centers])
                means = gray[:num_contrasts].mean((-3, -2, -1), keepdim=True) if num_contrasts else ()
                centers = [*means, *gray[num_contrasts:]]
            scale_distances_(images, numbers, amounts, centers)


def schedule(orders: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Return in which steps several views can change colors, each in its own order: pairs of a change and a view.

    Contrasts, saturations and brightnesses, in this order, are one step. Most views that wait for the same come first,
    but the hue, which takes the most kernels, waits for all.

    >>> schedule([(0, 3, 1), (3, 4, 0), (1, 2, 3)])
    [[(1, 2), (0, 0)], [(2, 2)], [(3, 0), (3, 1), (3, 2)], [(1, 0)], [(4, 1)], [(0, 1)]]
    """
    if len(orders) == 1:
        return [[(color, 0)] for color in orders[0]]
    waiting = [list(order) for order in orders]
    steps = []
    while any(waiting):
        counts = Counter(_kind(order[0]) for order in waiting if order)
        kind = max(counts, key=lambda each: (each != Color.HUE, counts[each]))
        ready = [(order.pop(0), view) for view, order in enumerate(waiting) if order and _kind(order[0]) == kind]
        steps.append(sorted(ready, key=lambda each: (each[0] == Color.BRIGHTNESS, each)))
    return steps


def _kind(color: int) -> int:
    return color if color in (Color.HUE, Color.GAMMA) else Color.BRIGHTNESS


def _keeps_layout(image: Tensor) -> bool:
    """Return whether several such batches can be one tensor with the pixels of each in the same order.

    Sums over pixels in another order are rounded otherwise.
    """
    return image.is_contiguous() or (len(image) > 1 and image.is_contiguous(memory_format=torch.channels_last))


def blur(images: Tensor, taps: Sequence[Numbers]) -> Tensor:
    """Blur by shifted sums along one axis and then the other, which consumes a margin of all taps but the central."""
    radius = len(taps) - 1
    if radius == 0:
        return images
    for axis in (-2, -1):
        size = images.shape[axis] - 2 * radius
        blurred = images.narrow(axis, radius, size) * taps[0]
        for offset in range(1, radius + 1):
            for start in (radius - offset, radius + offset):
                part, tap = images.narrow(axis, start, size), taps[offset]
                blurred = blurred.addcmul_(part, tap) if isinstance(tap, Tensor) else blurred.add_(part, alpha=tap)
        images = blurred
    return images


#: Undoing a normalization in half precision misses [0, 1] by about this much.
RANGE_TOLERANCE = 1e-2


@dataclass(frozen=True)
class ImageNormalization:
    """The normalization of images outside the model, ``(image - mean) / std``; None if they are in [0, 1].

    Attributes:
        mean: One value per channel.
        std: One value per channel.
    """

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    def check(self, x: Tensor) -> None:
        """Raise an InputError unless x is a batch of images with values in the declared range."""
        if len(x) == 0:
            return
        if x.ndim != 4 or x.shape[1] not in (1, 3):
            hint = (
                "for one image call x.unsqueeze(0)" if x.ndim == 3 else "for other data give views of your own, or ()"
            )
            raise InputError(
                f"image views take RGB or gray images (N, 3 or 1, H, W), got shape {tuple(x.shape)}: {hint}"
            )
        if self.mean is not None and len(self.mean) != x.shape[1]:
            raise InputError(f"mean and std are for {len(self.mean)} channels, and the images have {x.shape[1]}")
        low, high = self.undo(x).aminmax()

        def make_error() -> InputError:
            declared = "after undoing mean and std" if self.mean else "as no mean and std were given"
            return InputError(
                f"image values range from {low:.3g} to {high:.3g}, and image views expect [0, 1] {declared}; for "
                "images normalized outside the model use views=image_views(mean=..., std=...) with that "
                "normalization (or fast_image_views)"
            )

        check_flag((low >= -RANGE_TOLERANCE) & (high <= 1 + RANGE_TOLERANCE), make_error)

    # Both use Python numbers: creating a tensor of them for each view would make a GPU wait for the CPU.

    def undo(self, x: Tensor) -> Tensor:
        """Return the images in [0, 1]."""
        if self.mean is None or self.std is None:
            return x
        image = x.clone()
        for channel, mean, std in zip(image.unbind(1), self.mean, self.std, strict=True):
            channel.mul_(std).add_(mean)
        return image

    def apply_(self, images: Tensor) -> None:
        """Normalize images in [0, 1] (..., C, H, W)."""
        if self.mean is not None and self.std is not None:
            for channel, mean, std in zip(images.unbind(-3), self.mean, self.std, strict=True):
                channel.sub_(mean).div_(std)


@dataclass(frozen=True)
class ImageView(SplitView):
    """One draw of the parameters of a view, shared by all images of the batch; deterministic.

    Attributes:
        normalization: How the images were normalized outside the model.
        check_range: Whether to check the range of values first.
        color_order: The order of the five changes of color below, as indices.
        brightness: Factor of all values.
        contrast: Factor of the distance from the mean luma of an image.
        saturation: Factor of the distance from the luma of a pixel.
        hue: Rotation of the hue, in turns.
        gamma: Exponent of all values.
        degrees: Rotation of the image.
        translate_x: Translation as a fraction of the padded width.
        translate_y: Translation as a fraction of the padded height.
        scale: Scaling of the image.
        sigma: Standard deviation of the Gaussian blur, in pixels.
        flip: Whether to flip the image horizontally.
        noise_seed: Seed of the Gaussian noise.
        blur_and_noise: Whether to blur and to add noise.
        padding: How the image goes on beyond its edges, ``"edge"`` or ``"reflect"``.
    """

    normalization: ImageNormalization
    check_range: bool
    color_order: tuple[int, ...]
    brightness: float
    contrast: float
    saturation: float
    hue: float
    gamma: float
    degrees: float
    translate_x: float
    translate_y: float
    scale: float
    sigma: float
    flip: bool
    noise_seed: int
    blur_and_noise: bool = True
    padding: Padding = "edge"

    #: Standard deviation of the noise.
    NOISE: ClassVar[float] = 0.005

    @override
    def augment(self, x: Tensor) -> Tensor:
        return self.augment_together([self], x)

    @staticmethod
    def augment_together(views: "Sequence[ImageView]", x: Tensor) -> Tensor:
        """Return the batch as several views show it, which on a GPU takes few kernels.

        Args:
            views: The views.
            x: The batch (N, C, H, W).

        Returns:
            The batch of the first view, then that of the next, ... (views N, C, H, W); equal to those of each view
            alone, on the CPU bit for bit.
        """
        normalization = views[0].normalization
        if any(view.check_range for view in views):
            normalization.check(x)
        # 16 bits are too few for positions in a large image, and torch samples by them unsoundly on the CPU.
        image = normalization.undo(at_least_float32(x)).clamp(0, 1)
        if len(views) > 1 and not (_keeps_layout(image) and all(view.normalization == normalization for view in views)):
            return torch.cat([view.augment(x) for view in views])
        skipped = (Color.SATURATION, Color.HUE) if image.shape[1] == 1 else ()
        changes = schedule([[color for color in view.color_order if color not in skipped] for view in views])
        amounts = [[views[place]._amounts[color] for color, place in step] for step in changes]
        # Sorted by how they are sampled, so that those which are sampled alike are next to each other.
        ways = [(view._blur_radius(image.dtype), view.padding) for view in views]
        order = sorted(range(len(views)), key=lambda place: ways[place])
        *factors, motion, taps = move_numbers(
            [
                *([(amount,) for amount in each] for each in amounts),
                [views[place]._motion(x).numbers for place in order],
                [views[place]._blur_taps for place in order],
            ],
            image,
        )
        images = [image] * len(views)
        for step, given, (numbers,) in zip(changes, amounts, factors, strict=True):
            colors, places = zip(*step, strict=True)
            # The first change of a view is a copy of the image that they share; a single view may overwrite it.
            changed = stack_views([images[place] for place in places], copy=len(views) > 1)
            adjust_colors_(changed, colors, given, numbers)
            for place, each in zip(places, changed, strict=True):
                images[place] = each
        margin = max(ways)[0]
        x_and_y = find_positions(motion, image, margin)
        for way in sorted(set(ways)):
            (radius, padding), cut = way, margin - way[0]
            rows = slice(start := [ways[place] for place in order].index(way), start + ways.count(way))
            alike = order[rows]
            if len(views) > 1:
                x_from, y_from = (
                    each[rows, ..., cut : each.shape[-2] - cut, cut : each.shape[-1] - cut] for each in x_and_y
                )
            else:
                x_from, y_from = x_and_y
            moved = sample_bilinear(stack_views([images[place] for place in alike]), x_from, y_from, padding)
            own_taps = [tap[rows] if isinstance(tap, Tensor) else tap for tap in taps[: radius + 1]]
            for place, each in zip(alike, blur(moved, own_taps), strict=True):
                images[place] = each.flip(-1) if views[place].flip else each
        shown = stack_views(images)
        noisy = [(view, own) for view, own in zip(views, shown, strict=True) if view.blur_and_noise]
        if noisy:
            # A separate generator on the batch's device keeps the view deterministic without a copy from the CPU.
            generators = (torch.Generator(x.device).manual_seed(view.noise_seed) for view, _ in noisy)
            targets = [own for _, own in noisy]
            noise = [current_reducer().randn_like(own, each) for own, each in zip(targets, generators, strict=True)]
            torch._foreach_add_(targets, noise, alpha=views[0].NOISE)
        shown.clamp_(0, 1)
        normalization.apply_(shown)
        return shown.flatten(0, 1).to(x.dtype)

    @override
    def align(self, logits: Tensor, x: Tensor) -> Tensor:
        return self._motion(x).align(logits, x, self.flip)

    @property
    def _amounts(self) -> tuple[float, ...]:
        """How much each of :class:`Color` changes; the hue in sixths of the circle."""
        return self.brightness, self.contrast, self.saturation, 6 * self.hue, self.gamma

    def _motion(self, image: Tensor) -> Motion:
        height, width = image.shape[2:]
        padded_width, padded_height = width + 2 * (width // 2), height + 2 * (height // 2)
        right, down = round(self.translate_x * padded_width), round(self.translate_y * padded_height)
        return Motion(self.degrees, self.scale, right, down, self.padding)

    @property
    def _blur_taps(self) -> list[float]:
        """The weights of a 5-tap Gaussian, from the center outwards."""
        taps = [math.exp(-0.5 * (offset / self.sigma) ** 2) for offset in range(3)]
        return [tap / (taps[0] + 2 * taps[1] + 2 * taps[2]) for tap in taps]

    def _blur_radius(self, dtype: torch.dtype) -> int:
        """Return how many taps beside the center are above rounding error: for most draws none or one."""
        return self.blur_and_noise * sum(tap > torch.finfo(dtype).eps / 4 for tap in self._blur_taps[1:])


#: The uniform ranges of the reference implementation.
COLOR_RANGES = {
    "brightness": (0.6, 1.4),
    "contrast": (0.7, 1.3),
    "saturation": (0.5, 1.5),
    "hue": (-0.06, 0.06),
    "gamma": (0.7, 1.3),
}
BLUR_RANGES = {"sigma": (0.001, 0.5)}


class NormalizedViews(DrawnViews):
    """Views of images in [0, 1], or normalized outside the model.

    Attributes:
        num_views: The number of views of a step.
        mean: The mean of that normalization; None for images in [0, 1].
        std: Its standard deviation.
    """

    num_views: int
    mean: Sequence[float] | None
    std: Sequence[float] | None

    def __post_init__(self) -> None:
        check_num_views(self.num_views, type(self).__name__)
        for name in ("mean", "std"):
            with suppress(TypeError, ValueError):  # of values that are refused next
                object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        if self.mean is None and self.std is None:
            return
        if not (_are_finite(self.mean) and _are_finite(self.std) and len(self.mean) == len(self.std)):
            raise ConfigError(
                f"give mean and std together, one value per channel each, got {self.mean!r} and {self.std!r}"
            )
        if min(self.std) <= 0:
            raise ConfigError(f"std must be above 0, got {self.std!r}")

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


def _are_finite(values: object) -> TypeGuard[tuple[float, ...]]:
    """Return whether these are numbers, at least one."""
    if not isinstance(values, tuple) or not values:
        return False
    return all(isinstance(value, int | float) and abs(value) <= sys.float_info.max for value in values)


@dataclass(frozen=True)
class ImageViews(NormalizedViews):
    """CoTTA's random views for classification: color, affine motion, blur, flip and noise, drawn anew at each step.

    Images are RGB or gray with values in [0, 1]. For images normalized outside the model give the ``mean`` and ``std``
    of that normalization: a view then undoes it, augments, and normalizes again. :data:`image_views` is this class.

    Attributes:
        num_views: The number of views that a step averages over, from 1 to 4096.
        mean: The mean of a normalization outside the model, one value per channel.
        std: The standard deviation of that normalization.
        color: The fraction of the reference's ranges of brightness, contrast, saturation, hue and gamma to draw from,
            about the middle of each range.
        motion: Likewise for rotation, translation and scale.
        balanced: Draw the views of a step together so that they cover the ranges evenly, instead of independently.
        blur_and_noise: Whether views are blurred and noisy; ROID's are not.
        padding: How an image goes on beyond its edges: by the values of its ``"edge"``, or by a ``"reflect"`` as in
            ROID.

    Raises:
        ConfigError: A value is out of range, or only one of ``mean`` and ``std`` is given.

    >>> views = image_views(2).draw(torch.Generator().manual_seed(0))
    >>> [view(lambda x: x.mean((2, 3)), torch.ones(1, 3, 8, 8)).shape for view in views]
    [torch.Size([1, 3]), torch.Size([1, 3])]
    """

    num_views: int = 32
    _: KW_ONLY
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    color: float = 1.0
    motion: float = 1.0
    balanced: bool = False
    blur_and_noise: bool = True
    padding: Padding = "edge"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.blur_and_noise, bool):
            raise TypeError(f"blur_and_noise must be True or False, got {self.blur_and_noise!r}")
        if self.padding not in get_args(Padding):
            raise ConfigError(f"padding must be 'edge' or 'reflect', got {self.padding!r}")
        for name, fraction in (("color", self.color), ("motion", self.motion)):
            if not isinstance(fraction, Real) or not 0 <= fraction <= 1:
                raise ConfigError(f"{name} is a fraction of the reference's ranges, from 0 to 1, got {fraction!r}")

    @override
    def __repr__(self) -> str:
        # Results compare this text, so later settings are shown only where they are not the defaults.
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


#: How :class:`ImageViews` is called where it is used.
image_views = ImageViews


def fast_image_views(
    num_views: int = 8, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> ImageViews:
    """Return few views that replace the reference's 32: balanced, and drawn from narrower ranges.

    The constants were chosen by ``benchmarks/choose/fast_views.py``; ``docs/how-to/speed.md`` shows the error against
    the number of views.

    Args:
        num_views: The number of views.
        mean: See :class:`ImageViews`.
        std: See :class:`ImageViews`.

    Returns:
        An object that draws the views of each step.
    """
    return image_views(num_views, color=0.75, motion=0.5, balanced=True, mean=mean, std=std)

"""Views that flip, move and scale images and leave their values alone, which may have any range."""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain
from numbers import Real
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.core.parallel import check_flag
from ctta.errors import ConfigError, InputError
from ctta.functional import at_least_float32
from ctta.nn.surgery import resize
from ctta.views.average import DrawnViews, FittingView, Model, SplitView

#: The uniform ranges of the reference implementation of CoTTA. A translation is a fraction of the padded size, which is
#: twice the image's.
MOTION_RANGES = {
    "degrees": (-15.0, 15.0),
    "translate_x": (-1 / 16, 1 / 16),
    "translate_y": (-1 / 16, 1 / 16),
    "scale": (0.9, 1.1),
}
#: The largest number of views of a step, 128 times the reference's: more are a mistake.
MAX_VIEWS = 4096
#: How an image goes on beyond its edges.
Padding = Literal["edge", "reflect"]


@dataclass(frozen=True)
class Motion:
    """A rotation and scaling about the center of an image, then a translation by whole pixels.

    Attributes:
        degrees: The angle of the rotation.
        scale: The factor of the scaling.
        right: Pixels to the right.
        down: Pixels downwards.
        padding: How the image goes on beyond its edges: by the values of the ``"edge"``, or by a ``"reflect"`` about
            the outermost pixels.
    """

    degrees: float
    scale: float
    right: int
    down: int
    padding: Padding = "edge"

    @property
    def numbers(self) -> tuple[float, ...]:
        """What :func:`find_positions` needs."""
        return (*self._cos_sin, self.scale, self.right, self.down)

    def undo(self, logits: Tensor) -> Tensor:
        """Return dense logits of the moved image, moved back; pixels out of sight take the nearest logits."""
        height, width = logits.shape[2:]
        x, y = _pixel_offsets(width, 0, logits)[None, :], _pixel_offsets(height, 0, logits)[:, None]
        cos, sin = self._cos_sin
        moved_x = (x * cos - y * sin) * self.scale + self.right
        moved_y = (x * sin + y * cos) * self.scale + self.down
        return sample_bilinear(logits.unsqueeze(0), moved_x, moved_y)[0]

    def align(self, logits: Tensor, x: Tensor, flip: bool) -> Tensor:
        """Return the logits of a moved and then, if asked, flipped batch ``x`` where its pixels are.

        Those with one prediction per image are returned as they are.
        """
        if logits.ndim < x.ndim:
            return logits
        exact = at_least_float32(logits)
        return self.undo(exact.flip(-1) if flip else exact).to(logits.dtype)

    @property
    def _cos_sin(self) -> tuple[float, float]:
        return math.cos(math.radians(self.degrees)), math.sin(math.radians(self.degrees))


#: A number of each of several views, as a tensor (views, 1, 1, 1, 1), or that of a single one.
Numbers = Tensor | float


def move_numbers(tables: Iterable[Sequence[Sequence[float]]], like: Tensor) -> list[list[Numbers]]:
    """Return the columns of tables (views, numbers) on a device, by one copy to it; those of one view as they are."""
    columns = [list(zip(*table, strict=True)) for table in tables]
    flat = list(chain(*columns))
    if all(len(column) == 1 for column in flat):
        return [[float(column[0]) for column in table] for table in columns]
    moved = torch.tensor(list(chain(*flat)), dtype=like.dtype).to(like.device)
    parts = iter(moved.split([len(column) for column in flat]))
    return [[next(parts).view(-1, 1, 1, 1, 1) for _ in table] for table in columns]


def find_positions(numbers: Sequence[Numbers], image: Tensor, margin: int = 0) -> tuple[Tensor, Tensor]:
    """Return where the pixels of moved images were, from the center, x and y: (views, 1, 1, H, W), or (H, W) of one.

    The reference implementation pads by half an image, moves, blurs and crops back. Sampling only what the crop keeps,
    with values beyond the edge, gives the same pixels for a quarter of the work.

    Args:
        numbers: The columns of :attr:`Motion.numbers` of the views, by :func:`move_numbers`.
        image: The images of a view (N, C, H, W).
        margin: How many pixels are wanted on every side beyond the edges.
    """
    height, width = image.shape[2:]
    cos, sin, scale, right, down = numbers
    x = _pixel_offsets(width, margin, image)[None, :] - right
    y = _pixel_offsets(height, margin, image)[:, None] - down
    return (x * cos + y * sin) / scale, (y * cos - x * sin) / scale


def _pixel_offsets(size: int, margin: int, like: Tensor) -> Tensor:
    """Return the offsets from the center of the pixels along an axis, with a margin on either side."""
    return torch.arange(-margin, size + margin, device=like.device, dtype=like.dtype) - (size - 1) / 2


def sample_bilinear(images: Tensor, x: Tensor, y: Tensor, padding: Padding = "edge") -> Tensor:
    """Return the images of each view (views, N, C, H, W) at offsets from their center, as of :func:`find_positions`."""
    height, width = images.shape[3:]
    # With aligned corners the centers of the outermost pixels are at -1 and 1, and reflect.
    reflects = padding == "reflect"
    across, along = (max(width - 1, 1), max(height - 1, 1)) if reflects else (width, height)
    grid = torch.stack([x * (2 / across), y * (2 / along)], -1).expand(*images.shape[:2], 1, -1, -1, -1)
    sampled: Tensor = F.grid_sample(
        images.flatten(0, 1),
        grid.flatten(0, 2),
        mode="bilinear",
        padding_mode="reflection" if reflects else "border",
        align_corners=reflects,
    )
    return sampled.view(*images.shape[:2], *sampled.shape[1:])


def stack_views(images: Sequence[Tensor], *, copy: bool = False) -> Tensor:
    """Return the batches of several views as one tensor (views, N, C, H, W); a single one is copied only if asked."""
    if len(images) == 1 and not copy:
        return images[0].unsqueeze(0)
    # Unlike torch.stack this keeps their memory format.
    stacked: Tensor = torch.cat(list(images)).unflatten(0, (len(images), len(images[0])))
    return stacked


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


#: Larger images are a mistake: they take over 256 times the memory.
MAX_SCALE = 16
#: What to round the sides of an image to, in this order, until a network takes it: strides of usual networks.
MULTIPLES = (2, 4, 8, 16, 32, 64)
#: Images without a negative value and with a larger one than this are in 0 to 255, whatever a network expects.
MAX_VALUE = 16

# The multiple that each network needs, by the size of the images and the scale. What was found is found again by any
# other copy of the network, so this saves time only, and results do not depend on it.
_fits: WeakKeyDictionary[nn.Module, dict[tuple[tuple[int, ...], float], int]] = WeakKeyDictionary()


def multiscale_flip(
    scales: Sequence[float] = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0), *, multiple_of: int | None = None
) -> tuple["ScaledView", ...]:
    """Return the views of CoTTA's reference implementation for segmentation: each scale, unflipped and flipped.

    Args:
        scales: Factors of height and width; the defaults are the reference's.
        multiple_of: Round the sides of scaled images to multiples of this number, for networks that take no others.
            By default only where the network fails, to the smallest power of two with which it does not.

    Returns:
        Two views per scale.

    Raises:
        ConfigError: There is no scale, or one that is not above 0 and at most 16, or ``multiple_of`` is below 1.

    >>> len(multiscale_flip())
    14
    """
    if not scales:
        raise ConfigError("multiscale_flip needs at least one scale")
    return tuple(ScaledView(float(scale), flip, multiple_of) for scale in scales for flip in (False, True))


@dataclass(frozen=True)
class ScaledView(FittingView):
    """The batch resized and, if asked, flipped horizontally; dense logits are brought back.

    Attributes:
        scale: The factor of height and width, above 0 and at most 16.
        flip: Whether to flip the images horizontally.
        multiple_of: What height and width are rounded to; None for whole pixels, or what the network turns out to need.
    """

    scale: float
    flip: bool
    multiple_of: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.scale, Real) or not 0 < self.scale <= MAX_SCALE:
            raise ConfigError(f"the scale of a view must be above 0 and at most {MAX_SCALE}, got {self.scale!r}")
        if self.multiple_of is not None and (type(self.multiple_of) is not int or self.multiple_of < 1):
            raise ConfigError(f"multiple_of must be an integer of at least 1, got {self.multiple_of!r}")

    @override
    def __repr__(self) -> str:
        # Results compare this text, so the later setting is shown only where it is given.
        later = "" if self.multiple_of is None else f", multiple_of={self.multiple_of}"
        return f"ScaledView(scale={self.scale}, flip={self.flip}{later})"

    @override
    def __call__(self, model: Model, x: Tensor) -> Tensor:
        view = self.recall(model, x)
        try:
            logits = model(view.augment(x))
        except Exception as error:
            fitted = view.fit(model, x, error)
            if fitted == view:
                raise
            return fitted(model, x)
        return view.align(logits, x)

    @override
    def augment(self, x: Tensor) -> Tensor:
        return resize(x.flip(-1) if self.flip else x, self._scale_size(x))

    @override
    def align(self, logits: Tensor, x: Tensor) -> Tensor:
        if logits.ndim < x.ndim:
            return logits  # one prediction per image: no position to undo
        if logits.shape[2:] != x.shape[2:]:
            logits = resize(logits, x.shape[2:])
        return logits.flip(-1) if self.flip else logits

    @override
    def recall(self, model: Model, x: Tensor) -> "ScaledView":
        if self.multiple_of is not None or not isinstance(model, nn.Module):
            return self
        multiple = _fits.get(model, {}).get(self._key(x))
        return self if multiple is None else replace(self, multiple_of=multiple)

    @override
    def fit(self, model: Model, x: Tensor, error: Exception) -> "ScaledView":
        if not _may_be_due_to_size(error):
            return self
        for view in self._rounded(x):
            try:
                model(view.augment(x))
            except Exception as other:
                if not _may_be_due_to_size(other):
                    raise
                continue
            if isinstance(model, nn.Module) and view.multiple_of is not None:
                _fits.setdefault(model, {})[self._key(x)] = view.multiple_of
            return view
        flip = ", flip" if self.flip else ""
        pixels = "x".join(map(str, self._scale_size(x)))
        error.add_note(
            f"View scale {self.scale:g}{flip}: the network failed on {pixels} pixels. If it takes only multiples of a "
            "number, give it, such as views=ctta.views.multiscale_flip(multiple_of=32), or give other scales."
        )
        return self

    def check(self, x: Tensor) -> None:
        """Raise an InputError for RGB or gray images in 0 to 255.

        Images in [0, 1] pass, and so do images that were normalized outside the model.

        Args:
            x: The batch.
        """
        if x.ndim != 4 or x.shape[1] not in (1, 3) or x.numel() == 0:
            return
        low, high = x.aminmax()

        def make_error() -> InputError:
            return InputError(
                f"image values range from {low:.3g} to {high:.3g}, as of images in 0 to 255; expected [0, 1], or "
                "images normalized for the network: divide them by 255, and let a network that takes 0 to 255 multiply "
                "its input itself"
            )

        check_flag((low < 0) | (high <= MAX_VALUE), make_error)

    def _scale_size(self, x: Tensor) -> list[int]:
        """Return the sides of the scaled image."""
        if self.multiple_of is None:
            return [max(1, round(side * self.scale)) for side in x.shape[2:]]
        return [self.multiple_of * max(1, round(side * self.scale / self.multiple_of)) for side in x.shape[2:]]

    def _rounded(self, x: Tensor) -> list["ScaledView"]:
        """Return this view with every multiple that gives it another size, each size once."""
        if self.multiple_of is not None:
            return []
        views: dict[tuple[int, ...], ScaledView] = {}
        for multiple in MULTIPLES:
            view = replace(self, multiple_of=multiple)
            views.setdefault(tuple(view._scale_size(x)), view)
        tried = {tuple(self._scale_size(x)), tuple(x.shape[2:])}  # at its own size an image would only be repeated
        return [view for size, view in views.items() if size not in tried]

    def _key(self, x: Tensor) -> tuple[tuple[int, ...], float]:
        return tuple(x.shape[2:]), self.scale


def _may_be_due_to_size(error: Exception) -> bool:
    """Return whether a network can have failed since it does not take the size of its input."""
    own = InputError | ConfigError | torch.OutOfMemoryError
    return isinstance(error, RuntimeError | ValueError | AssertionError) and not isinstance(error, own)


def check_num_views(num_views: int, owner: str) -> None:
    """Raise a ConfigError unless a step can have this number of views."""
    if not hasattr(num_views, "__index__") or not 1 <= operator.index(num_views) <= MAX_VIEWS:
        raise ConfigError(f"{owner} takes 1 to {MAX_VIEWS} views, got {num_views!r}; for none at all give views=()")


@dataclass(frozen=True)
class GeometricViews(DrawnViews):
    """The flipped images, and random rotations, translations, scalings and flips of them.

    The moved views of a step are drawn together, so that they cover the ranges evenly. Unlike those of
    :class:`ImageViews` they leave values as they are: images may be in [0, 1], normalized for the network, or have any
    number of channels. :data:`geometric_views` is this class.

    Attributes:
        num_views: The number of views that a step averages over, from 1 to 4096. The first only flips.
        motion: The fraction of the ranges of CoTTA's views to draw from, about the middle of each range.

    Raises:
        ConfigError: A value is out of range.

    >>> views = geometric_views(2).draw(torch.Generator().manual_seed(0))
    >>> [view(lambda x: x.mean((2, 3)), torch.ones(1, 5, 8, 8)).shape for view in views]
    [torch.Size([1, 5]), torch.Size([1, 5])]
    """

    num_views: int = 4
    _: KW_ONLY
    motion: float = 0.5

    def __post_init__(self) -> None:
        check_num_views(self.num_views, "GeometricViews")
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


#: How :class:`GeometricViews` is called where it is used.
geometric_views = GeometricViews


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
        return self.augment_together([self], x)

    @staticmethod
    def augment_together(views: "Sequence[MovedView]", x: Tensor) -> Tensor:
        """Return the batch as several views show it (views N, ...)."""
        # 16 bits are too few for positions in a large image, and torch samples by them unsoundly on the CPU.
        image = at_least_float32(x)
        (numbers,) = move_numbers([[view._motion(x).numbers for view in views]], image)
        moved = sample_bilinear(image.expand(len(views), *x.shape), *find_positions(numbers, image))
        images = [each.flip(-1) if view.flip else each for view, each in zip(views, moved, strict=True)]
        return stack_views(images).flatten(0, 1).to(x.dtype)

    @override
    def align(self, logits: Tensor, x: Tensor) -> Tensor:
        return self._motion(x).align(logits, x, self.flip)

    def _motion(self, image: Tensor) -> Motion:
        height, width = image.shape[2:]
        return Motion(
            self.degrees, self.scale, round(2 * self.translate_x * width), round(2 * self.translate_y * height)
        )

"""AugMix: an image is mixed with three chains of operations on it. These are the views of MEMO."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from ctta.errors import ConfigError
from ctta.functional import at_least_float32
from ctta.views.average import SplitView
from ctta.views.image import ImageNormalization, NormalizedViews

#: What is beyond the edges of a moved image. Public code asks Pillow for the color 128, which of an RGB image is a red.
FILL = 128.0


def autocontrast(image: Tensor) -> Tensor:
    """Stretch the values of each channel to the whole range; a channel of one value stays as it is.

    Pillow gets one less for a few values whose exact result is whole.
    """
    low, high = image.amin((2, 3), keepdim=True), image.amax((2, 3), keepdim=True)
    stretched = ((image - low) * 255).div_((high - low).clamp_min(1)).floor_()
    return torch.where(high > low, stretched, image)


def equalize(image: Tensor) -> Tensor:
    """Spread the values of each channel so that all are about equally frequent."""
    shape = image.shape
    values = image.long().flatten(2).flatten(0, 1)
    counts = torch.zeros(len(values), 256, dtype=torch.long, device=image.device)
    counts.scatter_add_(1, values, torch.ones_like(values))
    last = counts.gather(1, values.amax(1, keepdim=True))
    step = (values.shape[1] - last) // 255
    below = counts.cumsum(1) - counts
    table = (step // 2 + below).div(step.clamp_min(1), rounding_mode="floor").clamp_max_(255)
    equalized = torch.where(step > 0, table.gather(1, values), values)
    return equalized.view(shape).to(image.dtype)


def posterize(image: Tensor, bits: int) -> Tensor:
    """Keep the highest bits of each value, from 0 to 8."""
    step = 2 ** (8 - bits)
    kept: Tensor = (image / step).floor_().mul_(step)
    return kept


def solarize(image: Tensor, threshold: Tensor | float) -> Tensor:
    """Invert all values from a threshold on, which may be one per image (N, 1, 1, 1)."""
    return torch.where(image < threshold, image, 255 - image)


def rotation(degrees: float, height: int, width: int) -> list[list[float]]:
    """Return the affine map of a counterclockwise rotation about the center, for :func:`transform`."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    right = width / 2 - cos * width / 2 + sin * height / 2
    down = height / 2 - sin * width / 2 - cos * height / 2
    return [[cos, -sin, right], [sin, cos, down]]


def transform(image: Tensor, maps: Tensor) -> Tensor:
    """Move the pixels of each image by an affine map of its own, with bilinear interpolation, rounding down.

    The rows (a, b, c) of a map, for the horizontal and the vertical axis (N, 2, 3), are in double precision on the CPU.
    The pixel at (x, y) shows what was at a x + b y + c, where centers of pixels are at halves; red, or gray, where
    nothing was.
    """
    height, width = image.shape[2:]
    # On the CPU in double precision, since positions decide which pixels are mixed; the images may be on a GPU.
    x = torch.arange(width, dtype=torch.float64) + 0.5
    y = torch.arange(height, dtype=torch.float64).unsqueeze(1) + 0.5
    a, b, c = maps[..., None, None].unbind(2)
    from_x, from_y = (a * x + b * y + c).unbind(1)  # (N, H, W)
    is_outside = (from_x < 0) | (from_x >= width) | (from_y < 0) | (from_y >= height)
    (left, right, x_share), (top, bottom, y_share) = _neighbors(from_x, width), _neighbors(from_y, height)
    flat = image.flatten(2)
    places = torch.stack([row * width + column for row in (top, bottom) for column in (left, right)])
    places = places.flatten(2).unsqueeze(2).to(image.device)  # together, since each copy to a device takes a while
    shares = torch.stack([x_share, y_share, is_outside]).unsqueeze(2).to(image.dtype).to(image.device)
    is_outside = shares[2, :, 0] != 0

    def mix(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
        # Not lerp, which may round the mixture of equal values to less than they are.
        return other.sub_(one).mul_(share).add_(one)

    corners = (flat.gather(2, each.expand(-1, image.shape[1], -1)).view_as(image) for each in places)
    top_left, top_right, bottom_left, bottom_right = corners
    moved = mix(mix(top_left, top_right, shares[0]), mix(bottom_left, bottom_right, shares[0]), shares[1]).floor_()
    moved[:, 0].masked_fill_(is_outside, FILL)
    moved[:, 1:].masked_fill_(is_outside.unsqueeze(1), 0.0)
    return moved


def _neighbors(position: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pixels before and after positions along an axis, and the share of the one after."""
    position = position - 0.5
    before = position.floor()
    first, second = ((before + offset).clamp(0, size - 1).long() for offset in (0, 1))
    return first, second, position - before


Crop = Literal["pad", "resize", "none"]
OPERATIONS = (
    "autocontrast",
    "equalize",
    "rotate",
    "solarize",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "posterize",
)
NUM_CHAINS, MAX_DEPTH = 3, 3
#: The range of the level of an operation, at the severity of MEMO's code, in tenths of the largest change.
LEVELS = (0.1, 1.0)
IDENTITY = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


def apply_operations_(images: Tensor, operations: Sequence[tuple[str, float] | None]) -> None:
    """Apply an operation of AugMix to each image (N, 3 or 1, H, W) of bytes; those of a kind together, which is faster.

    An operation is one of :data:`OPERATIONS` with its strength from 0.1 to 1, negative to the other side for those that
    have one. None leaves the image as it is.
    """
    height, width = images.shape[2:]
    rows: dict[str, list[int]] = {}
    settings: dict[str, list[Any]] = {}
    for row, operation in enumerate(operations):
        if operation is None:
            continue
        name, level = operation
        match name:
            case "autocontrast" | "equalize":
                setting: Any = None
            case "posterize":
                setting = 4 - int(abs(level) * 4 / 10)
                name = f"posterize {setting}"
            case "solarize":
                setting = 256.0 - int(abs(level) * 256 / 10)
            case _:
                setting = _find_map(name, level, height, width)
                name = "transform"
                if setting == IDENTITY:
                    continue
        rows.setdefault(name, []).append(row)
        settings.setdefault(name, []).append(setting)
    indices = torch.tensor([row for places in rows.values() for row in places], dtype=torch.long).to(images.device)
    for name, index in zip(rows, indices.split([len(places) for places in rows.values()]), strict=True):
        images[index] = _apply_to_all(images[index], name, settings[name])


def _apply_to_all(images: Tensor, name: str, settings: list[Any]) -> Tensor:
    """Return the images after one kind of operation, with a setting for each."""
    match name:
        case "autocontrast":
            return autocontrast(images)
        case "equalize":
            return equalize(images)
        case "solarize":
            return solarize(images, torch.tensor(settings, dtype=images.dtype, device=images.device).view(-1, 1, 1, 1))
        case "transform":
            return transform(images, torch.tensor(settings, dtype=torch.float64))
        case _:
            return posterize(images, settings[0])


def _find_map(name: str, level: float, height: int, width: int) -> list[list[float]]:
    """Return the affine map of an operation that moves pixels."""
    match name:
        case "rotate":
            return rotation(int(level * 30 / 10), height, width)
        case "shear_x":
            return [[1.0, level * 0.3 / 10, 0.0], [0.0, 1.0, 0.0]]
        case "shear_y":
            return [[1.0, 0.0, 0.0], [level * 0.3 / 10, 1.0, 0.0]]
        case "translate_x":
            return [[1.0, 0.0, float(int(level * width / 3 / 10))], [0.0, 1.0, 0.0]]
        case "translate_y":
            return [[1.0, 0.0, 0.0], [0.0, 1.0, float(int(level * height / 3 / 10))]]
        case _:
            raise ConfigError(f"AugMix has no operation {name!r}: expected one of {', '.join(OPERATIONS)}")


@dataclass(frozen=True)
class AugMixView(SplitView):
    """One draw of the parameters of a view, shared by all images of the batch; deterministic.

    Attributes:
        normalization: How the images were normalized outside the model.
        crop: How the image is cropped first.
        crop_draws: Uniform numbers that decide the crop.
        flip: Whether to flip the image horizontally.
        chains: The operations of each chain, with their levels.
        weights: The weight of each chain; they add up to 1.
        own_weight: The weight of the cropped image itself; the chains have the rest.
    """

    normalization: ImageNormalization
    crop: Crop
    crop_draws: tuple[tuple[float, ...], ...]
    flip: bool
    chains: tuple[tuple[tuple[str, float], ...], ...]
    weights: tuple[float, ...]
    own_weight: float

    @override
    def augment(self, x: Tensor) -> Tensor:
        return self.augment_together([self], x)

    @staticmethod
    def augment_together(views: "Sequence[AugMixView]", x: Tensor) -> Tensor:
        """Return the batch as several views show it, of one :class:`AugMixViews`.

        Args:
            views: The views.
            x: The batch (N, ...).

        Returns:
            The batch of the first view, then that of the next, ... (views N, ...); equal to those of each view alone.
        """
        normalization = views[0].normalization
        original = normalization.undo(at_least_float32(x)).clamp(0, 1)
        images = torch.cat([view._show(original) for view in views])
        changed = images.mul(255).round_().repeat(NUM_CHAINS, 1, 1, 1)
        chains = [view.chains[number] for number in range(NUM_CHAINS) for view in views for _ in range(len(x))]
        for depth in range(MAX_DEPTH):
            apply_operations_(changed, [chain[depth] if depth < len(chain) else None for chain in chains])
        weights = torch.tensor([[view.own_weight, *view.weights] for view in views], dtype=torch.float64)
        weights[:, 1:] *= (1 - weights[:, :1]) / 255
        columns = weights.to(images.device, images.dtype).repeat_interleave(len(x), 0).T
        own, *others = columns.reshape(-1, len(images), 1, 1, 1)
        mixed: Tensor = images * own
        for part, weight in zip(changed.chunk(NUM_CHAINS), others, strict=True):
            mixed.addcmul_(part, weight)
        mixed.clamp_(0, 1)  # the weights add up to 1 but for rounding
        normalization.apply_(mixed)
        return mixed.to(x.dtype)

    @override
    def align(self, logits: Tensor, x: Tensor) -> Tensor:
        if logits.ndim < x.ndim:
            return logits  # one prediction per image
        raise ConfigError(
            "a view of AugMix mixes several motions, so logits of pixels cannot be moved back: use views=image_views()"
        )

    def _show(self, image: Tensor) -> Tensor:
        """Return the image cropped and flipped."""
        cropped = self._crop(image)
        return cropped.flip(-1) if self.flip else cropped

    def _crop(self, image: Tensor) -> Tensor:
        height, width = image.shape[2:]
        if self.crop == "pad":
            down, right = height // 8, width // 8
            (vertical, horizontal, *_), *_ = self.crop_draws
            top, left = int(vertical * (2 * down + 1)), int(horizontal * (2 * right + 1))
            padded: Tensor = F.pad(image, (right, right, down, down))
            return padded[:, :, top : top + height, left : left + width]
        if self.crop == "resize":
            top, left, rows, columns = find_crop(height, width, self.crop_draws)
            part = image[:, :, top : top + rows, left : left + columns]
            resized: Tensor = F.interpolate(part, (height, width), mode="bilinear", align_corners=False, antialias=True)
            return resized.clamp_(0, 1)
        return image


def find_crop(height: int, width: int, draws: Sequence[Sequence[float]]) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a part of an image: 8 % to 100 % of its area, and sides of 3/4 to 4/3.

    Each attempt has four uniform numbers: area, ratio, and two positions. The first part that fits counts, else the
    largest allowed one in the center.
    """
    for area, ratio, vertical, horizontal in draws:
        target = height * width * (0.08 + 0.92 * area)
        aspect = math.exp(math.log(3 / 4) + ratio * 2 * math.log(4 / 3))
        rows, columns = round(math.sqrt(target / aspect)), round(math.sqrt(target * aspect))
        if 0 < rows <= height and 0 < columns <= width:
            return int(vertical * (height - rows + 1)), int(horizontal * (width - columns + 1)), rows, columns
    rows, columns = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


@dataclass(frozen=True)
class AugMixViews(NormalizedViews):
    """AugMix's random views, as MEMO's code has them; drawn anew at each step.

    Images are RGB or gray with values in [0, 1], and are treated as bytes. Each view is cropped and flipped; then it is
    mixed with three chains of one to three operations each: autocontrast, equalize, rotate, solarize, shear, translate
    and posterize. :data:`augmix_views` is this class.

    Attributes:
        num_views: The number of views, 32 for CIFAR and 64 for ImageNet in MEMO.
        crop: ``"pad"`` shifts by up to an eighth of a side, as for CIFAR; ``"resize"`` shows a part, of 8 % to 100 %
            of the area, in the original size, as for ImageNet; ``"none"`` shows the whole image.
        mean: The mean of a normalization outside the model, one value per channel.
        std: The standard deviation of that normalization.

    Raises:
        ConfigError: A value is out of range, or only one of ``mean`` and ``std`` is given.

    >>> view, = augmix_views(1).draw(torch.Generator().manual_seed(0))
    >>> view.augment(torch.rand(2, 3, 8, 8)).shape
    torch.Size([2, 3, 8, 8])
    """

    num_views: int = 32
    _: KW_ONLY
    crop: Crop = "pad"
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop not in get_args(Crop):
            raise ConfigError(f"crop must be 'pad', 'resize' or 'none', got {self.crop!r}")

    @override
    def draw(self, generator: torch.Generator) -> list[AugMixView]:
        return [self._draw_view(generator) for _ in range(self.num_views)]

    def _draw_view(self, generator: torch.Generator) -> AugMixView:
        # One call for all numbers of a view: most time of a draw is spent on calls.
        attempts, per_chain = 10, 1 + 3 * MAX_DEPTH
        numbers = torch.rand(2 + NUM_CHAINS * (1 + per_chain) + 4 * attempts, generator=generator, dtype=torch.float64)
        flip, own_weight, *rest = numbers.tolist()
        shares = [-math.log1p(-rest.pop()) for _ in range(NUM_CHAINS)]  # normalized exponentials are Dirichlet(1, 1, 1)
        chains = []
        for _ in range(NUM_CHAINS):
            depth, *draws = (rest.pop() for _ in range(per_chain))
            chains.append(
                tuple(_draw_operation(*draws[i : i + 3]) for i in range(0, 3 * (1 + int(depth * MAX_DEPTH)), 3))
            )
        return AugMixView(
            self.normalization,
            self.crop,
            tuple(tuple(rest[i : i + 4]) for i in range(0, 4 * attempts, 4)),
            flip < 0.5,
            tuple(chains),
            tuple(share / sum(shares) for share in shares),
            own_weight,
        )


def _draw_operation(which: float, level: float, side: float) -> tuple[str, float]:
    """Return an operation and its level from uniform numbers."""
    low, high = LEVELS
    return OPERATIONS[int(which * len(OPERATIONS))], math.copysign(low + (high - low) * level, side - 0.5)


#: How :class:`AugMixViews` is called where it is used.
augmix_views = AugMixViews

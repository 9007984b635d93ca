"""Operations on images of bytes, as Pillow computes them: AugMix is defined by them.

Images are (N, 3 or 1, H, W) of a floating-point dtype, with whole values from 0 to 255.
"""

import math

import torch
from torch import Tensor

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
    """Keep the highest bits of each value.

    Args:
        image: The images.
        bits: How many, from 0 to 8.

    Returns:
        New images.
    """
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

    Args:
        image: The images (N, C, H, W).
        maps: Rows (a, b, c) for the horizontal and the vertical axis (N, 2, 3), in double precision on the CPU. The
            pixel at (x, y) shows what was at a x + b y + c; centers of pixels are at halves.

    Returns:
        New images; red, or gray, where nothing was.
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

    def pick(rows: Tensor, columns: Tensor) -> Tensor:
        places = (rows * width + columns).flatten(1).unsqueeze(1).to(image.device)
        return flat.gather(2, places.expand(-1, image.shape[1], -1)).view_as(image)

    def mix(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
        # Not lerp, which may round the mixture of equal values to less than they are.
        return other.sub_(one).mul_(share.unsqueeze(1).to(image.device, image.dtype)).add_(one)

    upper = mix(pick(top, left), pick(top, right), x_share)
    lower = mix(pick(bottom, left), pick(bottom, right), x_share)
    moved = mix(upper, lower, y_share).floor_()
    is_outside = is_outside.to(image.device)
    moved[:, 0].masked_fill_(is_outside, FILL)
    moved[:, 1:].masked_fill_(is_outside.unsqueeze(1), 0.0)
    return moved


def _neighbors(position: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pixels before and after positions along an axis, and the share of the one after."""
    position = position - 0.5
    before = position.floor()
    first, second = ((before + offset).clamp(0, size - 1).long() for offset in (0, 1))
    return first, second, position - before

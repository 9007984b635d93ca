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
    return (image / step).floor_().mul_(step)


def solarize(image: Tensor, threshold: float) -> Tensor:
    """Invert all values from a threshold on."""
    return torch.where(image < threshold, image, 255 - image)


def rotate(image: Tensor, degrees: float) -> Tensor:
    """Rotate about the center, counterclockwise."""
    if degrees == 0:
        return image
    height, width = image.shape[2:]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    right = width / 2 - cos * width / 2 + sin * height / 2
    down = height / 2 - sin * width / 2 - cos * height / 2
    return transform(image, (cos, -sin, right), (sin, cos, down))


def transform(image: Tensor, x_row: tuple[float, float, float], y_row: tuple[float, float, float]) -> Tensor:
    """Move pixels by an affine map, with bilinear interpolation, rounding down.

    Args:
        image: The images.
        x_row: (a, b, c): the pixel at (x, y) shows what was at a x + b y + c horizontally; centers of pixels are at
            halves.
        y_row: Likewise vertically.

    Returns:
        New images; red, or gray, where nothing was.
    """
    if (x_row, y_row) == ((1, 0, 0), (0, 1, 0)):
        return image
    height, width = image.shape[2:]
    # On the CPU in double precision, since positions decide which pixels are mixed; the images may be on a GPU.
    x = torch.arange(width, dtype=torch.float64) + 0.5
    y = torch.arange(height, dtype=torch.float64).unsqueeze(1) + 0.5
    from_x, from_y = (row[0] * x + row[1] * y + row[2] for row in (x_row, y_row))
    is_inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    flat = image.flatten(2)

    def pick(rows: Tensor, columns: Tensor) -> Tensor:
        return flat.index_select(2, (rows * width + columns).flatten().to(image.device)).view_as(image)

    def mix(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
        # Not lerp, which may round the mixture of equal values to less than they are.
        return other.sub_(one).mul_(share.to(image.device, image.dtype)).add_(one)

    (left, right, x_share), (top, bottom, y_share) = _neighbors(from_x, width), _neighbors(from_y, height)
    moved = pick(top, left)
    if x_share.any():
        moved = mix(moved, pick(top, right), x_share)
    if y_share.any():
        lower = pick(bottom, left)
        moved = mix(moved, mix(lower, pick(bottom, right), x_share) if x_share.any() else lower, y_share)
    moved.floor_()
    if not is_inside.all():
        is_outside = ~is_inside.to(image.device)
        moved[:, 0].masked_fill_(is_outside, FILL)
        moved[:, 1:].masked_fill_(is_outside, 0.0)
    return moved


def _neighbors(position: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pixels before and after positions along an axis, and the share of the one after."""
    position = position - 0.5
    before = position.floor()
    pair = ((before + offset).clamp(0, size - 1).long() for offset in (0, 1))
    return *pair, position - before

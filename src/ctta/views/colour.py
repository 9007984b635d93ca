"""Colour changes of image batches (N, 3 or 1, H, W) in [0, 1], each clamped back to [0, 1]."""

import torch
from torch import Tensor

#: ITU-R 601 luma, to the four digits that the reference transforms use.
LUMA = (0.2989, 0.587, 0.114)


def grey(image: Tensor) -> Tensor:
    """Brightness of every pixel, (N, 1, H, W)."""
    if image.shape[1] == 1:
        return image
    red, green, blue = image.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).unsqueeze(1)


def adjust_contrast(image: Tensor, factor: float) -> Tensor:
    """Spread values about each image's mean grey."""
    middle = grey(image).mean((1, 2, 3), keepdim=True)
    return (factor * image + (1 - factor) * middle).clamp(0, 1)


def adjust_saturation(image: Tensor, factor: float) -> Tensor:
    """Spread colours about each pixel's grey."""
    return (factor * image + (1 - factor) * grey(image)).clamp(0, 1) if image.shape[1] == 3 else image


def adjust_gamma(image: Tensor, gamma: float) -> Tensor:
    """Raise values to a power; kept off zero, where the power has no derivative."""
    return image.clamp(1e-8, 1) ** gamma


def adjust_hue(image: Tensor, turns: float) -> Tensor:
    """Turn the hue of every pixel in HSV space, value and saturation kept."""
    if image.shape[1] == 1:
        return image
    value, low = image.amax(1), image.amin(1)
    spread = value - low
    red, green, blue = image.unbind(1)
    safe = torch.where(spread > 0, spread, 1)
    # Hue in sixths of the circle: which channel is largest, and where between its neighbours.
    sixths = torch.where(
        red == value,
        (green - blue) / safe,
        torch.where(green == value, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sixths = (sixths + 6 * turns) % 6
    # Each channel is a trapezoid over the hue circle, shifted by a third of it.
    channels = [
        value - spread * torch.minimum(place, 4 - place).clamp(0, 1)
        for place in ((offset + sixths) % 6 for offset in (5.0, 3.0, 1.0))
    ]
    return torch.stack(channels, 1)

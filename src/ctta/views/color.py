"""Colour changes of image batches (N, 3 or 1, H, W) in [0, 1], in place and clamped back to [0, 1].

In place, because a fresh batch of memory for each step costs more than the arithmetic on it.
"""

import torch
from torch import Tensor

#: ITU-R 601 luma, to the four digits that the reference transforms use.
LUMA = (0.2989, 0.587, 0.114)


def grey(image: Tensor) -> Tensor:
    """Brightness of every pixel, (N, 1, H, W)."""
    if image.shape[1] == 1:
        return image
    red, green, blue = image.split(1, dim=1)
    brightness: Tensor = red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])
    return brightness


def adjust_brightness_(image: Tensor, factor: float) -> None:
    """Scale all values."""
    image.mul_(factor).clamp_(0, 1)


def adjust_contrast_(image: Tensor, factor: float) -> None:
    """Spread values about each image's mean grey."""
    middle = grey(image).mean((1, 2, 3), keepdim=True)
    image.mul_(factor).add_(middle, alpha=1 - factor).clamp_(0, 1)


def adjust_saturation_(image: Tensor, factor: float) -> None:
    """Spread colours about each pixel's grey."""
    if image.shape[1] == 3:
        greys = grey(image)
        image.mul_(factor).add_(greys, alpha=1 - factor).clamp_(0, 1)


def adjust_gamma_(image: Tensor, gamma: float) -> None:
    """Raise values to a power; kept off zero, where the power has no derivative."""
    image.clamp_(1e-8, 1).pow_(gamma)


def adjust_hue_(image: Tensor, turns: float) -> None:
    """Turn the hue of every pixel in HSV space by at most a sixth of the circle, value and saturation kept."""
    if image.shape[1] == 1:
        return
    assert abs(turns) <= 1 / 6, "a colour's distance from a peak is folded only once"
    red, green, blue = image.unbind(1)
    value, low = image.amax(1), image.amin(1)
    spread = value - low
    # The hue in sixths of the circle is the peak of the largest channel (red 0, green 2, blue 4) plus where the colour
    # lies between the other two. lerp by a weight of 0 or 1 chooses exactly, and several times faster than where.
    red_leads, green_leads = (red == value).to(image.dtype), (green == value).to(image.dtype)
    sixths = (red - green).lerp_(blue - red, green_leads).lerp_(green - blue, red_leads)
    sixths /= spread.clamp_min(torch.finfo(image.dtype).tiny)  # grey has no hue, and needs none
    sixths += green_leads.mul_(-2).add_(4).mul_(1 - red_leads).add_(6 * turns)
    for channel, peak in ((red, 0), (green, 2), (blue, 4)):
        # A channel is full within a sixth of its peak, gone from two sixths on, and falls evenly between;
        # | |distance| - 3 | is the way to the opposite side of the circle, also across its seam.
        fullness = sixths.sub(peak).abs_().sub_(3).abs_().sub_(1).clamp_(0, 1)
        torch.addcmul(low, spread, fullness, out=channel)

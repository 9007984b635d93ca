"""Color and motion of image batches (N, 3 or 1, H, W) with values in [0, 1].

torchvision would be a further dependency; its transforms draw from the global generator, and allocate a batch for each
change of color, which costs more than the arithmetic. These work in place where they can.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ctta.functional import at_least_float32

#: ITU-R 601 luma, to the four digits that torchvision uses.
LUMA = (0.2989, 0.587, 0.114)


def to_grayscale(image: Tensor) -> Tensor:
    """Return the luma of every pixel, (N, 1, H, W)."""
    if image.shape[1] == 1:
        return image
    red, green, blue = image.split(1, dim=1)
    luma: Tensor = red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])
    return luma


def adjust_brightness_(image: Tensor, factor: float) -> None:
    """Scale all values."""
    image.mul_(factor).clamp_(0, 1)


def adjust_contrast_(image: Tensor, factor: float) -> None:
    """Scale the distance of values from each image's mean luma."""
    mean = to_grayscale(image).mean((1, 2, 3), keepdim=True)
    image.mul_(factor).add_(mean, alpha=1 - factor).clamp_(0, 1)


def adjust_saturation_(image: Tensor, factor: float) -> None:
    """Scale the distance of colors from each pixel's luma."""
    if image.shape[1] == 3:
        gray = to_grayscale(image)
        image.mul_(factor).add_(gray, alpha=1 - factor).clamp_(0, 1)


def adjust_gamma_(image: Tensor, gamma: float) -> None:
    """Raise values to a power; values stay above zero, where the power may have no derivative."""
    image.clamp_(1e-8, 1).pow_(gamma)


def adjust_hue_(image: Tensor, turns: float) -> None:
    """Rotate the hue of every pixel in HSV space by at most a sixth of the circle."""
    if image.shape[1] == 1:
        return
    assert abs(turns) <= 1 / 6, "the distance of a hue from a peak is folded only once"
    red, green, blue = image.unbind(1)
    value, low = image.amax(1), image.amin(1)
    spread = value - low
    # The hue in sixths of the circle is the peak of the largest channel (red 0, green 2, blue 4) plus the position
    # between the other two. lerp by a weight of 0 or 1 selects exactly, and several times faster than where.
    red_leads, green_leads = (red == value).to(image.dtype), (green == value).to(image.dtype)
    sixths = (red - green).lerp_(blue - red, green_leads).lerp_(green - blue, red_leads)
    sixths /= spread.clamp_min(torch.finfo(image.dtype).tiny)  # the hue of gray does not matter
    sixths += green_leads.mul_(-2).add_(4).mul_(1 - red_leads).add_(6 * turns)
    for channel, peak in ((red, 0), (green, 2), (blue, 4)):
        # A channel is full within a sixth of its peak, zero from two sixths on, and linear between;
        # | |distance| - 3 | is the distance from the opposite side of the circle, also across its seam.
        fullness = sixths.sub(peak).abs_().sub_(3).abs_().sub_(1).clamp_(0, 1)
        torch.addcmul(low, spread, fullness, out=channel)


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

    def apply(self, image: Tensor, margin: int) -> Tensor:
        """Return the moved image with a margin on every side.

        The reference implementation pads by half an image, moves, blurs and crops back. Sampling only what the crop
        keeps, with these values beyond the edge, gives the same pixels for a quarter of the work.
        """
        height, width = image.shape[2:]
        x = _pixel_offsets(width, margin, image)[None, :] - self.right
        y = _pixel_offsets(height, margin, image)[:, None] - self.down
        cos, sin = self._cos_sin
        moved_x, moved_y = (x * cos + y * sin) / self.scale, (y * cos - x * sin) / self.scale
        return _sample_bilinear(image, moved_x, moved_y, self.padding)

    def undo(self, logits: Tensor) -> Tensor:
        """Return dense logits of the moved image, moved back; pixels out of sight take the nearest logits."""
        height, width = logits.shape[2:]
        x, y = _pixel_offsets(width, 0, logits)[None, :], _pixel_offsets(height, 0, logits)[:, None]
        cos, sin = self._cos_sin
        moved_x = (x * cos - y * sin) * self.scale + self.right
        moved_y = (x * sin + y * cos) * self.scale + self.down
        return _sample_bilinear(logits, moved_x, moved_y)

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


def _pixel_offsets(size: int, margin: int, like: Tensor) -> Tensor:
    """Return the offsets from the center of the pixels along an axis, with a margin on either side."""
    return torch.arange(-margin, size + margin, device=like.device, dtype=like.dtype) - (size - 1) / 2


def _sample_bilinear(image: Tensor, x: Tensor, y: Tensor, padding: Padding = "edge") -> Tensor:
    """Return the image at offsets from its center."""
    height, width = image.shape[2:]
    if padding == "reflect":
        # With aligned corners the centers of the outermost pixels are at -1 and 1, and reflect.
        grid = torch.stack([x * (2 / max(width - 1, 1)), y * (2 / max(height - 1, 1))], -1).expand(
            len(image), -1, -1, -1
        )
        return F.grid_sample(image, grid, mode="bilinear", padding_mode="reflection", align_corners=True)
    grid = torch.stack([x * (2 / width), y * (2 / height)], -1).expand(len(image), -1, -1, -1)
    return F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False)

"""Moving images about, and dense answers back to where their pixels were."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Motion:
    """A rotation and scaling about the middle of an image, then a shift by whole pixels to the right and down."""

    degrees: float
    scale: float
    right: int
    down: int

    def apply(self, image: Tensor, margin: int) -> Tensor:
        """The moved image (N, C, H, W) with a margin on every side; beyond its edge the image's edge goes on.

        The recipe pads by half an image with edge values, moves, blurs and crops back. Sampling only what the crop
        keeps, with border values beyond the edge, gives the same pixels for a quarter of the work.
        """
        height, width = image.shape[2:]
        x = _positions(width, margin, image)[None, :] - self.right
        y = _positions(height, margin, image)[:, None] - self.down
        cos, sin = self._direction
        return _sample(image, (x * cos + y * sin) / self.scale, (y * cos - x * sin) / self.scale)

    def undo(self, answer: Tensor) -> Tensor:
        """A dense answer to the moved image, moved back; what was out of sight takes the nearest answer."""
        height, width = answer.shape[2:]
        x, y = _positions(width, 0, answer)[None, :], _positions(height, 0, answer)[:, None]
        cos, sin = self._direction
        seen_at_x = (x * cos - y * sin) * self.scale + self.right
        seen_at_y = (x * sin + y * cos) * self.scale + self.down
        return _sample(answer, seen_at_x, seen_at_y)

    @property
    def _direction(self) -> tuple[float, float]:
        return math.cos(math.radians(self.degrees)), math.sin(math.radians(self.degrees))


def _positions(size: int, margin: int, like: Tensor) -> Tensor:
    """Of the pixels along an axis, and of a margin on either side, from the middle of the image."""
    return torch.arange(-margin, size + margin, device=like.device, dtype=like.dtype) - (size - 1) / 2


def _sample(image: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The image at positions from its middle, bilinear."""
    height, width = image.shape[2:]
    grid = torch.stack([x * (2 / width), y * (2 / height)], -1).expand(len(image), -1, -1, -1)
    return F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False)

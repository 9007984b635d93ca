"""The camera: where a point of the world falls on the picture, and what a pixel looks at."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ctta.corruptions.arrays import Float32Array


@dataclass(frozen=True)
class Camera:
    """A pinhole that looks straight along the road.

    The world is measured in metres from the point of the road below the camera: x to the right, y up, z ahead. A pixel
    looks along (u, -v, 1), so at depth z it sees x = u z and y = above_ground - v z.
    """

    height: int  # pixels, as are width, focal length and the vanishing point
    width: int
    focal: float
    above_ground: float
    vanishing_row: float
    vanishing_column: float

    @cached_property
    def u(self) -> Float32Array:
        """Slope to the right, by column: (1, width)."""
        return (np.arange(self.width, dtype=np.float32)[None, :] + 0.5 - self.vanishing_column) / self.focal

    @cached_property
    def v(self) -> Float32Array:
        """Slope downwards, by row: (height, 1)."""
        return (np.arange(self.height, dtype=np.float32)[:, None] + 0.5 - self.vanishing_row) / self.focal

    @cached_property
    def ray_length(self) -> Float32Array:
        """How long the way to depth 1 is along each pixel's ray."""
        length: Float32Array = np.sqrt(1 + self.u**2 + self.v**2)
        return length

    @property
    def first_ground_row(self) -> int:
        """The uppermost row whose pixels look at the ground, if nothing stands in between."""
        return min(self.height, math.floor(self.vanishing_row - 0.5) + 1)

    def column(self, x: float, z: float) -> float:
        return self.vanishing_column + self.focal * x / z

    def row(self, y: float, z: float) -> float:
        return self.vanishing_row - self.focal * (y - self.above_ground) / z

    def metres(self, pixels: float, z: float) -> float:
        """How much of the world so many pixels cover at a depth."""
        return pixels * z / self.focal

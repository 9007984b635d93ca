"""The camera: projection between the world and the image, exposure and lens blur."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ctta.data.corruptions.arrays import Float32Array
from ctta.data.streets.rng import SceneRNG
from ctta.data.streets.textures import rgb


@dataclass(frozen=True)
class Camera:
    """A pinhole camera that looks straight along the road.

    The world is measured in meters from the point of the road below the camera: x to the right, y up, z ahead. A pixel
    looks along (u, -v, 1), so at depth z it sees x = u z and y = elevation - v z.

    Attributes:
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        focal: Focal length in pixels.
        elevation: Height of the camera above the ground in meters.
        vanishing_row: Row of the vanishing point, which is on the horizon.
        vanishing_column: Column of the vanishing point.
    """

    height: int
    width: int
    focal: float
    elevation: float
    vanishing_row: float
    vanishing_column: float

    @cached_property
    def u(self) -> Float32Array:
        """Slope to the right by column, (1, width)."""
        return (np.arange(self.width, dtype=np.float32)[None, :] + 0.5 - self.vanishing_column) / self.focal

    @cached_property
    def v(self) -> Float32Array:
        """Slope downwards by row, (height, 1)."""
        return (np.arange(self.height, dtype=np.float32)[:, None] + 0.5 - self.vanishing_row) / self.focal

    @cached_property
    def ray_length(self) -> Float32Array:
        """Length of each pixel's ray from the camera to depth 1."""
        length: Float32Array = np.sqrt(1 + self.u**2 + self.v**2)
        return length

    @property
    def first_ground_row(self) -> int:
        """Uppermost row whose rays hit the ground."""
        return min(self.height, math.floor(self.vanishing_row - 0.5) + 1)

    def project_x(self, x: float, z: float) -> float:
        """Return the column of a point."""
        return self.vanishing_column + self.focal * x / z

    def project_y(self, y: float, z: float) -> float:
        """Return the row of a point."""
        return self.vanishing_row - self.focal * (y - self.elevation) / z

    def pixels_to_meters(self, num_pixels: float, z: float) -> float:
        """Return the length in the world that a number of pixels covers at a depth."""
        return num_pixels * z / self.focal


def expose_(color: Float32Array, rng: SceneRNG) -> None:
    """Apply a random exposure and white balance, in place."""
    gain, warmth = rng.uniform(0.85, 1.15), rng.uniform(-0.06, 0.06)
    color *= rgb(gain * (1 + warmth), gain, gain * (1 - warmth))
    np.clip(color, 0, 1, out=color)


def soften(color: Float32Array) -> Float32Array:
    """Soften edges as a lens does: a twelfth of every pixel goes to each of its four neighbors."""
    soft = color * np.float32(2 / 3)
    spill = color * np.float32(1 / 12)
    soft[:, 1:] += spill[:, :-1]
    soft[:, :-1] += spill[:, 1:]
    soft[:, :, 1:] += spill[:, :, :-1]
    soft[:, :, :-1] += spill[:, :, 1:]
    # At the border a pixel keeps what would leave the image.
    for edge in (np.s_[:, 0], np.s_[:, -1], np.s_[:, :, 0], np.s_[:, :, -1]):
        soft[edge] += spill[edge]
    return soft

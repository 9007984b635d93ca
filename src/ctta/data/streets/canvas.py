"""The canvas: classes, the camera, and color, label and depth buffers with a depth test."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctta.data.corruptions.arrays import Float32Array

LabelMap = NDArray[np.uint8]  # (H, W), a class index for every pixel

CLASSES = ("sky", "road", "lane", "pavement", "building", "vegetation", "car", "person", "pole")
SKY, ROAD, LANE, PAVEMENT, BUILDING, VEGETATION, CAR, PERSON, POLE = range(len(CLASSES))

#: One color (red, green, blue) per class, for visualizing label maps.
PALETTE: NDArray[np.uint8] = np.array(
    [
        (112, 168, 220),
        (96, 72, 112),
        (250, 250, 250),
        (226, 120, 200),
        (122, 116, 108),
        (84, 150, 60),
        (20, 40, 170),
        (220, 30, 60),
        (245, 210, 40),
    ],
    np.uint8,
)


@dataclass(frozen=True)
class Camera:
    """A pinhole camera that looks straight along the road.

    The world is measured in meters from the point of the road below the camera: x to the right, y up, z ahead. A pixel
    looks along (u, -v, 1), so at depth z it sees x = u z and y = elevation - v z.
    """

    height: int  # of the image in pixels
    width: int
    focal: float  # focal length in pixels
    elevation: float  # height of the camera above the ground in meters
    vanishing_row: float  # row of the vanishing point, which is on the horizon
    vanishing_column: float  # column of the vanishing point

    @cached_property
    def u(self) -> Float32Array:
        """Slope to the right by column, (1, width)."""
        return (np.arange(self.width, dtype=np.float32)[None, :] + 0.5 - self.vanishing_column) / self.focal

    @cached_property
    def v(self) -> Float32Array:
        """Slope downwards by row, (height, 1)."""
        return (np.arange(self.height, dtype=np.float32)[:, None] + 0.5 - self.vanishing_row) / self.focal

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


Mask = NDArray[np.bool_]

#: What shines at night: the values of `Canvas.light`.
NO_LIGHT, LIT_WINDOW, STREET_LAMP, WHITE_LIGHT, RED_LIGHT, GREEN_LIGHT = range(6)


@dataclass(frozen=True)
class Region:
    """A rectangle of the image that drawing is restricted to."""

    box: tuple[slice, slice]  # its rows and columns
    u: Float32Array  # slopes of its rays to the right, (1, columns)
    v: Float32Array  # slopes of its rays downwards, (rows, 1)

    def slope_towards(self, sign: int) -> Float32Array:
        """Return the slopes to one side: -1 left, 1 right."""
        return self.u if sign > 0 else -self.u

    def wall_depth(self, sign: int, offset: float) -> Float32Array:
        """Return the depth of a wall along the street, ``offset`` meters to one side, for each column: (1, columns)."""
        # Rays to the other side never hit the wall; a tiny slope puts the intersection very far away.
        slope = np.maximum(self.slope_towards(sign), np.float32(1e-4))
        depth: Float32Array = np.divide(np.float32(offset), slope)
        return depth


@dataclass(frozen=True)
class Billboard(Region):
    """An upright rectangle that faces the camera, with the position of its pixels in meters."""

    across: Float32Array  # to the right of its center, (1, columns)
    up: Float32Array  # above the ground, (rows, 1)


@dataclass(frozen=True)
class LightSource:
    """A light in the world."""

    x: float  # meters to the right
    y: float  # meters above the ground
    z: float  # depth in meters
    strength: float  # relative strength, 1 for a street lamp
    kind: int  # a value of `Canvas.light`


class Canvas:
    """Buffers of a scene before any weather, at first nothing but sky at infinite depth."""

    def __init__(self, camera: Camera) -> None:
        shape = camera.height, camera.width
        self.camera = camera
        self.color: Float32Array = np.zeros((3, *shape), np.float32)  # without the shadows of the sun
        self.sunlight: Float32Array = np.ones(shape, np.float32)  # the light that those shadows leave
        self.label: LabelMap = np.full(shape, SKY, np.uint8)
        self.depth: Float32Array = np.full(shape, np.inf, np.float32)
        self.snow: Float32Array = np.zeros(shape, np.float32)  # how readily snow settles, 0 to 1
        self.light: NDArray[np.uint8] = np.zeros(shape, np.uint8)  # what shines at night
        self.light_sources: list[LightSource] = []
        self.instance: NDArray[np.uint16] = np.zeros(shape, np.uint16)  # number of the object, 0 for none
        self.object_number = 0  # of what is painted next

    @cached_property
    def clear(self) -> Float32Array:
        """Image in clear weather, once everything is painted."""
        return soften(self.color * self.sunlight)

    @cached_property
    def overcast(self) -> Float32Array:
        """Image without the shadows of houses."""
        return soften(self.color)

    @cached_property
    def distance(self) -> Float32Array:
        """Meters along each pixel's ray."""
        ray_length: Float32Array = np.sqrt(1 + self.camera.u**2 + self.camera.v**2)
        return self.depth * ray_length

    def region(
        self, left: float, top: float, right: float, bottom: float, nearest: float | None = None
    ) -> Region | None:
        """Return the pixels within bounds that may lie outside the image, or None if there are none.

        Given the nearest depth of what is to be drawn, rows that are entirely covered by nearer objects are left out
        (early depth test): with near objects drawn first, most of a crowded street is never computed.
        """
        first_column, last_column = max(0, math.floor(left)), min(self.camera.width, math.ceil(right))
        first_row, last_row = max(0, math.floor(top)), min(self.camera.height, math.ceil(bottom))
        if first_column >= last_column or first_row >= last_row:
            return None
        if nearest is not None:
            farthest = self.depth[first_row:last_row, first_column:last_column].max(axis=1)
            visible_rows = (farthest > nearest).nonzero()[0]
            if not len(visible_rows):
                return None
            first_row, last_row = first_row + int(visible_rows[0]), first_row + int(visible_rows[-1]) + 1
        rows, columns = slice(first_row, last_row), slice(first_column, last_column)
        return Region((rows, columns), self.camera.u[:, columns], self.camera.v[rows])

    def billboard(self, x: float, z: float, half_width: float, low: float, high: float) -> Billboard | None:
        """Return the pixels of an upright rectangle at depth z that faces the camera, or None if there are none."""
        camera = self.camera
        left, right = camera.project_x(x - half_width, z), camera.project_x(x + half_width, z)
        if (region := self.region(left, camera.project_y(high, z), right, camera.project_y(low, z), z)) is None:
            return None
        return Billboard(region.box, region.u, region.v, region.u * z - x, camera.elevation - region.v * z)

    def paint(
        self,
        region: Region,
        inside: Mask,
        depth: float | Float32Array,
        color: NDArray[Any],
        label: int,
        *,
        snow: float | Float32Array = 0.0,
        light: int | NDArray[np.uint8] = NO_LIGHT,
    ) -> None:
        """Write all buffers where ``inside`` holds and nothing nearer was painted."""
        box = region.box
        visible = inside & (depth < self.depth[box])
        np.copyto(self.color[:, *box], color, where=visible)
        np.copyto(self.depth[box], np.asarray(depth, np.float32), where=visible)
        np.copyto(self.snow[box], np.asarray(snow, np.float32), where=visible)
        np.copyto(self.label[box], np.uint8(label), where=visible)
        np.copyto(self.instance[box], np.uint16(self.object_number), where=visible)
        np.copyto(self.light[box], np.asarray(light, np.uint8), where=visible)

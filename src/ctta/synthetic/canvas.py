"""The canvas: colours, labels and depths, where what is nearer hides what is farther."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctta.corruptions.arrays import Float32Array
from ctta.synthetic.camera import Camera
from ctta.synthetic.classes import SKY, Labels

Mask = NDArray[np.bool_]

#: What shines at night, by its number in `Canvas.light`; 0 shines not at all.
DARK, LIT_WINDOW, STREET_LAMP, WHITE_LIGHT, RED_LIGHT, GREEN_LIGHT = range(6)


@dataclass(frozen=True)
class Window:
    """A rectangle of the picture: drawing touches these pixels only."""

    box: tuple[slice, slice]
    u: Float32Array  # (1, columns)
    v: Float32Array  # (rows, 1)

    def towards(self, sign: int) -> Float32Array:
        """Slope to that side: -1 left, 1 right."""
        return self.u if sign > 0 else -self.u

    def wall_depth(self, sign: int, line: float) -> Float32Array:
        """Where each column meets a wall that runs along the street, `line` metres to that side: (1, columns)."""
        slope = np.maximum(self.towards(sign), np.float32(1e-4))  # the other side looks past it, nearly for ever
        depth: Float32Array = np.divide(np.float32(line), slope)
        return depth


@dataclass(frozen=True)
class Lamp:
    """A light in the world: where, how strong, and which number of `Canvas.light`."""

    x: float
    y: float
    z: float
    strength: float
    kind: int


class Canvas:
    """What a scene looks like so far: nothing but sky, infinitely far."""

    def __init__(self, camera: Camera) -> None:
        shape = camera.height, camera.width
        self.camera = camera
        self.colour: Float32Array = np.zeros((3, *shape), np.float32)
        self.label: Labels = np.full(shape, SKY, np.uint8)
        self.depth: Float32Array = np.full(shape, np.inf, np.float32)
        self.snow: Float32Array = np.zeros(shape, np.float32)  # how readily snow lies here, 0 to 1
        self.light: NDArray[np.uint8] = np.zeros(shape, np.uint8)
        self.lamps: list[Lamp] = []

    def window(
        self, left: float, top: float, right: float, bottom: float, nearest: float | None = None
    ) -> Window | None:
        """The pixels within these bounds, which may lie outside; None if there are none.

        Given the nearest depth of what is to be drawn, rows in which all stands before it are left out: with what is
        near drawn first, most of a crowded street is never computed.
        """
        first_column, last_column = max(0, math.floor(left)), min(self.camera.width, math.ceil(right))
        first_row, last_row = max(0, math.floor(top)), min(self.camera.height, math.ceil(bottom))
        if first_column >= last_column or first_row >= last_row:
            return None
        if nearest is not None:
            farthest = self.depth[first_row:last_row, first_column:last_column].max(axis=1)
            open_rows = (farthest > nearest).nonzero()[0]
            if not len(open_rows):
                return None
            first_row, last_row = first_row + int(open_rows[0]), first_row + int(open_rows[-1]) + 1
        rows, columns = slice(first_row, last_row), slice(first_column, last_column)
        return Window((rows, columns), self.camera.u[:, columns], self.camera.v[rows])

    def upright(self, x: float, z: float, half_width: float, low: float, high: float) -> Window | None:
        """The pixels of a rectangle that stands at depth z and faces the camera."""
        camera = self.camera
        left, right = camera.column(x - half_width, z), camera.column(x + half_width, z)
        return self.window(left, camera.row(high, z), right, camera.row(low, z), z)

    def paint(
        self,
        window: Window,
        inside: Mask,
        depth: float | Float32Array,
        colour: NDArray[Any],
        label: int,
        *,
        snow: float | Float32Array = 0.0,
        light: int | NDArray[np.uint8] = DARK,
    ) -> None:
        """Paint where `inside` holds and nothing nearer stands."""
        box = window.box
        seen = inside & (depth < self.depth[box])
        np.copyto(self.colour[:, *box], colour, where=seen)
        np.copyto(self.depth[box], np.asarray(depth, np.float32), where=seen)
        np.copyto(self.snow[box], np.asarray(snow, np.float32), where=seen)
        np.copyto(self.label[box], np.uint8(label), where=seen)
        np.copyto(self.light[box], np.asarray(light, np.uint8), where=seen)

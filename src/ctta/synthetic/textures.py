"""Surfaces: one map of grain and one of clouds, made once, of which every scene takes other parts."""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctta.corruptions.arrays import Float32Array
from ctta.corruptions.rng import PerImageRNG
from ctta.corruptions.weather import plasma

SIDE = 256  # of the maps; a power of two, so that wrapping around is a bit mask
GRAIN, CLOUDS = 1.15, 1.7  # how much smoother each octave is than the next: rough asphalt, soft clouds


@lru_cache(maxsize=2)
def fractal(decay: float) -> Float32Array:
    """A periodic map in [0, 1]."""
    texture: Float32Array = plasma(SIDE, SIDE, decay, PerImageRNG(0, "street texture", 0, np.array([0], np.int64)))[0]
    return np.ascontiguousarray(texture)


def looked_up(texture: Float32Array, rows: NDArray[Any], columns: NDArray[Any]) -> Float32Array:
    """The texture at any coordinates, wrapped around; rows and columns broadcast."""
    return texture.take((rows.astype(np.int32) & (SIDE - 1)) * SIDE + (columns.astype(np.int32) & (SIDE - 1)))


def smoothly(texture: Float32Array, height: int, width: int, top: float, left: float, step: float) -> Float32Array:
    """A stretch of the texture enlarged to (height, width), `step` of its pixels per pixel, linear in between."""
    rows, columns = top + step * np.arange(height), left + step * np.arange(width)
    first, first_column = np.floor(rows).astype(int), np.floor(columns).astype(int)
    down, across = (rows - first).astype(np.float32)[:, None], (columns - first_column).astype(np.float32)
    stretch = texture.take(np.arange(first[0], first[-1] + 2), axis=0, mode="wrap")
    stretch = stretch.take(np.arange(first_column[0], first_column[-1] + 2), axis=1, mode="wrap")
    first -= first[0]
    first_column -= first_column[0]
    upper, lower = stretch[first], stretch[first + 1]
    blended = upper + down * (lower - upper)
    near, far = blended[:, first_column], blended[:, first_column + 1]
    result: Float32Array = near + across * (far - near)
    return result

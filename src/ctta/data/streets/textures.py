"""Random numbers, colors and fractal textures of a scene.

Images are planar, (3, H, W): NumPy processes whole rows several times as fast as interleaved channels.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctta.data.corruptions.arrays import Float32Array, PerImageRNG
from ctta.data.corruptions.weather import plasma

SIDE = 256  # of the textures; a power of two, so that wrapping around is a bit mask
GRAIN, CLOUDS = 1.15, 1.7  # decay of the amplitude per octave: rough asphalt, soft clouds


def rgb(red: float, green: float, blue: float) -> Float32Array:
    """Return one color as (3, 1, 1), which broadcasts over an image."""
    return np.array([red, green, blue], np.float32).reshape(3, 1, 1)


def lookup_colors(indices: NDArray[np.uint8], colors: Sequence[Float32Array]) -> Float32Array:
    """Return the color of each index, (3, H, W)."""
    return np.concatenate(colors, axis=1)[..., 0].take(indices, axis=1)


@lru_cache(maxsize=2)
def fractal_texture(decay: float) -> Float32Array:
    """Return a periodic texture in [0, 1], computed once; every scene samples other parts of it."""
    texture: Float32Array = plasma(SIDE, SIDE, decay, PerImageRNG(0, "street texture", 0, np.array([0], np.int64)))[0]
    return np.ascontiguousarray(texture)


def sample_texture(texture: Float32Array, rows: NDArray[Any], columns: NDArray[Any]) -> Float32Array:
    """Return the nearest texels at any coordinates, wrapped around; rows and columns broadcast."""
    return texture.take((rows.astype(np.int32) & (SIDE - 1)) * SIDE + (columns.astype(np.int32) & (SIDE - 1)))


def sample_grain(rows: NDArray[Any], columns: NDArray[Any]) -> Float32Array:
    """Return :func:`sample_texture` of the rough texture."""
    return sample_texture(fractal_texture(GRAIN), rows, columns)


OptionT = TypeVar("OptionT")
POOL_SIZE = 256  # numbers drawn at a time: drawing them one by one would cost more than rendering the street


class SceneRNG:
    """Scalar random numbers that are a pure function of (seed, purpose, index of the scene).

    Purposes are independent of each other: changing how cars are placed leaves the houses where they were, and weather
    never moves an object.
    """

    def __init__(self, seed: int, purpose: str, index: int) -> None:
        self._rng = PerImageRNG(seed, f"street {purpose}", 0, np.array([index], np.int64))
        self._pool: list[float] = []

    def uniform(self, low: float, high: float) -> float:
        """Return a number between ``low`` and ``high``."""
        if not self._pool:
            self._pool = self._rng.uniform((POOL_SIZE,))[0].tolist()
        return low + (high - low) * self._pool.pop()

    def integer(self, low: int, high: int) -> int:
        """Return an integer from ``low`` to ``high``, both included."""
        return min(high, low + int(self.uniform(0, 1) * (high - low + 1)))

    def chance(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self.uniform(0, 1) < probability

    def choice(self, options: Sequence[OptionT]) -> OptionT:
        """Return one of the options, all equally likely."""
        return options[self.integer(0, len(options) - 1)]

    def color(self, base: tuple[float, float, float], spread: float) -> Float32Array:
        """Return a color near ``base``: brightness varies by ``spread``, and each channel by a third of it."""
        brightness = self.uniform(-spread, spread)
        channels = [value + brightness + self.uniform(-spread, spread) / 3 for value in base]
        return rgb(*(min(max(value, 0.02), 0.98) for value in channels))

    def uniform_array(self, *shape: int) -> Float32Array:
        """Return an array of numbers between 0 and 1."""
        values: Float32Array = self._rng.uniform(shape)[0]
        return values

    def normal_array(self, *shape: int) -> Float32Array:
        """Return an array of standard normal numbers."""
        values: Float32Array = self._rng.normal(shape)[0]
        return values


def draw_clouds(height: int, width: int, step: float, rng: SceneRNG) -> Float32Array:
    """Return a random part of the soft texture enlarged to (height, width), ``step`` texels per pixel, bilinearly."""
    rows = rng.uniform(0, SIDE) + step * np.arange(height)
    columns = rng.uniform(0, SIDE) + step * np.arange(width)
    first_row, first_column = np.floor(rows).astype(int), np.floor(columns).astype(int)
    down, across = (rows - first_row).astype(np.float32)[:, None], (columns - first_column).astype(np.float32)
    section = fractal_texture(CLOUDS).take(np.arange(first_row[0], first_row[-1] + 2), axis=0, mode="wrap")
    section = section.take(np.arange(first_column[0], first_column[-1] + 2), axis=1, mode="wrap")
    first_row -= first_row[0]
    first_column -= first_column[0]
    upper, lower = section[first_row], section[first_row + 1]
    blended = upper + down * (lower - upper)
    near, far = blended[:, first_column], blended[:, first_column + 1]
    result: Float32Array = near + across * (far - near)
    return result

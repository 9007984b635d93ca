"""Random numbers of one scene for one purpose."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from ctta.data.corruptions.arrays import Float32Array
from ctta.data.corruptions.rng import PerImageRNG
from ctta.data.streets.textures import rgb

OptionT = TypeVar("OptionT")
POOL_SIZE = 256  # numbers drawn at a time: drawing them one by one would cost more than rendering the street


class SceneRNG:
    """Scalar random numbers that are a pure function of (seed, purpose, index of the scene).

    Purposes are independent of each other: changing how cars are placed leaves the houses where they were, and weather
    never moves an object.

    Args:
        seed: Seed of the scenes.
        purpose: What the numbers are for, such as "report cars".
        index: Index of the scene.
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

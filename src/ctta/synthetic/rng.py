"""Random numbers of one scene, one after the other, for one purpose."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from ctta.corruptions.arrays import Float32Array
from ctta.corruptions.rng import PerImageRNG
from ctta.synthetic.colors import rgb

Choice = TypeVar("Choice")
POOL = 256  # numbers drawn at a time: drawing them singly would cost more than drawing the street


class SceneRNG:
    """A pure function of (seed, purpose, index of the scene); purposes are independent of each other.

    So another way to place cars leaves the houses where they were, and weather never moves a thing.
    """

    def __init__(self, seed: int, purpose: str, index: int) -> None:
        self._draws = PerImageRNG(seed, f"street {purpose}", 0, np.array([index], np.int64))
        self._pool: list[float] = []

    def between(self, low: float, high: float) -> float:
        if not self._pool:
            self._pool = self._draws.uniform((POOL,))[0].tolist()
        return low + (high - low) * self._pool.pop()

    def whole(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return min(high, low + int(self.between(0, 1) * (high - low + 1)))

    def chance(self, share: float) -> bool:
        return self.between(0, 1) < share

    def pick(self, choices: Sequence[Choice]) -> Choice:
        return choices[self.whole(0, len(choices) - 1)]

    def colour(self, base: tuple[float, float, float], spread: float) -> Float32Array:
        """A colour near another: its brightness varies by the spread, and each channel by a third of it."""
        brightness = self.between(-spread, spread)
        channels = [value + brightness + self.between(-spread, spread) / 3 for value in base]
        return rgb(*(min(max(value, 0.02), 0.98) for value in channels))

    def uniform(self, *shape: int) -> Float32Array:
        values: Float32Array = self._draws.uniform(shape)[0]
        return values

    def normal(self, *shape: int) -> Float32Array:
        values: Float32Array = self._draws.normal(shape)[0]
        return values

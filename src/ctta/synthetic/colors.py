"""Colours lie in planes, (3, H, W): numpy works through whole rows several times as fast as through threes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ctta.corruptions.arrays import Float32Array


def rgb(red: float, green: float, blue: float) -> Float32Array:
    """One colour, (3, 1, 1), ready to be spread over a plane."""
    return np.array([red, green, blue], np.float32).reshape(3, 1, 1)


def by_number(numbers: NDArray[np.uint8], colours: Sequence[Float32Array]) -> Float32Array:
    """The colour that each number stands for, (3, H, W)."""
    return np.concatenate(colours, axis=1)[..., 0].take(numbers, axis=1)

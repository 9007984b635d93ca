"""Which of the two published parameter sets an image takes, and by how much its lengths are scaled."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from ctta.corruptions.arrays import UInt8Array

T = TypeVar("T")

SIZES = (32, 224)  # CIFAR and ImageNet: the sizes the parameters were published for

# One sequence of five severities per size in SIZES.
Table = tuple[Sequence[T], Sequence[T]]


class Recipe(NamedTuple):
    """A column of the parameter tables, and what to multiply its lengths by (1 at the published sizes)."""

    column: int
    scale: float

    def pick(self, table: Table[T], severity: int) -> T:
        return table[self.column][severity - 1]


def recipe_of(images: UInt8Array) -> Recipe:
    """Choose the size that is nearer as a ratio, taking √(H·W) as the size of an image."""
    size = math.sqrt(images.shape[1] * images.shape[2])
    column = 0 if size * size < SIZES[0] * SIZES[1] else 1
    return Recipe(column, size / SIZES[column])

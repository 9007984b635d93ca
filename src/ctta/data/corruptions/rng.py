"""Counter-based random numbers: a pure function of (seed, name, severity, image index)."""

import hashlib
import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ctta.data.corruptions.arrays import Float32Array, Int64Array

# Constants of the splitmix64 generator: the odd step between states, and the two multipliers of its finalizer.
STEP = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
CALL_STEP = 0xD1342543DE82EF95  # odd: separates the numbers of successive calls


def mix_(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Turn counters into random bits, in place, with the finalizer of splitmix64."""
    state ^= state >> np.uint64(30)
    state *= MULTIPLIERS[0]
    state ^= state >> np.uint64(27)
    state *= MULTIPLIERS[1]
    state ^= state >> np.uint64(31)
    return state


@lru_cache(maxsize=1)
def normal_quantiles() -> Float32Array:
    """Return the means of the 65,536 equally likely slices of the standard normal distribution.

    Looking up 16 random bits in this table is a normal draw: its standard deviation is off by less than 1e-5, its
    range is ±4.3, and, unlike logarithms and cosines, it gives the same bits for every batch shape.
    """
    edges = np.array([NormalDist().inv_cdf(i / 65536) for i in range(1, 65536)])
    density = np.concatenate(([0.0], np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi), [0.0]))
    return ((density[:-1] - density[1:]) * 65536).astype(np.float32)


class PerImageRNG:
    """Random numbers of one corruption at one severity, with an independent stream for every image.

    Every image has a 64-bit key hashed from its identity, and its j-th number is a hash of key + j. A whole batch is
    drawn at once, and an image gets the same numbers alone or in any batch. Each call starts a new section of the
    stream, so a corruption must make its calls in a fixed order. NumPy's generators cannot do this: they would need
    one object per image.

    Args:
        seed: Seed of the run.
        name: Name of the corruption, or any other purpose.
        severity: Severity, 0 where there is none.
        index: Identity of each image, (N,).
    """

    def __init__(self, seed: int, name: str, severity: int, index: Int64Array) -> None:
        digest = hashlib.blake2b(f"{seed}/{name}/{severity}".encode(), digest_size=8).digest()
        origin = np.uint64(int.from_bytes(digest, "little"))
        self._keys = mix_(mix_(index.astype(np.uint64)) ^ origin)
        self._num_calls = 0

    @property
    def num_images(self) -> int:
        """Number of images, the first dimension of everything drawn."""
        return len(self._keys)

    def bits(self, shape: tuple[int, ...], width: int) -> NDArray[np.unsignedinteger]:
        """Return random unsigned integers of ``width`` bits, shape (N, *shape)."""
        count, per_state = math.prod(shape), 64 // width
        self._num_calls += 1
        starts = mix_(self._keys + np.uint64(self._num_calls * CALL_STEP % 2**64))
        counters = np.arange(1, -(-count // per_state) + 1, dtype=np.uint64) * STEP
        states = mix_(starts[:, None] + counters).astype("<u8", copy=False)
        return states.view(f"<u{width // 8}")[:, :count].reshape(self.num_images, *shape)

    def uniform(self, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Float32Array:
        """Return uniform numbers in the open interval (low, high), of 23 bits so that float32 is exact."""
        unit = (self.bits(shape, 32) >> 9).astype(np.float32)
        unit += np.float32(0.5)
        unit *= np.float32((high - low) / 2**23)
        unit += np.float32(low)
        return unit

    def normal(self, shape: tuple[int, ...], mean: float = 0.0, std: float = 1.0) -> Float32Array:
        """Return normal numbers, see :func:`normal_quantiles`."""
        values = normal_quantiles().take(self.bits(shape, 16))
        values *= np.float32(std)
        values += np.float32(mean)
        return values

    def integers(self, shape: tuple[int, ...], low: int, high: int) -> Int64Array:
        """Return integers in [low, high), by multiply and shift; the bias is under (high - low) / 2³²."""
        span = np.uint64(high - low)
        scaled = self.bits(shape, 32).astype(np.uint64) * span >> np.uint64(32)
        return scaled.astype(np.int64) + low

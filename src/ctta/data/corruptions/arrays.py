"""Image batches as arrays: types, conversion to and from 8 bits, chunking, parameters by image size, random numbers."""

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ctta.errors import InputError

UInt8Array = NDArray[np.uint8]  # images (N, H, W, 3), values 0..255
Float32Array = NDArray[np.float32]  # intermediate results, on the same 0..255 scale unless stated otherwise
Int64Array = NDArray[np.int64]

BatchT = TypeVar("BatchT", NDArray[Any], torch.Tensor)
ValueT = TypeVar("ValueT", float, tuple[float, ...])  # parameters of a corruption at one severity

ACCEPTED = "a uint8 numpy array (N, H, W, 3), or a float torch tensor or numpy array (N, 3, H, W) in [0, 1]"
MIN_SIDE = 8  # pixels; kernels and zooms need some room
CHUNK_PIXELS = 1 << 17  # 128 images of 32x32, 2 of 224x224: arrays that stay in the CPU cache

PUBLISHED_SIZES = (32, 224)  # CIFAR and ImageNet: the sizes the parameters were published for

#: Parameters by severity 0..5, one sequence for each of PUBLISHED_SIZES.
SeverityTable = tuple[Sequence[ValueT], Sequence[ValueT]]


class ParameterSet(NamedTuple):
    """The published parameters that images of one size take."""

    column: int  # index into PUBLISHED_SIZES and into every table
    scale: float  # factor for lengths in pixels; 1 at the published sizes

    def lookup(self, table: SeverityTable[ValueT], severity: float) -> ValueT:
        """Return the parameters for a severity from 0 to 5: an entry of the table, or between two entries linearly."""
        return blend(*self.neighbors(table, severity))

    def neighbors(self, table: SeverityTable[ValueT], severity: float) -> tuple[ValueT, ValueT, float]:
        """Return the entries for the whole severities around a severity, and the weight of the second."""
        below = math.floor(severity)
        return table[self.column][below], table[self.column][math.ceil(severity)], severity - below


def blend(low: ValueT, high: ValueT, weight: float) -> ValueT:
    """Return low + weight · (high - low) for every parameter; exactly ``low`` where the weight is 0."""
    if isinstance(low, tuple) and isinstance(high, tuple):
        return tuple(a + weight * (b - a) for a, b in zip(low, high, strict=True)) if weight else low
    return low + weight * (high - low) if weight else low


def select_parameters(images: UInt8Array) -> ParameterSet:
    """Return the parameters of the published size that is closer as a ratio, with √(H·W) as the size of an image."""
    size = math.sqrt(images.shape[1] * images.shape[2])
    column = 0 if size * size < PUBLISHED_SIZES[0] * PUBLISHED_SIZES[1] else 1
    return ParameterSet(column, size / PUBLISHED_SIZES[column])


def truncate_to_uint8(values: NDArray[np.floating[Any]]) -> UInt8Array:
    """Clip to 0..255 and drop the fraction: the published files are truncated, not rounded."""
    clipped: NDArray[np.floating[Any]] = np.clip(values, 0, 255)
    return clipped.astype(np.uint8)


def images_to_uint8(images: NDArray[Any] | torch.Tensor) -> UInt8Array:
    """Validate a batch and return it as uint8 (N, H, W, 3); floats are rounded to the 8 bits of the benchmark."""
    if isinstance(images, torch.Tensor):
        if not images.is_floating_point():
            raise TypeError(
                f"images is a torch tensor of {images.dtype}; expected {ACCEPTED}. "
                "Divide bytes by 255, or pass them as numpy (N, H, W, 3)"
            )
        values = images.detach().to("cpu", torch.float32 if images.dtype != torch.float64 else None).numpy()
    elif isinstance(images, np.ndarray):
        values = images
    else:
        raise TypeError(f"images is a {type(images).__name__}; expected {ACCEPTED}")

    is_uint8 = values.dtype == np.uint8
    if not is_uint8 and not np.issubdtype(values.dtype, np.floating):
        raise TypeError(f"images have dtype {values.dtype}; expected {ACCEPTED}")
    channel_axis = -1 if is_uint8 else 1
    if values.ndim != 4 or values.shape[channel_axis] != 3:
        raise InputError(f"images have dtype {values.dtype} and shape {tuple(values.shape)}; expected {ACCEPTED}")
    if is_uint8:
        result: UInt8Array = values
    else:
        # The negation also catches NaN.
        if values.size and not (values.min() >= 0 and values.max() <= 1):
            raise InputError(
                f"images has values from {values.min():.4g} to {values.max():.4g}; expected [0, 1]. "
                "Corrupt before normalizing by mean and standard deviation"
            )
        result = np.rint(values.transpose(0, 2, 3, 1).astype(np.float32) * 255).astype(np.uint8)
    if min(result.shape[1:3]) < MIN_SIDE:
        raise InputError(f"images are {result.shape[1]}x{result.shape[2]}; expected at least {MIN_SIDE} pixels a side")
    return result


def restore_format(result: UInt8Array, images: BatchT) -> BatchT:
    """Convert corrupted images to the container, layout, dtype and device of the images they were made from."""
    if isinstance(images, torch.Tensor):
        scaled = torch.from_numpy(result.transpose(0, 3, 1, 2)).to(torch.float32) / 255
        return scaled.contiguous().to(images.device, images.dtype)
    if images.dtype == np.uint8:
        return result
    values = result.transpose(0, 3, 1, 2) / np.float32(255)
    return np.ascontiguousarray(values.astype(images.dtype))


def validate_index(index: ArrayLike | None, num_images: int) -> Int64Array:
    """Return the index of every image in its dataset, by default its position in the batch."""
    if index is None:
        return np.arange(num_images, dtype=np.int64)
    values = np.asarray(index)
    if values.shape != (num_images,):
        raise InputError(f"index has shape {values.shape} for {num_images} images; expected one integer per image")
    if num_images and not np.issubdtype(values.dtype, np.integer):
        raise TypeError(f"index has dtype {values.dtype}; expected integers, the positions of the images in a dataset")
    if num_images and values.min() < 0:
        raise InputError(f"index contains {values.min()}; expected positions in a dataset, from 0")
    return values.astype(np.int64)


def map_chunks(
    function: Callable[[UInt8Array, Int64Array], UInt8Array], images: UInt8Array, index: Int64Array
) -> UInt8Array:
    """Apply a function to a few images at a time, to bound memory, on as many threads as torch may use.

    NumPy releases the interpreter lock in its loops, and the draws of an image do not depend on its chunk.
    """
    result = np.empty(images.shape, np.uint8)
    length = max(1, CHUNK_PIXELS // (images.shape[1] * images.shape[2]))
    chunks = [slice(start, start + length) for start in range(0, len(images), length)]

    def fill(chunk: slice) -> None:
        result[chunk] = function(images[chunk], index[chunk])

    if len(chunks) <= 1 or torch.get_num_threads() == 1:
        for chunk in chunks:
            fill(chunk)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for _ in pool.map(fill, chunks):
                pass
    return result


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
    """Random numbers of a corruption (or another purpose) at one severity, with an independent stream for every image.

    Every image has a 64-bit key hashed from its identity, and its j-th number is a hash of key + j. A whole batch is
    drawn at once, and an image gets the same numbers alone or in any batch. Each call starts a new section of the
    stream, so a corruption must make its calls in a fixed order. NumPy's generators cannot do this: they would need
    one object per image.
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

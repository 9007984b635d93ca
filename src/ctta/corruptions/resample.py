"""Resampling whole batches: centre zoom, bilinear sampling at any coordinates, averaging over boxes."""

import math

import numpy as np
from numpy.typing import NDArray

from ctta.corruptions.arrays import Float32Array, Int64Array, UInt8Array


def mixed(values: Float32Array, low: Int64Array, high: Int64Array, weight: Float32Array, axis: int) -> Float32Array:
    """Linear interpolation along one axis: (1 - weight)·values[low] + weight·values[high]."""
    shape = [1] * values.ndim
    shape[axis] = len(weight)
    first, second = values.take(low, axis), values.take(high, axis)
    second -= first  # in place throughout: new arrays cost more than the arithmetic
    second *= weight.reshape(shape)
    second += first
    return second


def zoom_grid(size: int, factor: float) -> tuple[Int64Array, Int64Array, Float32Array]:
    """Where the pixels of a centre zoom lie on one axis: the two neighbours and the weight of the second.

    The centre ⌈size / factor⌉ pixels are stretched to round(that · factor), first pixel on first and last on
    last, and the middle of the result is kept.
    """
    crop = math.ceil(size / factor)
    stretched = round(crop * factor)
    position = np.arange(size) + (stretched - size) // 2
    coordinate = position * ((crop - 1) / (stretched - 1))
    low = np.minimum(coordinate.astype(np.int64), crop - 1)
    high = np.minimum(low + 1, crop - 1)
    start = (size - crop) // 2
    return start + low, start + high, (coordinate - low).astype(np.float32)


def zoomed(values: Float32Array, factor: float) -> Float32Array:
    """Zoom (H, W, …) into its centre, keeping the size.

    The image axes come first, so that what is picked along them are long contiguous rows.
    """
    rows = mixed(values, *zoom_grid(values.shape[0], factor), axis=0)
    return mixed(rows, *zoom_grid(values.shape[1], factor), axis=1)


def sample(images: Float32Array, rows: Float32Array, columns: Float32Array, *, repeat_edge: bool) -> Float32Array:
    """Bilinear values of image n at (rows[n], columns[n]), reflecting beyond the border.

    `repeat_edge` says whether the reflection shows the edge pixel twice (dcba|abcd) or once (dcb|abcd).
    """
    count, height, width, channels = images.shape
    top, left = np.floor(rows), np.floor(columns)
    down, right = (rows - top)[..., None], (columns - left)[..., None]
    pixels = images.reshape(-1, channels)
    image = np.arange(count).reshape(-1, 1, 1) * (height * width)

    def line(row: Float32Array) -> Float32Array:
        start = image + reflected(row, height, repeat_edge) * width
        first: Float32Array = pixels[start + reflected(left, width, repeat_edge)]
        second: Float32Array = pixels[start + reflected(left + 1, width, repeat_edge)]
        second -= first
        second *= right
        second += first
        return second

    upper, lower = line(top), line(top + 1)
    lower -= upper
    lower *= down
    lower += upper
    return lower


def reflected(position: Float32Array, size: int, repeat_edge: bool) -> Int64Array:
    """Fold whole-number positions back into 0 … size - 1."""
    period = 2 * size if repeat_edge else 2 * size - 2
    folded = position.astype(np.int64) % period
    return np.minimum(folded, period - folded - (1 if repeat_edge else 0))


def scaled(image: NDArray[np.uint8], factor: float) -> NDArray[np.uint8]:
    """Scale one (H, W, C) image bilinearly between pixel centres, without smoothing first."""
    values = image.astype(np.float32)
    for axis, old in enumerate(image.shape[:2]):
        # Pixels are 1 / factor apart even where the new size had to be rounded.
        centre = np.clip((np.arange(round(old * factor)) + 0.5) / factor - 0.5, 0, old - 1)
        low = centre.astype(np.int64)
        values = mixed(values, low, np.minimum(low + 1, old - 1), (centre - low).astype(np.float32), axis)
    values += np.float32(0.5)
    return values.astype(np.uint8)


def box_shrunk(images: UInt8Array, size: int, axis: int) -> UInt8Array:
    """Average the pixels whose centres fall under each new pixel, rounded, along one axis."""
    old = images.shape[axis]
    scale = old / size
    edges = np.floor(np.arange(size + 1) * scale + 0.5).astype(np.int64)
    sums = np.add.reduceat(images, edges[:-1], axis=axis, dtype=np.int32)
    counts = np.diff(edges).reshape([-1 if a == axis else 1 for a in range(images.ndim)])
    means: Int64Array = (2 * sums + counts) // (2 * counts)
    return means.astype(np.uint8)


def nearest(images: UInt8Array, size: int, axis: int) -> UInt8Array:
    """Enlarge along one axis by repeating pixels."""
    centres: NDArray[np.float64] = (np.arange(size) + 0.5) * (images.shape[axis] / size)
    return images.take(centres.astype(np.int64), axis)

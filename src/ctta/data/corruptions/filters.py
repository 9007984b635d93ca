"""Filtering and resampling of batches, with axes 1 and 2 as the image plane unless stated otherwise."""

import math
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ctta.data.corruptions.arrays import Float32Array, Int64Array, UInt8Array

Numbers = NDArray[Any]

# Beyond the border: the edge pixel (aa|abcd), a mirror on it (cb|abcd), or a mirror behind it (ba|abcd).
Border = Literal["edge", "reflect", "symmetric"]

MIN_RUN = 8  # equal weights in a row from which running sums are faster; the kernels of 32x32 images have none


def correlate(values: Numbers, kernel: Numbers, border: Border) -> Float32Array:
    """Correlate (N, H, W) or (N, H, W, C) with a two-dimensional kernel of odd sides.

    The result is a sum of shifted images, one per weight. A long run of equal weights, as in a disk, is one term: the
    difference of two running sums, which is exact for bytes. A disk therefore costs as many terms as it has rows and
    rim pixels, not as many as it has pixels.
    """
    nonzero = np.argwhere(kernel)
    center = np.array(kernel.shape) // 2
    runs = find_equal_weights(kernel)
    reach_y, reach_x = np.abs(nonzero - center).max(axis=0)
    margins = [(0, 0), (reach_y, reach_y), (reach_x, reach_x), (0, 0)][: values.ndim]
    padded = np.pad(values, margins, mode=border).astype(np.float64)
    height, width = values.shape[1:3]
    # In double precision, as a flat area must keep its value: an error of 1e-7 downwards would be truncated to 1 less.
    total, term = np.zeros(values.shape), np.empty(values.shape)
    in_a_run = {(row, column) for row, first, end in runs for column in range(first, end)}
    for row, column in nonzero.tolist():
        if (row, column) in in_a_run:
            continue
        top, left = row - center[0] + reach_y, column - center[1] + reach_x
        np.multiply(padded[:, top : top + height, left : left + width], kernel[row, column], out=term)
        total += term
    if runs:
        start = [(0, 0), (0, 0), (1, 0), (0, 0)][: values.ndim]
        sums = np.cumsum(np.pad(padded, start), axis=2)
    for row, first, end in runs:
        top, left, right = (row - center[0] + reach_y, *(column - center[1] + reach_x for column in (first, end)))
        lines = sums[:, top : top + height]
        np.subtract(lines[:, :, right : right + width], lines[:, :, left : left + width], out=term)
        term *= kernel[row, first]
        total += term
    return total.astype(np.float32)


def find_equal_weights(kernel: Numbers) -> list[tuple[int, int, int]]:
    """Return the runs of at least MIN_RUN equal nonzero weights: (row, first column, column after the last)."""
    return [
        (row, first, end)
        for row, weights in enumerate(kernel)
        for first, end in find_runs(weights)
        if end - first >= MIN_RUN and weights[first]
    ]


def find_runs(*keys: Numbers) -> list[tuple[int, int]]:
    """Return the ranges [first, end) over which every one-dimensional key keeps its value."""
    changes = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(keys[0])]
    return list(pairwise(bounds))


def gaussian_kernel(sigma: float, radius: int) -> NDArray[np.float64]:
    """Return one-dimensional weights at -radius … radius that sum to 1."""
    taps = np.arange(-radius, radius + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2)) if sigma else (taps == 0).astype(np.float64)
    normalized: NDArray[np.float64] = weights / weights.sum()
    return normalized


def gaussian_filter(values: Numbers, sigma: float, border: Border = "edge", truncate: float = 4.0) -> Float32Array:
    """Blur by a Gaussian that is cut off after ``truncate`` standard deviations."""
    weights = gaussian_kernel(sigma, int(truncate * sigma + 0.5))
    if border == "symmetric" and sigma > max(values.shape[1:3]):
        return correlate_folded(correlate_folded(values, weights, axis=1), weights, axis=2)
    return correlate(correlate(values, weights[:, None], border), weights[None, :], border)


def correlate_folded(values: Numbers, weights: Numbers, axis: int) -> Float32Array:
    """Correlate along one axis with a kernel far wider than the image, whose border is mirrored again and again.

    The weights of all mirror images of a pixel are added up first, so the cost does not grow with the kernel.
    """
    size, radius = values.shape[axis], len(weights) // 2
    target = np.arange(size)[:, None]
    source = reflect(target + np.arange(-radius, radius + 1), size, repeat_edge=True)
    folded = np.zeros((size, size))
    np.add.at(folded, (np.broadcast_to(target, source.shape), source), weights)
    total = np.zeros(values.shape)
    for number, share in enumerate(folded.T):  # one term at a time: the same bits in every batch
        total += values.take([number], axis) * share.reshape([-1 if a == axis else 1 for a in range(values.ndim)])
    return total.astype(np.float32)


def interpolate(
    values: Float32Array, low: Int64Array, high: Int64Array, weight: Float32Array, axis: int
) -> Float32Array:
    """Interpolate linearly along one axis: (1 - weight)·values[low] + weight·values[high]."""
    shape = [1] * values.ndim
    shape[axis] = len(weight)
    first, second = values.take(low, axis), values.take(high, axis)
    second -= first  # in place throughout: new arrays cost more than the arithmetic
    second *= weight.reshape(shape)
    second += first
    return second


def center_zoom_grid(size: int, factor: float) -> tuple[Int64Array, Int64Array, Float32Array]:
    """Return where the pixels of a center zoom lie on one axis: two neighbors and the weight of the second.

    The central ⌈size / factor⌉ pixels are stretched to round(that · factor), first pixel on first and last on last,
    and the center of the result is kept.
    """
    crop = math.ceil(size / factor)
    stretched = round(crop * factor)
    position = np.arange(size) + (stretched - size) // 2
    coordinate = position * ((crop - 1) / (stretched - 1))
    low = np.minimum(coordinate.astype(np.int64), crop - 1)
    high = np.minimum(low + 1, crop - 1)
    start = (size - crop) // 2
    return start + low, start + high, (coordinate - low).astype(np.float32)


def center_zoom(values: Float32Array, factor: float) -> Float32Array:
    """Zoom (H, W, …) into its center, keeping the size.

    The image axes come first, so that indexing along them copies long contiguous rows.
    """
    rows = interpolate(values, *center_zoom_grid(values.shape[0], factor), axis=0)
    return interpolate(rows, *center_zoom_grid(values.shape[1], factor), axis=1)


def sample_bilinear(
    images: Float32Array, rows: Float32Array, columns: Float32Array, *, repeat_edge: bool
) -> Float32Array:
    """Return the bilinear values of image n at (rows[n], columns[n]), with reflection beyond the border.

    ``repeat_edge`` says whether the reflection repeats the edge pixel (dcba|abcd) or not (dcb|abcd).
    """
    count, height, width, channels = images.shape
    top, left = np.floor(rows), np.floor(columns)
    down, right = (rows - top)[..., None], (columns - left)[..., None]
    pixels = images.reshape(-1, channels)
    image = np.arange(count).reshape(-1, 1, 1) * (height * width)

    def interpolate_row(row: Float32Array) -> Float32Array:
        start = image + reflect(row, height, repeat_edge) * width
        first: Float32Array = pixels[start + reflect(left, width, repeat_edge)]
        second: Float32Array = pixels[start + reflect(left + 1, width, repeat_edge)]
        second -= first
        second *= right
        second += first
        return second

    upper, lower = interpolate_row(top), interpolate_row(top + 1)
    lower -= upper
    lower *= down
    lower += upper
    return lower


def reflect(position: Numbers, size: int, repeat_edge: bool) -> Int64Array:
    """Fold integral positions back into 0 … size - 1."""
    period = 2 * size if repeat_edge else 2 * size - 2
    folded = position.astype(np.int64) % period
    return np.minimum(folded, period - folded - (1 if repeat_edge else 0))


def rescale(image: UInt8Array, factor: float) -> UInt8Array:
    """Rescale one (H, W, C) image bilinearly between pixel centers, without antialiasing."""
    values = image.astype(np.float32)
    for axis, old in enumerate(image.shape[:2]):
        # Pixels are 1 / factor apart even where the new size had to be rounded.
        center = np.clip((np.arange(round(old * factor)) + 0.5) / factor - 0.5, 0, old - 1)
        low = center.astype(np.int64)
        values = interpolate(values, low, np.minimum(low + 1, old - 1), (center - low).astype(np.float32), axis)
    values += np.float32(0.5)
    return values.astype(np.uint8)


def downsample_box(images: UInt8Array, size: int, axis: int) -> UInt8Array:
    """Average, along one axis, the pixels whose centers fall under each new pixel; rounded."""
    scale = images.shape[axis] / size
    edges = np.floor(np.arange(size + 1) * scale + 0.5).astype(np.int64)
    sums = np.add.reduceat(images, edges[:-1], axis=axis, dtype=np.int32)
    counts = np.diff(edges).reshape([-1 if a == axis else 1 for a in range(images.ndim)])
    means: Int64Array = (2 * sums + counts) // (2 * counts)
    return means.astype(np.uint8)


def upsample_nearest(images: UInt8Array, size: int, axis: int) -> UInt8Array:
    """Enlarge along one axis by repeating pixels."""
    centers: NDArray[np.float64] = (np.arange(size) + 0.5) * (images.shape[axis] / size)
    return images.take(centers.astype(np.int64), axis)

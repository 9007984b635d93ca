"""Motion: blur every image along a line of its own direction."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ctta.corruptions.arrays import Float32Array, Int64Array, UInt8Array


def line_weights(radius: int, sigma: float) -> Float32Array:
    """Weights of the 2·radius + 1 taps of a one-sided gaussian, from the pixel itself onwards."""
    taps = np.arange(2 * radius + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2))
    weights /= weights.sum()
    return weights.astype(np.float32)


def line_offsets(degrees: Float32Array, num_taps: int) -> tuple[Int64Array, Int64Array]:
    """Whole-pixel (row, column) offsets of the taps of each line, both of shape (N, num_taps)."""
    angle = np.deg2rad(degrees.astype(np.float64))[:, None]
    taps = np.arange(num_taps)
    rows = np.ceil(taps * np.sin(angle) - 0.5).astype(np.int64)
    columns = np.ceil(taps * np.cos(angle) - 0.5).astype(np.int64)
    return rows, columns


def streak(images: UInt8Array, degrees: Float32Array, radius: int, sigma: float) -> Float32Array:
    """Blur image n along degrees[n] (0 looks right, 90 down), edges repeated.

    With the images sorted by angle, those that share an offset lie side by side: a tap is then a few shifted
    slices of the batch instead of a gather over all its pixels.
    """
    weights = line_weights(radius, sigma)
    order = np.argsort(degrees, kind="stable")
    rows, columns = line_offsets(degrees[order], len(weights))
    _, height, width, _ = images.shape
    top, left = max(0, -rows.min()), max(0, -columns.min())
    margins = ((0, 0), (top, max(0, rows.max())), (left, max(0, columns.max())), (0, 0))
    padded = np.pad(images[order], margins, mode="edge")

    blurred = np.zeros(images.shape, np.float32)
    for tap, weight in enumerate(weights):
        for first, last in runs(rows[:, tap], columns[:, tap]):
            y, x = top + rows[first, tap], left + columns[first, tap]
            blurred[first:last] += weight * padded[first:last, y : y + height, x : x + width]
    unsorted = np.empty_like(blurred)
    unsorted[order] = blurred
    return unsorted


def runs(*keys: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Stretches [first, last) over which every key keeps its value."""
    changes = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(keys[0])]
    return list(pairwise(bounds))

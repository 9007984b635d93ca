"""Linear filters in the image plane: arrays (N, H, W) or (N, H, W, C), axes 1 and 2 being the image's."""

from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ctta.corruptions.arrays import Float32Array

Numbers = NDArray[Any]

# Beyond the border: the edge pixel (aa|abcd), a mirror on it (cb|abcd), or a mirror behind it (ba|abcd).
Border = Literal["edge", "reflect", "symmetric"]

LONG = 8  # equal weights in a row from which running sums are faster; the kernels of 32x32 images have none


def filtered(values: Numbers, kernel: Numbers, border: Border) -> Float32Array:
    """Correlate with a two-dimensional kernel of odd sides: a sum of shifted images, one per weight.

    A long run of equal weights, as in a disk, is one term: the difference of two running sums, which for bytes is
    exact. So a disk costs as many terms as it has rows and rim pixels, not as it has pixels.
    """
    where = np.argwhere(kernel)
    centre = np.array(kernel.shape) // 2
    runs = long_runs(kernel)
    reach_y, reach_x = np.abs(where - centre).max(axis=0)
    margins = [(0, 0), (reach_y, reach_y), (reach_x, reach_x), (0, 0)][: values.ndim]
    padded = np.pad(values, margins, mode=border).astype(np.float64)
    height, width = values.shape[1:3]
    # In double precision, as a flat area must keep its value: a hair below would be truncated to one less.
    total, term = np.zeros(values.shape), np.empty(values.shape)
    in_a_run = {(row, column) for row, first, end in runs for column in range(first, end)}
    for row, column in where.tolist():
        if (row, column) in in_a_run:
            continue
        top, left = row - centre[0] + reach_y, column - centre[1] + reach_x
        np.multiply(padded[:, top : top + height, left : left + width], kernel[row, column], out=term)
        total += term
    if runs:
        start = [(0, 0), (0, 0), (1, 0), (0, 0)][: values.ndim]
        sums = np.cumsum(np.pad(padded, start), axis=2)  # of all that lies to the left
    for row, first, end in runs:
        top, left, right = (row - centre[0] + reach_y, *(column - centre[1] + reach_x for column in (first, end)))
        lines = sums[:, top : top + height]
        np.subtract(lines[:, :, right : right + width], lines[:, :, left : left + width], out=term)
        term *= kernel[row, first]
        total += term
    return total.astype(np.float32)


def long_runs(kernel: Numbers) -> list[tuple[int, int, int]]:
    """Stretches of at least LONG equal weights along a row: (row, first column, column after the last)."""
    found = []
    for row, weights in enumerate(kernel):
        bounds = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(weights)]
        found += [(row, first, end) for first, end in pairwise(bounds) if end - first >= LONG and weights[first]]
    return found


def gaussian_weights(sigma: float, reach: int) -> NDArray[np.float64]:
    """Weights at -reach … reach that sum to 1."""
    taps = np.arange(-reach, reach + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2)) if sigma else (taps == 0).astype(np.float64)
    normalised: NDArray[np.float64] = weights / weights.sum()
    return normalised


def smoothed(values: Numbers, sigma: float, border: Border = "edge", num_sigmas: float = 4.0) -> Float32Array:
    """Gaussian blur, cut off after `num_sigmas` sigmas."""
    weights = gaussian_weights(sigma, int(num_sigmas * sigma + 0.5))
    return filtered(filtered(values, weights[:, None], border), weights[None, :], border)

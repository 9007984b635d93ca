"""Linear filters in the image plane: arrays (N, H, W) or (N, H, W, C), axes 1 and 2 being the image's."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ctta.corruptions.arrays import Floats

Numbers = NDArray[Any]

# Beyond the border: the edge pixel (aa|abcd), a mirror on it (cb|abcd), or a mirror behind it (ba|abcd).
Border = Literal["edge", "reflect", "symmetric"]


def filtered(values: Numbers, kernel: Numbers, border: Border) -> Floats:
    """Correlate with a two-dimensional kernel of odd sides: a sum of shifted images, one per weight."""
    where = np.argwhere(kernel)
    centre = np.array(kernel.shape) // 2
    reach_y, reach_x = np.abs(where - centre).max(axis=0)
    margins = [(0, 0), (reach_y, reach_y), (reach_x, reach_x), (0, 0)][: values.ndim]
    padded = np.pad(values, margins, mode=border).astype(np.float64)
    height, width = values.shape[1:3]
    # In double precision, as a flat area must keep its value: a hair below would be truncated to one less.
    total, term = np.zeros(values.shape), np.empty(values.shape)
    for row, column in where:
        top, left = row - centre[0] + reach_y, column - centre[1] + reach_x
        np.multiply(padded[:, top : top + height, left : left + width], kernel[row, column], out=term)
        total += term
    return total.astype(np.float32)


def gaussian_weights(sigma: float, reach: int) -> NDArray[np.float64]:
    """Weights at -reach … reach that sum to 1."""
    taps = np.arange(-reach, reach + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2)) if sigma else (taps == 0).astype(np.float64)
    normalised: NDArray[np.float64] = weights / weights.sum()
    return normalised


def smoothed(values: Numbers, sigma: float, border: Border = "edge", num_sigmas: float = 4.0) -> Floats:
    """Gaussian blur, cut off after `num_sigmas` sigmas."""
    weights = gaussian_weights(sigma, int(num_sigmas * sigma + 0.5))
    return filtered(filtered(values, weights[:, None], border), weights[None, :], border)

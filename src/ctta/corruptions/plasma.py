"""Plasma clouds: the diamond-square fractal, for a whole batch at once."""

import numpy as np

from ctta.corruptions.arrays import Float32Array
from ctta.corruptions.rng import PerImageRNG

START = 100.0  # first displacement; its size matters only against the flat start, as the map is rescaled


def plasma(height: int, width: int, decay: float, draws: PerImageRNG) -> Float32Array:
    """Clouds in [0, 1] of shape (N, height, width), cut from a periodic map whose side is a power of two.

    Every halving of the grid first fills the centres of its squares with the mean of their corners, then the
    middles of its edges (the diamonds) with the mean of their four neighbours, each plus a displacement.
    The published code draws it from w·U(-w, w): its size is w², and w is divided by `decay` per halving.
    """
    side = max(2, 1 << (max(height, width) - 1).bit_length())
    cloud = np.zeros((len(draws.keys), side, side), np.float32)

    def displaced(total: Float32Array, wobble: float) -> Float32Array:
        displacement = draws.uniform(total.shape[1:], -(wobble**2), wobble**2)
        displacement += total / 4
        return displacement

    step, wobble = side, START
    while step >= 2:
        half = step // 2
        corners = cloud[:, ::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=1)
        centres = displaced(pairs + np.roll(pairs, -1, axis=2), wobble)
        cloud[:, half::step, half::step] = centres
        across = centres + np.roll(centres, 1, axis=1) + corners + np.roll(corners, -1, axis=2)
        cloud[:, ::step, half::step] = displaced(across, wobble)
        down = centres + np.roll(centres, 1, axis=2) + corners + np.roll(corners, -1, axis=1)
        cloud[:, half::step, ::step] = displaced(down, wobble)
        step, wobble = half, wobble / decay

    cloud -= cloud.min(axis=(1, 2), keepdims=True)
    cloud /= cloud.max(axis=(1, 2), keepdims=True)
    return cloud[:, :height, :width]

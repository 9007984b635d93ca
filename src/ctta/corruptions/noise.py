"""Noise: every value is disturbed on its own."""

from functools import lru_cache

import numpy as np

from ctta.corruptions.arrays import UInt8Array, truncated
from ctta.corruptions.recipe import recipe_of
from ctta.corruptions.rng import PerImageRNG

# Severities 1..5 at (32, 224) pixels.
GAUSSIAN = ((0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38))  # spread
SHOT = ((500, 250, 100, 75, 50), (60, 25, 12, 5, 3))  # photons at full brightness
IMPULSE = ((0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27))  # share of values
SPECKLE = ((0.06, 0.10, 0.12, 0.16, 0.20), (0.15, 0.20, 0.35, 0.45, 0.60))  # spread per brightness


def gaussian_noise(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Add normal noise of the same spread everywhere."""
    sigma = recipe_of(images).pick(GAUSSIAN, severity)
    noisy = draws.normal(images.shape[1:], std=255 * sigma)
    noisy += images
    return truncated(noisy)


def speckle_noise(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Add normal noise whose spread grows with the value."""
    sigma = recipe_of(images).pick(SPECKLE, severity)
    factor = draws.normal(images.shape[1:], mean=1.0, std=sigma)
    factor *= images
    return truncated(factor)


def shot_noise(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Replace every value by a count of photons: a Poisson draw with that mean."""
    photons = recipe_of(images).pick(SHOT, severity)
    where = draws.bits(images.shape[1:], 16).astype(np.int32)
    where += images.astype(np.int32) << 16
    return poisson_values(photons).take(where)


@lru_cache(maxsize=2)  # 16 MB each
def poisson_values(photons: int) -> UInt8Array:
    """For each of the 256 values, its 65,536 equally likely noisy values, in a row: the inverse CDF."""
    counts = np.arange(photons + 8 * int(photons**0.5) + 16)  # far beyond what 16 bits can tell from certain
    values = truncated(np.minimum(counts / photons, 1.0) * 255)
    rates = np.arange(256)[:, None] * (photons / 255)
    # The probability of a count is that of the count before times rate / count.
    ratios = np.where(counts > 0, rates / np.maximum(counts, 1), np.exp(-rates))
    up_to = np.rint(ratios.cumprod(axis=1).cumsum(axis=1) * 65536).astype(np.int64)
    up_to[:, -1] = 65536
    return np.repeat(np.tile(values, 256), np.diff(up_to, axis=1, prepend=0).ravel())


def impulse_noise(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Set a share of the values to white or to black, equally often."""
    share = recipe_of(images).pick(IMPULSE, severity)
    bits = draws.bits(images.shape[1:], 16)
    noisy = images.copy()
    noisy[bits < round(share * 65536)] = 0
    noisy[bits < round(share * 32768)] = 255
    return noisy

"""Noise: every value is disturbed independently."""

from functools import lru_cache

import numpy as np

from ctta.corruptions.arrays import UInt8Array, select_parameters, truncate_to_uint8
from ctta.corruptions.rng import PerImageRNG

# Severities 1..5 at (32, 224) pixels.
GAUSSIAN = ((0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38))  # standard deviation
SHOT = ((500, 250, 100, 75, 50), (60, 25, 12, 5, 3))  # photons at full brightness
IMPULSE = ((0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27))  # fraction of values
SPECKLE = ((0.06, 0.10, 0.12, 0.16, 0.20), (0.15, 0.20, 0.35, 0.45, 0.60))  # standard deviation, relative to the value


def gaussian_noise(images: UInt8Array, severity: int, rng: PerImageRNG) -> UInt8Array:
    """Add normal noise of one standard deviation."""
    sigma = select_parameters(images).lookup(GAUSSIAN, severity)
    noisy = rng.normal(images.shape[1:], std=255 * sigma)
    noisy += images
    return truncate_to_uint8(noisy)


def speckle_noise(images: UInt8Array, severity: int, rng: PerImageRNG) -> UInt8Array:
    """Add normal noise whose standard deviation is proportional to the value."""
    sigma = select_parameters(images).lookup(SPECKLE, severity)
    factor = rng.normal(images.shape[1:], mean=1.0, std=sigma)
    factor *= images
    return truncate_to_uint8(factor)


def shot_noise(images: UInt8Array, severity: int, rng: PerImageRNG) -> UInt8Array:
    """Replace every value by a photon count: a Poisson draw with that mean."""
    num_photons = select_parameters(images).lookup(SHOT, severity)
    entry = rng.bits(images.shape[1:], 16).astype(np.int32)
    entry += images.astype(np.int32) << 16
    return poisson_quantiles(num_photons).take(entry)


@lru_cache(maxsize=2)  # 16 MB each
def poisson_quantiles(num_photons: int) -> UInt8Array:
    """Return, for each of the 256 values in turn, its 65,536 equally likely noisy values: the inverse CDF."""
    counts = np.arange(num_photons + 8 * int(num_photons**0.5) + 16)  # beyond what 16 bits tell from certain
    values = truncate_to_uint8(np.minimum(counts / num_photons, 1.0) * 255)
    rates = np.arange(256)[:, None] * (num_photons / 255)
    # P(count) = P(count - 1) · rate / count
    ratios = np.where(counts > 0, rates / np.maximum(counts, 1), np.exp(-rates))
    cdf = np.rint(ratios.cumprod(axis=1).cumsum(axis=1) * 65536).astype(np.int64)
    cdf[:, -1] = 65536
    return np.repeat(np.tile(values, 256), np.diff(cdf, axis=1, prepend=0).ravel())


def impulse_noise(images: UInt8Array, severity: int, rng: PerImageRNG) -> UInt8Array:
    """Set a fraction of the values to white or black, equally often."""
    fraction = select_parameters(images).lookup(IMPULSE, severity)
    bits = rng.bits(images.shape[1:], 16)
    noisy = images.copy()
    noisy[bits < round(fraction * 65536)] = 0
    noisy[bits < round(fraction * 32768)] = 255
    return noisy

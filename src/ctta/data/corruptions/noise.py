"""Noise: every value is disturbed independently."""

from functools import lru_cache
from math import ceil, inf, sqrt

import numpy as np

from ctta.data.corruptions.arrays import (
    PerImageRNG,
    UInt8Array,
    blend,
    normal_quantiles,
    select_parameters,
    truncate_to_uint8,
)

# Severities 0..5 at (32, 224) pixels; 0 is where the interpolation below 1 starts.
GAUSSIAN = ((0, 0.04, 0.06, 0.08, 0.09, 0.10), (0, 0.08, 0.12, 0.18, 0.26, 0.38))  # standard deviation
# Photons at full brightness, of which the inverse is interpolated.
SHOT = ((inf, 500, 250, 100, 75, 50), (inf, 60, 25, 12, 5, 3))
IMPULSE = ((0, 0.01, 0.02, 0.03, 0.05, 0.07), (0, 0.03, 0.06, 0.09, 0.17, 0.27))  # fraction of values
# Standard deviation, relative to the value.
SPECKLE = ((0, 0.06, 0.10, 0.12, 0.16, 0.20), (0, 0.15, 0.20, 0.35, 0.45, 0.60))
MANY_PHOTONS = 600  # more than any whole severity has


def gaussian_noise(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Add normal noise of one standard deviation."""
    sigma = select_parameters(images).lookup(GAUSSIAN, severity)
    noisy = rng.normal(images.shape[1:], std=255 * sigma)
    noisy += images
    return truncate_to_uint8(noisy)


def speckle_noise(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Add normal noise whose standard deviation is proportional to the value."""
    sigma = select_parameters(images).lookup(SPECKLE, severity)
    factor = rng.normal(images.shape[1:], mean=1.0, std=sigma)
    factor *= images
    return truncate_to_uint8(factor)


def shot_noise(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Replace every value by a photon count: a Poisson draw with that mean."""
    weaker, stronger, weight = select_parameters(images).neighbors(SHOT, severity)
    num_photons = 1 / blend(1 / weaker, 1 / stronger, weight) if weight else weaker
    entry = rng.bits(images.shape[1:], 16).astype(np.int32)
    entry += images.astype(np.int32) << 16
    return poisson_quantiles(num_photons).take(entry)


@lru_cache(maxsize=2)  # 16 MB each
def poisson_quantiles(num_photons: float) -> UInt8Array:
    """Return, for each of the 256 values in turn, its 65,536 equally likely noisy values: the inverse CDF."""
    if num_photons > MANY_PHOTONS:
        return normal_photon_quantiles(num_photons)
    counts = np.arange(ceil(num_photons) + 8 * int(num_photons**0.5) + 16)  # beyond what 16 bits tell from certain
    values = truncate_to_uint8(np.minimum(counts / num_photons, 1.0) * 255)
    rates = np.arange(256)[:, None] * (num_photons / 255)
    # P(count) = P(count - 1) · rate / count
    ratios = np.where(counts > 0, rates / np.maximum(counts, 1), np.exp(-rates))
    cdf = np.rint(ratios.cumprod(axis=1).cumsum(axis=1) * 65536).astype(np.int64)
    cdf[:, -1] = 65536
    return np.repeat(np.tile(values, 256), np.diff(cdf, axis=1, prepend=0).ravel())


def normal_photon_quantiles(num_photons: float) -> UInt8Array:
    """Return the table of :func:`poisson_quantiles` for many photons: whole counts, drawn from a normal distribution.

    exp(-photons) is no longer a floating-point number, and the two distributions differ by less than a gray level.
    """
    rates = (value * (num_photons / 255) for value in range(256))
    counts = (np.rint(rate + sqrt(rate) * normal_quantiles().astype(np.float64)) for rate in rates)
    return np.concatenate([truncate_to_uint8(np.minimum(count / num_photons, 1) * 255) for count in counts])


def impulse_noise(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Set a fraction of the values to white or black, equally often."""
    fraction = select_parameters(images).lookup(IMPULSE, severity)
    bits = rng.bits(images.shape[1:], 16)
    noisy = images.copy()
    noisy[bits < round(fraction * 65536)] = 0
    noisy[bits < round(fraction * 32768)] = 255
    return noisy

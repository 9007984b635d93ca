"""Blur: every value is averaged with, or copied from, its neighborhood."""

import math
from collections import Counter

import numpy as np

from ctta.data.corruptions.arrays import (
    Float32Array,
    Int64Array,
    PerImageRNG,
    UInt8Array,
    blend,
    select_parameters,
    truncate_to_uint8,
)
from ctta.data.corruptions.filters import (
    center_zoom,
    center_zoom_grid,
    correlate,
    find_runs,
    gaussian_filter,
    gaussian_kernel,
)

# Severities 0..5 at (32, 224) pixels; 0 is where the interpolation below 1 starts. Lengths are in pixels.
GAUSSIAN = ((0.0, 0.4, 0.6, 0.7, 0.8, 1.0), (0.0, 1.0, 2.0, 3.0, 4.0, 6.0))  # sigma
DEFOCUS = (  # radius of the disk, sigma of its antialiasing
    ((0.0, 0.0), (0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)),
    ((0.0, 0.0), (3.0, 0.1), (4.0, 0.5), (6.0, 0.5), (8.0, 0.5), (10.0, 0.5)),
)
GLASS = (  # sigma, largest displacement, number of passes
    ((0.0, 0, 0), (0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    ((0.0, 0, 0), (0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
)
MOTION = (  # radius, sigma
    ((0, 0.0), (6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)),
    ((0, 0.0), (10, 3.0), (15, 5.0), (15, 8.0), (15, 12.0), (20, 15.0)),
)
ZOOM = (  # end of the range of zooms, which starts at 1 and excludes the end, step between them
    ((1.0, 0.01), (1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    ((1.0, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
)


def gaussian_blur(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Blur by a Gaussian."""
    parameters = select_parameters(images)
    return truncate_to_uint8(gaussian_filter(images, parameters.lookup(GAUSSIAN, severity) * parameters.scale))


def defocus_blur(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Spread every pixel over a disk with soft edges, as a lens out of focus does."""
    parameters = select_parameters(images)
    low, high, weight = parameters.neighbors(DEFOCUS, severity)
    kernel = disk_kernel(*(parameters.scale * value for value in blend(low, high, weight)))
    if weight and parameters.column == 0:
        # The disks of small images are single pixels below a radius of 1, where only sigma counts, which falls after
        # severity 3: the kernels are interpolated instead.
        first, second = (disk_kernel(*(parameters.scale * value for value in each)) for each in (low, high))
        kernel = first + np.float32(weight) * (second - first)
    return truncate_to_uint8(correlate(images, kernel, "reflect"))


def disk_kernel(radius: float, sigma: float) -> Float32Array:
    """Return a disk that sums to 1, smoothed by a Gaussian of 3x3 pixels, or 5x5 for radii over 8."""
    reach = max(8, int(radius))  # the published grid; a disk that fills it is not smoothed beyond it
    axis = np.arange(-reach, reach + 1)
    inside = axis**2 + axis[:, None] ** 2 <= radius**2
    weights = gaussian_kernel(sigma, 1 if radius <= 8 else 2)
    smooth: Float32Array = correlate(inside[None] / inside.sum(), weights[:, None] * weights, "reflect")[0]
    return smooth


def glass_blur(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Blur, replace every pixel by a random neighbor, and blur again."""
    parameters = select_parameters(images)
    low, high, weight = parameters.neighbors(GLASS, severity)
    # Rounded before the interpolation, so that it meets the whole severities also at sizes between the published ones.
    (low, high) = ((sigma * parameters.scale, round(reach * parameters.scale), k) for sigma, reach, k in (low, high))
    sigma, reach, num_passes = blend(low, high, weight)
    count, height, width, channels = images.shape
    image = np.arange(count)[:, None] * (height * width)
    glass = truncate_to_uint8(gaussian_filter(images, sigma)).reshape(-1, channels)
    while num_passes > 0:
        source = glass_sources(height, width, max(1, reach), rng, min(1, num_passes))
        glass = glass[image + source].reshape(-1, channels)
        num_passes -= 1
    return truncate_to_uint8(gaussian_filter(glass.reshape(images.shape), sigma))


def glass_sources(height: int, width: int, reach: float, rng: PerImageRNG, fraction: float = 1.0) -> Int64Array:
    """Return the pixel each pixel's value comes from in one pass, as flat positions (N, H·W).

    A reach between two whole numbers mixes their displacements, and of a fraction of a pass only that part of the
    pixels takes part: both change the image gradually.

    The published loop runs from the bottom right to the top left and means to swap two pixels, but copies: the
    visited pixel takes its neighbor's value and the neighbor keeps it. A visited pixel therefore holds what its
    neighbor held, which is the neighbor's own source if that was visited before. These are chains of pointers, which
    pointer doubling resolves for the whole batch in a few steps.
    """
    margin = math.ceil(reach) + 1
    rows, columns = np.arange(margin, height - margin + 2), np.arange(margin, width - margin + 2)
    visited = (rows[:, None] * width + columns).ravel()
    # Uniform in [-reach, reach), rounded down; exact for whole numbers.
    steps = np.floor(rng.bits((2, visited.size), 32) * (2 * reach / 2**32) - reach).astype(np.int64)
    if fraction < 1:
        steps *= rng.uniform((1, visited.size)) < fraction
    positions = np.arange(height * width)
    source = np.tile(positions, (len(steps), 1))
    source[:, visited] += steps[:, 0] * width + steps[:, 1]
    was_visited = np.isin(positions, visited)
    follow = (source > positions) & was_visited[source]
    while follow.any():
        beyond = np.take_along_axis(source, source, axis=1)
        follow_beyond = np.take_along_axis(follow, source, axis=1)
        source = np.where(follow, beyond, source)
        follow &= follow_beyond
    return source


def motion_blur(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Blur every image along a line within 45° of the horizontal."""
    parameters = select_parameters(images)
    radius, sigma = parameters.lookup(MOTION, severity)
    degrees = rng.uniform((), -45, 45)
    radius = max(1, round(radius * parameters.scale))
    return truncate_to_uint8(blur_along_lines(images, degrees, radius, sigma * parameters.scale))


def blur_along_lines(images: UInt8Array, degrees: Float32Array, radius: int, sigma: float) -> Float32Array:
    """Blur image n along degrees[n] (0 points right, 90 down), with repeated edges.

    Images are sorted by angle, so that those that share an offset are adjacent: a tap is then a few shifted slices of
    the batch instead of a gather over all its pixels.
    """
    weights, taps = line_weights(radius, sigma), np.arange(2 * radius + 1)
    order = np.argsort(degrees, kind="stable")
    # The offsets of the taps of each line in whole pixels, (N, taps).
    angle = np.deg2rad(degrees[order].astype(np.float64))[:, None]
    rows = np.ceil(taps * np.sin(angle) - 0.5).astype(np.int64)
    columns = np.ceil(taps * np.cos(angle) - 0.5).astype(np.int64)
    _, height, width, _ = images.shape
    top, left = max(0, -rows.min()), max(0, -columns.min())
    margins = ((0, 0), (top, max(0, rows.max())), (left, max(0, columns.max())), (0, 0))
    padded = np.pad(images[order], margins, mode="edge")

    blurred = np.zeros(images.shape, np.float32)
    for tap, weight in enumerate(weights):
        for first, end in find_runs(rows[:, tap], columns[:, tap]):
            y, x = top + rows[first, tap], left + columns[first, tap]
            blurred[first:end] += weight * padded[first:end, y : y + height, x : x + width]
    unsorted = np.empty_like(blurred)
    unsorted[order] = blurred
    return unsorted


def line_weights(radius: int, sigma: float) -> Float32Array:
    """Return the 2·radius + 1 weights of a one-sided Gaussian, starting at the pixel itself."""
    taps = np.arange(2 * radius + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2))
    weights /= weights.sum()
    return weights.astype(np.float32)


def zoom_blur(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Average the image with zooms into its center."""
    end, step = select_parameters(images).lookup(ZOOM, severity)
    factors = np.arange(1, end, step).tolist()  # arange, as its rounding decides ties and whether the end is included
    values = images.transpose(1, 2, 0, 3).astype(np.float32, order="C")
    total = values.copy()
    for factor, repeats in merge_equal_zooms(images.shape[1:3], factors):
        total += np.float32(repeats) * center_zoom(values, factor)
    return truncate_to_uint8(total / np.float32(len(factors) + 1)).transpose(2, 0, 1, 3)


def merge_equal_zooms(sizes: tuple[int, int], factors: list[float]) -> list[tuple[float, int]]:
    """Return distinct factors and their counts: on small images many factors round to the same zoom."""
    grids = [tuple(part.tobytes() for size in sizes for part in center_zoom_grid(size, f)) for f in factors]
    return [(factors[grids.index(grid)], count) for grid, count in Counter(grids).items()]

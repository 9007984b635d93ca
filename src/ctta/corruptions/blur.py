"""Blur: every value is averaged with, or copied from, its neighborhood."""

from collections import Counter

import numpy as np

from ctta.corruptions.arrays import Float32Array, Int64Array, UInt8Array, select_parameters, truncate_to_uint8
from ctta.corruptions.filters import (
    center_zoom,
    center_zoom_grid,
    correlate,
    find_runs,
    gaussian_filter,
    gaussian_kernel,
)
from ctta.corruptions.rng import PerImageRNG

# Severities 1..5 at (32, 224) pixels. Lengths are in pixels.
GAUSSIAN = ((0.4, 0.6, 0.7, 0.8, 1.0), (1.0, 2.0, 3.0, 4.0, 6.0))  # sigma
DEFOCUS = (  # radius of the disk, sigma of its antialiasing
    ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)),
    ((3.0, 0.1), (4.0, 0.5), (6.0, 0.5), (8.0, 0.5), (10.0, 0.5)),
)
GLASS = (  # sigma, largest displacement, number of passes
    ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    ((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
)
MOTION = (  # radius, sigma
    ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)),
    ((10, 3.0), (15, 5.0), (15, 8.0), (15, 12.0), (20, 15.0)),
)
ZOOM = (  # number of zooms, step between them
    ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01)),
    ((12, 0.01), (16, 0.01), (11, 0.02), (13, 0.02), (11, 0.03)),
)


def gaussian_blur(images: UInt8Array, severity: int, rng: PerImageRNG) -> UInt8Array:
    """Blur by a Gaussian."""
    parameters = select_parameters(images)
    return truncate_to_uint8(gaussian_filter(images, parameters.lookup(GAUSSIAN, severity) * parameters.scale))


def defocus_blur(images: UInt8Array, severity: int, rng: PerImageRNG) -> UInt8Array:
    """Spread every pixel over a disk with soft edges, as a lens out of focus does."""
    parameters = select_parameters(images)
    radius, sigma = parameters.lookup(DEFOCUS, severity)
    kernel = disk_kernel(radius * parameters.scale, sigma * parameters.scale)
    return truncate_to_uint8(correlate(images, kernel, "reflect"))


def disk_kernel(radius: float, sigma: float) -> Float32Array:
    """Return a disk that sums to 1, smoothed by a Gaussian of 3x3 pixels, or 5x5 for radii over 8."""
    reach = max(8, int(radius))  # the published grid; a disk that fills it is not smoothed beyond it
    axis = np.arange(-reach, reach + 1)
    inside = axis**2 + axis[:, None] ** 2 <= radius**2
    weights = gaussian_kernel(sigma, 1 if radius <= 8 else 2)
    smooth: Float32Array = correlate(inside[None] / inside.sum(), weights[:, None] * weights, "reflect")[0]
    return smooth


def glass_blur(images: UInt8Array, severity: int, rng: PerImageRNG) -> UInt8Array:
    """Blur, replace every pixel by a random neighbor, and blur again."""
    parameters = select_parameters(images)
    sigma, reach, num_passes = parameters.lookup(GLASS, severity)
    sigma, reach = sigma * parameters.scale, max(1, round(reach * parameters.scale))
    count, height, width, channels = images.shape
    image = np.arange(count)[:, None] * (height * width)
    glass = truncate_to_uint8(gaussian_filter(images, sigma)).reshape(-1, channels)
    for _ in range(num_passes):
        glass = glass[image + glass_sources(height, width, reach, rng)].reshape(-1, channels)
    return truncate_to_uint8(gaussian_filter(glass.reshape(images.shape), sigma))


def glass_sources(height: int, width: int, reach: int, rng: PerImageRNG) -> Int64Array:
    """Return the pixel each pixel's value comes from in one pass, as flat positions (N, H·W).

    The published loop runs from the bottom right to the top left and means to swap two pixels, but copies: the
    visited pixel takes its neighbor's value and the neighbor keeps it. A visited pixel therefore holds what its
    neighbor held, which is the neighbor's own source if that was visited before. These are chains of pointers, which
    pointer doubling resolves for the whole batch in a few steps.
    """
    rows, columns = np.arange(reach + 1, height - reach + 1), np.arange(reach + 1, width - reach + 1)
    visited = (rows[:, None] * width + columns).ravel()
    steps = rng.integers((2, visited.size), -reach, reach)
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


def motion_blur(images: UInt8Array, severity: int, rng: PerImageRNG) -> UInt8Array:
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
    weights = line_weights(radius, sigma)
    order = np.argsort(degrees, kind="stable")
    rows, columns = line_offsets(degrees[order], len(weights))
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


def line_offsets(degrees: Float32Array, num_taps: int) -> tuple[Int64Array, Int64Array]:
    """Return the offsets of the taps of each line in whole pixels: rows and columns, each (N, num_taps)."""
    angle = np.deg2rad(degrees.astype(np.float64))[:, None]
    taps = np.arange(num_taps)
    rows = np.ceil(taps * np.sin(angle) - 0.5).astype(np.int64)
    columns = np.ceil(taps * np.cos(angle) - 0.5).astype(np.int64)
    return rows, columns


def zoom_blur(images: UInt8Array, severity: int, rng: PerImageRNG) -> UInt8Array:
    """Average the image with zooms into its center."""
    num_zooms, step = select_parameters(images).lookup(ZOOM, severity)
    factors = np.arange(1, 1 + (num_zooms - 0.5) * step, step).tolist()  # arange, as its rounding decides ties
    values = images.transpose(1, 2, 0, 3).astype(np.float32, order="C")
    total = values.copy()
    for factor, repeats in merge_equal_zooms(images.shape[1:3], factors):
        total += np.float32(repeats) * center_zoom(values, factor)
    return truncate_to_uint8(total / np.float32(num_zooms + 1)).transpose(2, 0, 1, 3)


def merge_equal_zooms(sizes: tuple[int, int], factors: list[float]) -> list[tuple[float, int]]:
    """Return distinct factors and their counts: on small images many factors round to the same zoom."""
    grids = [tuple(part.tobytes() for size in sizes for part in center_zoom_grid(size, f)) for f in factors]
    return [(factors[grids.index(grid)], count) for grid, count in Counter(grids).items()]

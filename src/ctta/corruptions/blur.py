"""Blur: every value is mixed with, or taken from, its neighbourhood."""

from collections import Counter

import numpy as np

from ctta.corruptions.arrays import Float32Array, Int64Array, UInt8Array, truncated
from ctta.corruptions.filters import filtered, gaussian_weights, smoothed
from ctta.corruptions.recipe import recipe_of
from ctta.corruptions.resample import zoom_grid, zoomed
from ctta.corruptions.rng import PerImageRNG
from ctta.corruptions.streaks import streak

# Severities 1..5 at (32, 224) pixels. Lengths are in pixels.
GAUSSIAN = ((0.4, 0.6, 0.7, 0.8, 1.0), (1.0, 2.0, 3.0, 4.0, 6.0))  # sigma
DEFOCUS = (  # radius of the disk, sigma of its own smoothing
    ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)),
    ((3.0, 0.1), (4.0, 0.5), (6.0, 0.5), (8.0, 0.5), (10.0, 0.5)),
)
GLASS = (  # sigma, reach of the displacement, number of passes
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


def gaussian_blur(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Mix every pixel with its neighbours, by a gaussian."""
    recipe = recipe_of(images)
    return truncated(smoothed(images, recipe.pick(GAUSSIAN, severity) * recipe.scale))


def defocus_blur(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Spread every pixel over a soft-edged disk, as a lens out of focus does."""
    recipe = recipe_of(images)
    radius, sigma = recipe.pick(DEFOCUS, severity)
    kernel = disk(radius * recipe.scale, sigma * recipe.scale)
    return truncated(filtered(images, kernel, "reflect"))


def disk(radius: float, sigma: float) -> Float32Array:
    """A disk that sums to 1, smoothed by a gaussian of 3x3 pixels, or 5x5 for radii over 8."""
    reach = max(8, int(radius))  # the published grid; a disk that fills it is not smoothed beyond it
    axis = np.arange(-reach, reach + 1)
    inside = axis**2 + axis[:, None] ** 2 <= radius**2
    weights = gaussian_weights(sigma, 1 if radius <= 8 else 2)
    smooth: Float32Array = filtered(inside[None] / inside.sum(), weights[:, None] * weights, "reflect")[0]
    return smooth


def glass_blur(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Blur, let every pixel take the value of a random near one, and blur again."""
    recipe = recipe_of(images)
    sigma, reach, num_passes = recipe.pick(GLASS, severity)
    sigma, reach = sigma * recipe.scale, max(1, round(reach * recipe.scale))
    count, height, width, channels = images.shape
    image = np.arange(count)[:, None] * (height * width)
    glass = truncated(smoothed(images, sigma)).reshape(-1, channels)
    for _ in range(num_passes):
        glass = glass[image + glass_sources(height, width, reach, draws)].reshape(-1, channels)
    return truncated(smoothed(glass.reshape(images.shape), sigma))


def glass_sources(height: int, width: int, reach: int, draws: PerImageRNG) -> Int64Array:
    """The pixel each pixel's value comes from in one pass, as flat positions (N, H·W).

    The published loop goes from the bottom right to the top left and means to swap two pixels, but
    copies: the visited pixel takes its neighbour's value and the neighbour keeps it. So a visited pixel holds
    what its neighbour held, which is the neighbour's own source if that was visited before: chains of
    pointers, which doubling follows in a few steps over the whole batch, not one pixel after another.
    """
    rows, columns = np.arange(reach + 1, height - reach + 1), np.arange(reach + 1, width - reach + 1)
    visited = (rows[:, None] * width + columns).ravel()
    steps = draws.integers((2, visited.size), -reach, reach)
    everywhere = np.arange(height * width)
    source = np.tile(everywhere, (len(steps), 1))
    source[:, visited] += steps[:, 0] * width + steps[:, 1]
    was_visited = np.isin(everywhere, visited)
    follow = (source > everywhere) & was_visited[source]
    while follow.any():
        beyond = np.take_along_axis(source, source, axis=1)
        follow_beyond = np.take_along_axis(follow, source, axis=1)
        source = np.where(follow, beyond, source)
        follow &= follow_beyond
    return source


def motion_blur(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Smear every image along a line within 45° of the horizontal."""
    recipe = recipe_of(images)
    radius, sigma = recipe.pick(MOTION, severity)
    degrees = draws.uniform((), -45, 45)
    return truncated(streak(images, degrees, max(1, round(radius * recipe.scale)), sigma * recipe.scale))


def zoom_blur(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Average the image with zooms into its centre."""
    count, step = recipe_of(images).pick(ZOOM, severity)
    factors = np.arange(1, 1 + (count - 0.5) * step, step).tolist()  # arange, as its rounding decides ties
    values = images.transpose(1, 2, 0, 3).astype(np.float32, order="C")
    total = values.copy()
    for factor, repeats in distinct_zooms(images.shape[1:3], factors):
        total += np.float32(repeats) * zoomed(values, factor)
    return truncated(total / np.float32(count + 1)).transpose(2, 0, 1, 3)


def distinct_zooms(sizes: tuple[int, int], factors: list[float]) -> list[tuple[float, int]]:
    """Factors with how often they occur: on small images many factors round to the same zoom."""
    grids = [tuple(part.tobytes() for size in sizes for part in zoom_grid(size, f)) for f in factors]
    repeats = Counter(grids)
    return [(factors[grids.index(grid)], times) for grid, times in repeats.items()]

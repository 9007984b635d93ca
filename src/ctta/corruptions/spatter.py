"""Spatter: drops of water or mud on the lens."""

import numpy as np

from ctta.corruptions.arrays import Float32Array, UInt8Array, truncated
from ctta.corruptions.edges import canny, chamfer_distance
from ctta.corruptions.filters import filtered, smoothed
from ctta.corruptions.recipe import recipe_of
from ctta.corruptions.rng import PerImageRNG

# Severities 1..5 at (32, 224) pixels.
SPATTER = (  # mean and spread of the noise, its smoothing, threshold, strength, whether mud
    (
        (0.62, 0.1, 0.7, 0.7, 0.5, False),
        (0.65, 0.1, 0.8, 0.7, 0.5, False),
        (0.65, 0.3, 1.0, 0.69, 0.5, False),
        (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    ),
    (
        (0.65, 0.3, 4.0, 0.69, 0.6, False),
        (0.65, 0.3, 3.0, 0.68, 0.6, False),
        (0.65, 0.3, 2.0, 0.68, 0.5, False),
        (0.65, 0.3, 1.0, 0.65, 1.5, True),
        (0.67, 0.4, 1.0, 0.65, 1.5, True),
    ),
)
WATER = np.array([175, 238, 238], np.float32)  # pale turquoise
MUD = np.array([63, 42, 20], np.float32)  # brown
EMBOSS = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
BOX = np.full((3, 3), 1 / 9)
FARTHEST = 20  # distances are cut here


def spatter(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Cover the picture with blobs of liquid: smooth noise over a threshold."""
    recipe = recipe_of(images)
    mean, spread, sigma, threshold, strength, is_mud = recipe.pick(SPATTER, severity)
    noise = draws.normal(images.shape[1:3], mean, spread)
    sigma *= recipe.scale
    liquid = smoothed(noise, sigma)
    liquid[liquid < threshold] = 0
    if is_mud:
        cover = mud_cover((liquid > threshold).astype(np.float32), strength * recipe.scale)[..., None]
        return truncated(images * (1 - cover) + MUD * cover)
    water = WATER * (np.float32(strength) * water_shine(truncated(liquid * 255))[..., None])
    return truncated(water + images)


def mud_cover(blobs: Float32Array, sigma: float) -> Float32Array:
    """Blobs with soft edges; where they would be thin there is no mud."""
    cover = smoothed(blobs, sigma)
    cover[cover < 0.8] = 0
    return cover


def water_shine(liquid: UInt8Array) -> Float32Array:
    """How much drops shine: embossed by the distance to their rims, scaled to a maximum of 1."""
    distance = np.minimum(chamfer_distance(canny(liquid, 50, 150)), FARTHEST)
    relief = equalized(truncated(filtered(distance, BOX, "reflect")))
    embossed = truncated(filtered(relief, EMBOSS, "reflect"))
    shine = np.rint(filtered(embossed, BOX, "reflect"))
    shine *= liquid
    shine /= np.maximum(shine.max(axis=(1, 2), keepdims=True), 1)
    return shine


def equalized(distance: UInt8Array) -> UInt8Array:
    """Histogram equalisation of each image: a value becomes its rank, from 0 for the lowest to 255."""
    levels = np.arange(FARTHEST + 1, dtype=np.uint8)
    up_to = np.stack([(distance <= level).sum(axis=(1, 2)) for level in levels], axis=1)
    lowest = distance.min(axis=(1, 2))
    num_lowest = np.take_along_axis(up_to, lowest[:, None].astype(np.int64), axis=1)
    num_others = distance[0].size - num_lowest
    ranks = np.rint((up_to - num_lowest) * (255 / np.maximum(num_others, 1)))
    ranks = np.where(num_others > 0, ranks, lowest[:, None])  # a flat image stays as it is
    flat = distance.reshape(len(distance), -1).astype(np.int64)
    return np.take_along_axis(truncated(ranks), flat, axis=1).reshape(distance.shape)

"""Weather: a layer is laid over the picture."""

import numpy as np

from ctta.corruptions.arrays import Float32Array, UInt8Array, truncated
from ctta.corruptions.frost import PhotoPaths, frost_textures
from ctta.corruptions.plasma import plasma
from ctta.corruptions.recipe import recipe_of
from ctta.corruptions.resample import zoomed
from ctta.corruptions.rng import PerImageRNG
from ctta.corruptions.streaks import streak

# Severities 1..5 at (32, 224) pixels.
SNOW = (  # mean and spread of the flakes, zoom, threshold, streak radius and sigma, share of the picture kept
    (
        (0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.95),
        (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.8),
    ),
    (
        (0.1, 0.3, 3.0, 0.5, 10, 4.0, 0.8),
        (0.2, 0.3, 2.0, 0.5, 12, 4.0, 0.7),
        (0.55, 0.3, 4.0, 0.9, 12, 8.0, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8.0, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12.0, 0.55),
    ),
)
FROST = (  # share of the picture, share of the frost
    ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    ((1.0, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
)
FROST_SCALE = (0.2, 1.0)  # of the photographs
FOG = (  # thickness, decay of the plasma's amplitude per halving
    ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)),
    ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4)),
)
BRIGHTNESS = ((0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5))

LUMA = np.array([0.299, 0.587, 0.114], np.float32)


def snow(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Whiten the picture and add falling flakes: thresholded noise, zoomed and streaked downwards."""
    recipe = recipe_of(images)
    mean, spread, zoom, threshold, radius, sigma, keep = recipe.pick(SNOW, severity)
    noise = draws.normal(images.shape[1:3], mean, spread)
    flakes = zoomed(noise.transpose(1, 2, 0), max(1.0, zoom * recipe.scale)).transpose(2, 0, 1)[..., None]
    flakes[flakes < threshold] = 0
    degrees = draws.uniform((), -135, -45)
    length = max(1, round(radius * recipe.scale))
    layer = streak(truncated(255 * flakes), degrees, length, sigma * recipe.scale)
    layer = np.floor(layer)  # it was stored as bytes

    snowy = np.maximum(images, 1.5 * luma(images) + np.float32(127.5))
    snowy *= np.float32(1 - keep)
    snowy += np.float32(keep) * images
    snowy += layer + layer[:, ::-1, ::-1]
    return truncated(snowy)


def luma(images: UInt8Array) -> Float32Array:
    """Grey value (N, H, W, 1), summed channel by channel so that no batch shape changes its rounding."""
    red, green, blue = (images[..., c, None] * LUMA[c] for c in range(3))
    grey: Float32Array = red + green + blue
    return grey


def frost(images: UInt8Array, severity: int, draws: PerImageRNG, photos: PhotoPaths | None = None) -> UInt8Array:
    """Add a random crop of one of five photographs of frosted glass."""
    recipe = recipe_of(images)
    keep, share = recipe.pick(FROST, severity)
    height, width = images.shape[1:3]
    scale = FROST_SCALE[recipe.column] * recipe.scale
    textures = frost_textures(scale, height, width, photos)

    # All textures lie in one row of pixels, so that the crops of the whole batch are one gather.
    heights, widths = (np.array([texture.shape[axis] for texture in textures]) for axis in (0, 1))
    starts = np.cumsum(heights * widths) - heights * widths
    which = draws.integers((), 0, len(textures))
    place = draws.uniform((2,)).astype(np.float64)
    top = (place[:, 0] * (heights[which] - height)).astype(np.int64)
    left = (place[:, 1] * (widths[which] - width)).astype(np.int64)
    corner = starts[which] + top * widths[which] + left
    rows = corner[:, None] + np.arange(height) * widths[which, None]
    pixels = np.concatenate([texture.reshape(-1, 3) for texture in textures])
    crops = pixels[rows[:, :, None] + np.arange(width)]

    frosted = np.float32(keep) * images
    frosted += np.float32(share) * crops
    return truncated(frosted)


def fog(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Add a plasma cloud, then darken until the brightest value fits again."""
    thickness, decay = recipe_of(images).pick(FOG, severity)
    cloud = plasma(images.shape[1], images.shape[2], decay, draws)[..., None]
    brightest = images.max(axis=(1, 2, 3), keepdims=True).astype(np.float32) / 255
    foggy = np.float32(255 * thickness) * cloud + images
    foggy *= brightest / (brightest + np.float32(thickness))
    return truncated(foggy)


def brightness(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Raise the value of HSV, which scales a colour: hue and saturation stay."""
    gain = 255 * recipe_of(images).pick(BRIGHTNESS, severity)
    value = images.max(axis=-1, keepdims=True).astype(np.float32)
    raised = np.minimum(value + np.float32(gain), np.float32(255))
    scaled = images * (raised / np.maximum(value, 1))
    return truncated(np.where(value > 0, scaled, raised))

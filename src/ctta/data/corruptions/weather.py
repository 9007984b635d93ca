"""Weather: snow, fog and brightness; see frost.py and spatter.py for the other two."""

import numpy as np

from ctta.data.corruptions.arrays import Float32Array, UInt8Array, select_parameters, truncate_to_uint8
from ctta.data.corruptions.blur import blur_along_lines
from ctta.data.corruptions.filters import center_zoom
from ctta.data.corruptions.rng import PerImageRNG

# Severities 0..5 at (32, 224) pixels; 0 is where the interpolation below 1 starts.
SNOW = (  # mean and standard deviation of the noise, zoom, threshold, radius and sigma of the streaks, weight of image
    (
        (0.1, 0.2, 1.0, 1.0, 8, 3.0, 1.0),
        (0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.95),
        (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.8),
    ),
    (
        (0.1, 0.3, 3.0, 1.0, 10, 4.0, 1.0),
        (0.1, 0.3, 3.0, 0.5, 10, 4.0, 0.8),
        (0.2, 0.3, 2.0, 0.5, 12, 4.0, 0.7),
        (0.55, 0.3, 4.0, 0.9, 12, 8.0, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8.0, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12.0, 0.55),
    ),
)
FOG = (  # thickness, decay of the plasma's amplitude per octave
    ((0.0, 3.0), (0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)),
    ((0.0, 2.0), (1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4)),
)
BRIGHTNESS = ((0, 0.05, 0.1, 0.15, 0.2, 0.3), (0, 0.1, 0.2, 0.3, 0.4, 0.5))

LUMA = np.array([0.299, 0.587, 0.114], np.float32)
PLASMA_AMPLITUDE = 100.0  # of the first displacement; arbitrary, as the map is rescaled to [0, 1]


def snow(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Whiten the image and add falling flakes: thresholded noise, zoomed and blurred downwards."""
    parameters = select_parameters(images)
    mean, std, zoom, threshold, radius, sigma, keep = parameters.lookup(SNOW, severity)
    noise = rng.normal(images.shape[1:3], mean, std)
    flakes = center_zoom(noise.transpose(1, 2, 0), max(1.0, zoom * parameters.scale)).transpose(2, 0, 1)[..., None]
    flakes[flakes < threshold] = 0
    degrees = rng.uniform((), -135, -45)
    radius = max(1, round(radius * parameters.scale))
    layer = blur_along_lines(truncate_to_uint8(255 * flakes), degrees, radius, sigma * parameters.scale)
    layer = np.floor(layer)  # the published code stores it as bytes

    snowy = np.maximum(images, 1.5 * luma(images) + np.float32(127.5))
    snowy *= np.float32(1 - keep)
    snowy += np.float32(keep) * images
    snowy += layer + layer[:, ::-1, ::-1]
    return truncate_to_uint8(snowy)


def luma(images: UInt8Array) -> Float32Array:
    """Return gray values (N, H, W, 1), summed channel by channel so that rounding does not depend on the batch."""
    red, green, blue = (images[..., c, None] * LUMA[c] for c in range(3))
    gray: Float32Array = red + green + blue
    return gray


def fog(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Add a plasma cloud, then darken until the brightest value fits again."""
    thickness, decay = select_parameters(images).lookup(FOG, severity)
    cloud = plasma(images.shape[1], images.shape[2], decay, rng)[..., None]
    brightest = images.max(axis=(1, 2, 3), keepdims=True).astype(np.float32) / 255
    foggy = np.float32(255 * thickness) * cloud + images
    foggy *= brightest / (brightest + np.float32(thickness))
    return truncate_to_uint8(foggy)


def plasma(height: int, width: int, decay: float, rng: PerImageRNG) -> Float32Array:
    """Return diamond-square clouds in [0, 1], (N, height, width), cut from a periodic map with a power-of-two side.

    Every halving of the grid first sets the centers of its squares to the mean of their corners, then the midpoints
    of its edges (the diamonds) to the mean of their four neighbors, each plus a displacement. The published code draws
    the displacement from w·U(-w, w), so its size is w², and w is divided by ``decay`` per halving.
    """
    side = max(2, 1 << (max(height, width) - 1).bit_length())
    cloud = np.zeros((rng.num_images, side, side), np.float32)

    def displace(total: Float32Array, amplitude: float) -> Float32Array:
        displacement = rng.uniform(total.shape[1:], -(amplitude**2), amplitude**2)
        displacement += total / 4
        return displacement

    step, amplitude = side, PLASMA_AMPLITUDE
    while step >= 2:
        half = step // 2
        corners = cloud[:, ::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=1)
        centers = displace(pairs + np.roll(pairs, -1, axis=2), amplitude)
        cloud[:, half::step, half::step] = centers
        across = centers + np.roll(centers, 1, axis=1) + corners + np.roll(corners, -1, axis=2)
        cloud[:, ::step, half::step] = displace(across, amplitude)
        down = centers + np.roll(centers, 1, axis=2) + corners + np.roll(corners, -1, axis=1)
        cloud[:, half::step, ::step] = displace(down, amplitude)
        step, amplitude = half, amplitude / decay

    cloud -= cloud.min(axis=(1, 2), keepdims=True)
    cloud /= cloud.max(axis=(1, 2), keepdims=True)
    return cloud[:, :height, :width]


def brightness(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Raise the V of HSV, which scales a color: hue and saturation stay."""
    gain = 255 * select_parameters(images).lookup(BRIGHTNESS, severity)
    value = images.max(axis=-1, keepdims=True).astype(np.float32)
    raised = np.minimum(value + np.float32(gain), np.float32(255))
    scaled = images * (raised / np.maximum(value, 1))
    return truncate_to_uint8(np.where(value > 0, scaled, raised))

"""Weather: fog, dust, rain and snow, applied to a scene by depth and label."""

import math

import numpy as np

from ctta.data.corruptions.arrays import Float32Array
from ctta.data.streets.classes import LANE, PAVEMENT, ROAD, SKY
from ctta.data.streets.rng import SceneRNG
from ctta.data.streets.scene import Scene
from ctta.data.streets.textures import CLOUDS, GRAIN, SIDE, fractal_texture, magnify_texture, rgb, sample_texture

VISIBLE_CONTRAST = 0.05  # contrast of a black object at the distance that is called visibility
RIPPLES = 5  # rows up and down over which a reflection is averaged
REFERENCE_PIXELS = 256 * 128  # image area that the numbers of drops and the radii of flakes are given for


def apply_haze(
    clear: Float32Array, distance: Float32Array, beta: float | Float32Array, airlight: Float32Array
) -> Float32Array:
    """Apply Koschmieder's law: I = J t + A (1 - t), where t = exp(-beta d).

    Args:
        clear: The image J without haze, (3, H, W).
        distance: The distance d in meters along each pixel's ray, (H, W); infinite for the sky.
        beta: Extinction coefficient per meter, one or one per pixel.
        airlight: The color A of the scattered light, (3, 1, 1).

    Returns:
        The hazy image I, (3, H, W).
    """
    transmission = np.exp(-beta * distance)
    hazy: Float32Array = airlight + transmission * (clear - airlight)
    return hazy


def extinction_coefficient(visibility: float) -> float:
    """Return the coefficient beta per meter for a visibility in meters."""
    return float(-np.log(VISIBLE_CONTRAST) / visibility)


def fog(scene: Scene, rng: SceneRNG) -> Float32Array:
    """Render gray fog with a visibility of 25 to 70 meters."""
    airlight = rng.color((0.76, 0.78, 0.80), 0.08)
    return apply_haze(scene.clear, scene.distance, extinction_coefficient(rng.uniform(25, 70)), airlight)


def dust(scene: Scene, rng: SceneRNG) -> Float32Array:
    """Render drifts of sand in the air: yellow light, and a visibility of 20 to 60 meters."""
    height, width = scene.label.shape
    airlight = rng.color((0.76, 0.58, 0.36), 0.06)
    texture = fractal_texture(CLOUDS)
    drifts = magnify_texture(texture, height, width, rng.uniform(0, SIDE), rng.uniform(0, SIDE), 90 / width)
    beta = extinction_coefficient(rng.uniform(20, 60)) * (0.5 + drifts)
    # At the infinite distance of the sky, drifts could not be seen.
    distance = np.minimum(scene.distance, 400)
    dim = scene.overcast * rng.uniform(0.7, 0.9) * rgb(1.05, 0.95, 0.8)
    return apply_haze(dim, distance, beta, airlight * (0.85 + 0.3 * drifts))


def rain(scene: Scene, rng: SceneRNG) -> Float32Array:
    """Render rain: streaks, a dark wet road with reflections, and flat gray light."""
    height, width = scene.label.shape
    color = desaturate(render_overcast(scene, rng.uniform(0.6, 0.8), rng), 0.7)
    _add_reflections_(color, scene, rng)
    airlight = rng.color((0.50, 0.53, 0.56), 0.05)
    color = apply_haze(color, scene.distance, extinction_coefficient(rng.uniform(90, 220)), airlight)
    # Streaks grow longer with the image but stay one pixel wide.
    num_streaks = rng.uniform(180, 420) * _relative_size(scene)
    layer = render_streaks(height, width, int(num_streaks), rng.uniform(-0.5, 0.5), rng)
    cover = np.minimum(layer * np.float32(rng.uniform(0.25, 0.45)), 0.6)
    color += cover * (np.float32(0.78) - color)
    return color


def _add_reflections_(color: Float32Array, scene: Scene, rng: SceneRNG) -> None:
    """Darken the wet ground, in place, and add the mirror image of what is as far above the horizon as it is below."""
    camera = scene.camera
    first = camera.first_ground_row
    num_rows = camera.height - first
    if num_rows <= 0:
        return
    is_wet = np.isin(scene.label[first:], (ROAD, LANE, PAVEMENT))
    # Ripples smear the reflection vertically: each row is the mean of several.
    rows = 2 * camera.vanishing_row - first - np.arange(-RIPPLES, num_rows + RIPPLES)
    above = color[:, np.clip(rows, 0, first - 1).astype(np.int64)]
    sums = np.cumsum(np.insert(above, 0, 0, axis=1), axis=1)
    window = 2 * RIPPLES + 1
    reflection = (sums[:, window:] - sums[:, :-window]) / np.float32(window)
    z = camera.elevation / camera.v[first:]
    puddles = sample_texture(fractal_texture(GRAIN), z * 1.5 + rng.uniform(0, SIDE), camera.u * z * 3 + 4 * SIDE)
    fresnel = 0.2 + 0.4 / (1 + 20 * camera.v[first:] ** 2)  # water reflects more at grazing angles
    fraction = np.clip(fresnel * (0.35 + 1.1 * puddles), 0, 0.6)
    wet = color[:, first:] * np.float32(rng.uniform(0.5, 0.65))
    np.copyto(color[:, first:], wet + fraction * (reflection - wet), where=is_wet)


def snow(scene: Scene, rng: SceneRNG) -> Float32Array:
    """Render snow: flakes, white on every surface that snow settles on, and gray light."""
    height, width = scene.label.shape
    color = desaturate(render_overcast(scene, rng.uniform(0.8, 0.95), rng), 0.6)
    drifts = sample_texture(fractal_texture(GRAIN), *_drift_coordinates(scene, rng))
    amount = rng.uniform(0.18, 0.5)
    cover = np.clip((scene.snow * (0.7 + 0.6 * drifts) - (1 - amount)) * 3.5 + 0.5, 0, 0.93) * (scene.snow > 0)
    white = rgb(0.86, 0.88, 0.92) * (0.85 + 0.2 * drifts)
    color += cover * (white - color)
    airlight = rng.color((0.74, 0.76, 0.79), 0.05)
    color = apply_haze(color, scene.distance, extinction_coefficient(rng.uniform(70, 180)), airlight)
    scale = _relative_size(scene)
    layer = render_flakes(height, width, rng.integer(250, 600), 0.6 * scale, rng)
    layer += render_flakes(height, width, rng.integer(60, 160), 1.3 * scale, rng)
    layer += render_flakes(height, width, rng.integer(8, 30), 2.4 * scale, rng)
    color += np.minimum(layer, np.float32(0.9)) * (np.float32(0.95) - color)
    return color


def _drift_coordinates(scene: Scene, rng: SceneRNG) -> tuple[Float32Array, Float32Array]:
    """Return texture coordinates for patches of snow: by position on the ground, up to the depth of visible grain."""
    z: Float32Array = np.minimum(scene.depth, np.float32(60))
    across: Float32Array = scene.camera.u * z * 3 + 4 * SIDE + scene.camera.v * 97
    return z * 3 + rng.uniform(0, SIDE), across


def render_overcast(scene: Scene, brightness: float, rng: SceneRNG) -> Float32Array:
    """Render the scene without sun, below a closed gray sky."""
    height, width = scene.label.shape
    texture = fractal_texture(CLOUDS)
    clouds = magnify_texture(texture, height, width, rng.uniform(0, SIDE), rng.uniform(0, SIDE), 80 / width)
    color = scene.overcast * np.float32(brightness)
    tint = rng.color((0.70, 0.72, 0.75), 0.06) * np.float32(brightness)
    np.copyto(color, (0.85 + 0.3 * clouds) * tint, where=scene.label == SKY)
    return color


def desaturate(color: Float32Array, saturation: float) -> Float32Array:
    """Return the image with its saturation multiplied."""
    gray = to_gray(color)
    result: Float32Array = gray + np.float32(saturation) * (color - gray)
    return result


def to_gray(color: Float32Array) -> Float32Array:
    """Return the mean of the channels, (H, W)."""
    total: Float32Array = color[0] + color[1]
    total += color[2]
    total *= np.float32(1 / 3)
    return total


def _relative_size(scene: Scene) -> float:
    """Return how much longer the sides of this image are than those of the reference."""
    height, width = scene.label.shape
    return math.sqrt(height * width / REFERENCE_PIXELS)


def render_streaks(height: int, width: int, count: int, slant: float, rng: SceneRNG) -> Float32Array:
    """Return a layer of rain: lines of one slant (columns per row), the nearer the longer and brighter."""
    start, nearness = rng.uniform_array(2, count, 1), rng.uniform_array(count, 1)
    max_length = max(4, height // 6)
    step = np.arange(max_length, dtype=np.float32)
    is_drawn = step < (0.3 + 0.7 * nearness) * max_length
    rows = start[0] * (height + max_length) - max_length + step
    columns = start[1] * (width + abs(slant) * height) - max(0.0, slant * height) + slant * rows
    return splat(height, width, rows, columns, np.where(is_drawn, 0.35 + 0.65 * nearness, np.float32(0)))


def render_flakes(height: int, width: int, count: int, radius: float, rng: SceneRNG) -> Float32Array:
    """Return a layer of snow: soft disks of one radius in pixels and random brightness."""
    reach = int(np.ceil(radius))
    offset = np.arange(-reach, reach + 1, dtype=np.float32)
    distance = np.sqrt(offset[:, None] ** 2 + offset**2).reshape(1, -1)
    down, across = np.repeat(offset, len(offset))[None], np.tile(offset, len(offset))[None]
    start, brightness = rng.uniform_array(2, count, 1), 0.5 + 0.5 * rng.uniform_array(count, 1)
    profile = np.clip(1.25 - distance / max(radius, 0.5), 0, 1)
    return splat(height, width, start[0] * height + down, start[1] * width + across, brightness * profile)


def splat(height: int, width: int, rows: Float32Array, columns: Float32Array, amounts: Float32Array) -> Float32Array:
    """Return a layer to which each amount is added at its pixel; those outside are dropped."""
    row, column = np.floor(rows).astype(np.int64), np.floor(columns).astype(np.int64)
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    pixels = row[inside] * width + column[inside]
    layer = np.bincount(pixels, np.broadcast_to(amounts, row.shape)[inside], height * width)
    return layer.reshape(height, width).astype(np.float32)

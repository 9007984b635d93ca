"""Lighting: night with lamps and headlights, and dusk against a low sun."""

import numpy as np

from ctta.data.corruptions.arrays import Float32Array
from ctta.data.streets.canvas import GREEN_LIGHT, LIT_WINDOW, NO_LIGHT, RED_LIGHT, STREET_LAMP, WHITE_LIGHT, LightSource
from ctta.data.streets.classes import SKY
from ctta.data.streets.rng import SceneRNG
from ctta.data.streets.scene import Scene
from ctta.data.streets.textures import lookup_colors, rgb
from ctta.data.streets.weather import to_gray

#: The color of each value of `Scene.light`.
LIGHT_COLORS = {
    NO_LIGHT: rgb(0, 0, 0),
    LIT_WINDOW: rgb(0.85, 0.65, 0.35),
    STREET_LAMP: rgb(1.0, 0.95, 0.8),
    WHITE_LIGHT: rgb(1.0, 0.95, 0.8),
    RED_LIGHT: rgb(1.0, 0.15, 0.1),
    GREEN_LIGHT: rgb(0.3, 1.0, 0.6),
}
LAMP_RADIUS = 4.5  # meters; sets the falloff of the light around a street lamp


def night(scene: Scene, rng: SceneRNG) -> Float32Array:
    """Render the scene at night: headlights, lamps and windows, sensor noise and a color cast."""
    camera = scene.camera
    ambient = rng.color((0.11, 0.12, 0.17), 0.04)
    lamp_color = rng.color((1.0, 0.72, 0.38), 0.1) if rng.chance(0.7) else rng.color((0.8, 0.88, 1.0), 0.08)
    # The camera's own headlights: a low, wide cone that falls off with distance.
    beam = np.exp(-((camera.u / 0.42) ** 2)) * np.exp(-(((camera.v - 0.05) / 0.13) ** 2))
    beam = rng.uniform(0.9, 1.5) * beam / (1 + (np.minimum(scene.depth, 500) / 15) ** 2)
    lamps = [source for source in scene.light_sources if source.kind == STREET_LAMP and source.z < 45]
    lamplight = rng.uniform(0.6, 1.0) * compute_lamplight(scene, lamps)
    light = ambient + beam * rgb(1.0, 0.97, 0.88) + lamplight * lamp_color
    color = scene.overcast * light
    climb = np.clip(-camera.v / 0.5, 0, 1)
    sky = rng.color((0.05, 0.06, 0.10), 0.02) + (1 - climb) * 0.10 * lamp_color
    np.copyto(color, sky, where=scene.label == SKY)
    emission = lookup_colors(scene.light, [LIGHT_COLORS[kind] for kind in sorted(LIGHT_COLORS)])
    np.maximum(color, emission * np.float32(rng.uniform(0.7, 0.95)), out=color)
    for source in scene.light_sources:
        _add_glow_(color, scene, source, lamp_color)
    gain = rng.uniform(0.9, 1.25)
    noise = rng.normal_array(*color.shape)
    # Shot noise grows with the root of the light, on top of constant read noise.
    noise *= np.float32(0.05) * np.sqrt(np.clip(color, 0, 1)) + np.float32(0.018)
    noise += color * np.float32(gain)
    return noise


def compute_lamplight(scene: Scene, lamps: list[LightSource]) -> Float32Array:
    """Return the light of street lamps on everything around them, (H, W)."""
    z = np.minimum(scene.depth, 500)
    x = scene.camera.u * z
    total = np.zeros(z.shape, np.float32)
    for lamp in lamps:
        squared_distance = (x - lamp.x) ** 2 + (z - lamp.z) ** 2
        total += 1 / (1 + squared_distance / np.float32(LAMP_RADIUS**2)) ** 2
    return np.minimum(total, 1.3)


def _add_glow_(color: Float32Array, scene: Scene, source: LightSource, lamp_color: Float32Array) -> None:
    """Add the halo of a light, in place, unless something hides it."""
    camera = scene.camera
    row, column = camera.project_y(source.y, source.z), camera.project_x(source.x, source.z)
    height, width = scene.label.shape
    if not (0 <= row < height and 0 <= column < width):
        return
    if scene.depth[int(row), int(column)] < source.z - 0.5:
        return
    radius = max(0.012 * width, source.strength * 0.55 * camera.focal / source.z)
    reach = 3 * radius
    rows = slice(max(0, int(row - reach)), min(height, int(row + reach) + 1))
    columns = slice(max(0, int(column - reach)), min(width, int(column + reach) + 1))
    down = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] + 0.5 - np.float32(row)
    across = np.arange(columns.start, columns.stop, dtype=np.float32) + 0.5 - np.float32(column)
    squared_distance = (down**2 + across**2) / np.float32(radius**2)
    halo = np.clip(1 / (1 + 4 * squared_distance) - 1 / 37, 0, 1)  # 0 at the end of its reach
    halo_color = lamp_color if source.kind == STREET_LAMP else LIGHT_COLORS[source.kind]
    color[:, rows, columns] += halo * halo_color * np.float32(0.8)


def dusk(scene: Scene, rng: SceneRNG) -> Float32Array:
    """Render the scene against a low sun: an orange sky, glare, and dark objects."""
    camera = scene.camera
    from_sun = np.hypot(camera.u - rng.uniform(-0.5, 0.5), camera.v + rng.uniform(0.03, 0.2))
    climb = np.clip(-camera.v / 0.5, 0, 1)
    horizon, zenith = rng.color((0.95, 0.58, 0.30), 0.06), rng.color((0.34, 0.30, 0.48), 0.06)
    light = rng.uniform(0.32, 0.5) * rgb(1.12, 0.88, 0.82)
    # Backlight reduces the contrast of dark areas.
    color: Float32Array = (0.75 * scene.clear + 0.25 * scene.clear**2) * light
    clouds = to_gray(scene.clear) - np.float32(0.7)
    np.copyto(color, horizon + climb * (zenith - horizon) + 0.3 * clouds, where=scene.label == SKY)
    glare = rng.uniform(0.5, 0.8) * np.exp(-from_sun / 0.22) + 0.9 * np.exp(-((from_sun / 0.07) ** 2))
    color += glare * rgb(1.0, 0.78, 0.5)
    return color

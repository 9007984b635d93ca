"""Night and dusk: little light, and where it comes from."""

import numpy as np

from ctta.corruptions.arrays import Float32Array
from ctta.synthetic.canvas import DARK, GREEN_LIGHT, LIT_WINDOW, RED_LIGHT, STREET_LAMP, WHITE_LIGHT, Lamp
from ctta.synthetic.classes import SKY
from ctta.synthetic.colors import by_number, rgb
from ctta.synthetic.pictures import grey_of
from ctta.synthetic.rng import SceneRNG
from ctta.synthetic.scene import Scene

#: What each number of `Scene.light` shines in.
SHINING = {
    DARK: rgb(0, 0, 0),
    LIT_WINDOW: rgb(0.85, 0.65, 0.35),
    STREET_LAMP: rgb(1.0, 0.95, 0.8),
    WHITE_LIGHT: rgb(1.0, 0.95, 0.8),
    RED_LIGHT: rgb(1.0, 0.15, 0.1),
    GREEN_LIGHT: rgb(0.3, 1.0, 0.6),
}
POOL = 4.5  # metres from a lamp's foot to where half its light is left


def night(scene: Scene, dice: SceneRNG) -> Float32Array:
    """Dark, but for headlights, lamps and windows; noise and a colour cast."""
    camera = scene.camera
    ambient = dice.colour((0.11, 0.12, 0.17), 0.04)
    sodium = dice.colour((1.0, 0.72, 0.38), 0.1) if dice.chance(0.7) else dice.colour((0.8, 0.88, 1.0), 0.08)
    # Our own headlights: a low, wide cone that grows weak with distance.
    beam = np.exp(-((camera.u / 0.42) ** 2)) * np.exp(-(((camera.v - 0.05) / 0.13) ** 2))
    beam = dice.between(0.9, 1.5) * beam / (1 + (np.minimum(scene.depth, 500) / 15) ** 2)
    lamps = [lamp for lamp in scene.lamps if lamp.kind == STREET_LAMP and lamp.z < 45]
    pools = dice.between(0.6, 1.0) * lamplight(scene, lamps)
    light = ambient + beam * rgb(1.0, 0.97, 0.88) + pools * sodium
    colour = scene.overcast * light
    climb = np.clip(-camera.v / 0.5, 0, 1)
    heavens = dice.colour((0.05, 0.06, 0.10), 0.02) + (1 - climb) * 0.10 * sodium
    np.copyto(colour, heavens, where=scene.label == SKY)
    shining = by_number(scene.light, [SHINING[kind] for kind in sorted(SHINING)])
    np.maximum(colour, shining * np.float32(dice.between(0.7, 0.95)), out=colour)
    for lamp in scene.lamps:
        add_glow(scene, colour, lamp, sodium)
    gain = dice.between(0.9, 1.25)
    noise = dice.normal(*colour.shape)
    # Few photons: noise grows with the root of the light, on a floor of the sensor's own.
    noise *= np.float32(0.05) * np.sqrt(np.clip(colour, 0, 1)) + np.float32(0.018)
    noise += colour * np.float32(gain)
    return noise


def lamplight(scene: Scene, lamps: list[Lamp]) -> Float32Array:
    """Light of the street lamps on everything near their feet."""
    z = np.minimum(scene.depth, 500)
    x = scene.camera.u * z
    total = np.zeros(z.shape, np.float32)
    for lamp in lamps:
        away = (x - lamp.x) ** 2 + (z - lamp.z) ** 2
        total += 1 / (1 + away / np.float32(POOL**2)) ** 2
    return np.minimum(total, 1.3)


def add_glow(scene: Scene, colour: Float32Array, lamp: Lamp, sodium: Float32Array) -> None:
    """The halo of a light, unless something stands before it; in place."""
    camera = scene.camera
    row, column = camera.row(lamp.y, lamp.z), camera.column(lamp.x, lamp.z)
    height, width = scene.label.shape
    if not (0 <= row < height and 0 <= column < width):
        return
    if scene.depth[int(row), int(column)] < lamp.z - 0.5:
        return
    radius = max(0.012 * width, lamp.strength * 0.55 * camera.focal / lamp.z)
    reach = 3 * radius
    rows = slice(max(0, int(row - reach)), min(height, int(row + reach) + 1))
    columns = slice(max(0, int(column - reach)), min(width, int(column + reach) + 1))
    down = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] + 0.5 - np.float32(row)
    across = np.arange(columns.start, columns.stop, dtype=np.float32) + 0.5 - np.float32(column)
    away = (down**2 + across**2) / np.float32(radius**2)
    halo = np.clip(1 / (1 + 4 * away) - 1 / 37, 0, 1)
    hue = sodium if lamp.kind == STREET_LAMP else SHINING[lamp.kind]
    colour[:, rows, columns] += halo * hue * np.float32(0.8)


def dusk(scene: Scene, dice: SceneRNG) -> Float32Array:
    """A low sun ahead: a burning sky, glare, and everything else against the light."""
    camera = scene.camera
    from_sun = np.hypot(camera.u - dice.between(-0.5, 0.5), camera.v + dice.between(0.03, 0.2))
    climb = np.clip(-camera.v / 0.5, 0, 1)
    low, high = dice.colour((0.95, 0.58, 0.30), 0.06), dice.colour((0.34, 0.30, 0.48), 0.06)
    light = dice.between(0.32, 0.5) * rgb(1.12, 0.88, 0.82)
    # Against the light, contrast is lost in the dark.
    colour: Float32Array = (0.75 * scene.clear + 0.25 * scene.clear**2) * light
    clouds = grey_of(scene.clear) - np.float32(0.7)
    np.copyto(colour, low + climb * (high - low) + 0.3 * clouds, where=scene.label == SKY)
    glare = dice.between(0.5, 0.8) * np.exp(-from_sun / 0.22) + 0.9 * np.exp(-((from_sun / 0.07) ** 2))
    veil = rgb(1.0, 0.78, 0.5)
    colour += glare * veil
    return colour

"""Rain and snow: grey light, a wet or white ground, and what falls."""

import math

import numpy as np

from ctta.corruptions.arrays import Float32Array
from ctta.synthetic.air import apply_haze, extinction
from ctta.synthetic.classes import LANE, PAVEMENT, ROAD, SKY
from ctta.synthetic.colors import rgb
from ctta.synthetic.falling import flakes, streaks
from ctta.synthetic.pictures import grey_of
from ctta.synthetic.rng import SceneRNG
from ctta.synthetic.scene import Scene
from ctta.synthetic.textures import CLOUDS, GRAIN, SIDE, fractal, looked_up, smoothly

RIPPLES = 5  # rows up and down over which the mirrored picture is smeared
FALLING_AT = 256 * 128  # pixels of the picture for which the counts of drops and the radii of flakes are given


def scale_of(scene: Scene) -> float:
    """How much longer the sides of this picture are than those that the numbers here are for."""
    height, width = scene.label.shape
    return math.sqrt(height * width / FALLING_AT)


def greyed(colour: Float32Array, saturation: float) -> Float32Array:
    """The same with less colour in it."""
    grey = grey_of(colour)
    result: Float32Array = grey + np.float32(saturation) * (colour - grey)
    return result


def under_clouds(scene: Scene, brightness: float, dice: SceneRNG) -> Float32Array:
    """The scene without sun below a closed grey sky."""
    height, width = scene.label.shape
    clouds = smoothly(fractal(CLOUDS), height, width, dice.between(0, SIDE), dice.between(0, SIDE), 80 / width)
    colour = scene.overcast * np.float32(brightness)
    tint = dice.colour((0.70, 0.72, 0.75), 0.06) * np.float32(brightness)
    np.copyto(colour, (0.85 + 0.3 * clouds) * tint, where=scene.label == SKY)
    return colour


def rain(scene: Scene, dice: SceneRNG) -> Float32Array:
    """Streaks, a dark road that mirrors what stands behind it, and grey, flat light."""
    height, width = scene.label.shape
    colour = greyed(under_clouds(scene, dice.between(0.6, 0.8), dice), 0.7)
    _mirror(scene, colour, dice)
    airlight = dice.colour((0.50, 0.53, 0.56), 0.05)
    colour = apply_haze(colour, scene.distance, extinction(dice.between(90, 220)), airlight)
    # Streaks grow longer with the picture but stay a pixel wide.
    count = dice.between(180, 420) * scale_of(scene)
    layer = streaks(height, width, int(count), dice.between(-0.5, 0.5), dice)
    cover = np.minimum(layer * np.float32(dice.between(0.25, 0.45)), 0.6)
    colour += cover * (np.float32(0.78) - colour)
    return colour


def _mirror(scene: Scene, colour: Float32Array, dice: SceneRNG) -> None:
    """Water darkens the ground and mirrors what is as far above the horizon as the ground is below it, in place."""
    camera = scene.camera
    first = camera.first_ground_row
    count = camera.height - first
    if count <= 0:
        return
    grounded = np.isin(scene.label[first:], (ROAD, LANE, PAVEMENT))
    # Ripples smear the mirrored picture downwards: each row is the mean of several.
    rows = 2 * camera.vanishing_row - first - np.arange(-RIPPLES, count + RIPPLES)
    above = colour[:, np.clip(rows, 0, first - 1).astype(np.int64)]
    sums = np.cumsum(np.insert(above, 0, 0, axis=1), axis=1)
    whole = 2 * RIPPLES + 1
    mirrored = (sums[:, whole:] - sums[:, :-whole]) / np.float32(whole)
    z = camera.above_ground / camera.v[first:]
    puddles = looked_up(fractal(GRAIN), z * 1.5 + dice.between(0, SIDE), camera.u * z * 3 + 4 * SIDE)
    grazing = 0.2 + 0.4 / (1 + 20 * camera.v[first:] ** 2)  # water mirrors more, the flatter one looks at it
    share = np.clip(grazing * (0.35 + 1.1 * puddles), 0, 0.6)
    wet = colour[:, first:] * np.float32(dice.between(0.5, 0.65))
    np.copyto(colour[:, first:], wet + share * (mirrored - wet), where=grounded)


def snow(scene: Scene, dice: SceneRNG) -> Float32Array:
    """Flakes, white on everything that snow lies on, and grey light."""
    height, width = scene.label.shape
    colour = greyed(under_clouds(scene, dice.between(0.8, 0.95), dice), 0.6)
    # Where it lies in patches, the patches are those of the ground; elsewhere those of the picture will do.
    drifts = looked_up(fractal(GRAIN), *_places(scene, dice))
    depth = dice.between(0.18, 0.5)
    cover = np.clip((scene.snow * (0.7 + 0.6 * drifts) - (1 - depth)) * 3.5 + 0.5, 0, 0.93) * (scene.snow > 0)
    white = rgb(0.86, 0.88, 0.92) * (0.85 + 0.2 * drifts)
    colour += cover * (white - colour)
    airlight = dice.colour((0.74, 0.76, 0.79), 0.05)
    colour = apply_haze(colour, scene.distance, extinction(dice.between(70, 180)), airlight)
    scale = scale_of(scene)
    layer = flakes(height, width, dice.whole(250, 600), 0.6 * scale, dice)
    layer += flakes(height, width, dice.whole(60, 160), 1.3 * scale, dice)
    layer += flakes(height, width, dice.whole(8, 30), 2.4 * scale, dice)
    colour += np.minimum(layer, np.float32(0.9)) * (np.float32(0.95) - colour)
    return colour


def _places(scene: Scene, dice: SceneRNG) -> tuple[Float32Array, Float32Array]:
    """Where in the grain each pixel looks: by its place on the ground, as far as grains can be told apart."""
    z: Float32Array = np.minimum(scene.depth, np.float32(60))
    across: Float32Array = scene.camera.u * z * 3 + 4 * SIDE + scene.camera.v * 97
    return z * 3 + dice.between(0, SIDE), across

"""What air does to a picture: fog, haze and dust between the camera and things."""

import numpy as np

from ctta.corruptions.arrays import Float32Array
from ctta.synthetic.colors import rgb
from ctta.synthetic.rng import SceneRNG
from ctta.synthetic.scene import Scene
from ctta.synthetic.textures import CLOUDS, SIDE, fractal, smoothly

CONTRAST_AT_SIGHT = 0.05  # what is left of a black object's contrast where "visibility" ends


def extinction(visibility: float) -> float:
    """The coefficient beta, per metre, of air in which one sees so many metres far."""
    return float(-np.log(CONTRAST_AT_SIGHT) / visibility)


def apply_haze(
    clear: Float32Array, distance: Float32Array, beta: float | Float32Array, airlight: Float32Array
) -> Float32Array:
    """Koschmieder's law: I = J t + A (1 - t), where t = exp(-beta d).

    Args:
        clear: the picture J without air, (3, H, W).
        distance: d, metres that the light of each pixel travels, (H, W); infinite for the sky.
        beta: extinction per metre, one or one for each pixel.
        airlight: A, the colour of the lit air, (3, 1, 1).
    """
    transmitted = np.exp(-beta * distance)
    seen: Float32Array = airlight + transmitted * (clear - airlight)
    return seen


def fog(scene: Scene, dice: SceneRNG) -> Float32Array:
    """Grey air: one sees 25 to 70 metres far."""
    airlight = dice.colour((0.76, 0.78, 0.80), 0.08)
    return apply_haze(scene.clear, scene.distance, extinction(dice.between(25, 70)), airlight)


def dust(scene: Scene, dice: SceneRNG) -> Float32Array:
    """Sand in the air, in drifts: yellow light, and 20 to 60 metres of sight."""
    height, width = scene.label.shape
    airlight = dice.colour((0.76, 0.58, 0.36), 0.06)
    drifts = smoothly(fractal(CLOUDS), height, width, dice.between(0, SIDE), dice.between(0, SIDE), 90 / width)
    beta = extinction(dice.between(20, 60)) * (0.5 + drifts)
    # The sky is infinitely far, and so would hide the drifts.
    distance = np.minimum(scene.distance, 400)
    dim = scene.overcast * dice.between(0.7, 0.9) * rgb(1.05, 0.95, 0.8)
    return apply_haze(dim, distance, beta, airlight * (0.85 + 0.3 * drifts))

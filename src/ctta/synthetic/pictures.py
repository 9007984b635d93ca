"""What a camera does to colours: exposure, softness, and grey."""

import numpy as np

from ctta.corruptions.arrays import Float32Array
from ctta.synthetic.colors import rgb
from ctta.synthetic.rng import SceneRNG


def exposed(colour: Float32Array, dice: SceneRNG) -> None:
    """Exposure and white balance of the camera, in place."""
    gain, warmth = dice.between(0.85, 1.15), dice.between(-0.06, 0.06)
    colour *= rgb(gain * (1 + warmth), gain, gain * (1 - warmth))
    np.clip(colour, 0, 1, out=colour)


def softened(colour: Float32Array) -> Float32Array:
    """What a lens leaves of hard edges: a twelfth of every pixel goes to each of its four neighbours."""
    soft = colour * np.float32(2 / 3)
    share = colour * np.float32(1 / 12)
    soft[:, 1:] += share[:, :-1]
    soft[:, :-1] += share[:, 1:]
    soft[:, :, 1:] += share[:, :, :-1]
    soft[:, :, :-1] += share[:, :, 1:]
    # At the border a pixel keeps what it has nobody to give to.
    for edge in (np.s_[:, 0], np.s_[:, -1], np.s_[:, :, 0], np.s_[:, :, -1]):
        soft[edge] += share[edge]
    return soft


def grey_of(colour: Float32Array) -> Float32Array:
    """The mean of the channels, (H, W)."""
    total: Float32Array = colour[0] + colour[1]
    total += colour[2]
    total *= np.float32(1 / 3)
    return total

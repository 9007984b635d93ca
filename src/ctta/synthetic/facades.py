"""Facades: walls with storeys of windows, shops below, each house its own."""

from dataclasses import dataclass

import numpy as np

from ctta.corruptions.arrays import Float32Array
from ctta.synthetic.canvas import Mask
from ctta.synthetic.colors import by_number, rgb
from ctta.synthetic.rng import SceneRNG
from ctta.synthetic.textures import GRAIN, SIDE, fractal, looked_up

WALLS = (
    (0.56, 0.34, 0.28),
    (0.76, 0.68, 0.54),
    (0.62, 0.61, 0.60),
    (0.82, 0.80, 0.76),
    (0.70, 0.54, 0.36),
    (0.56, 0.62, 0.66),
    (0.48, 0.42, 0.40),
)
ROOFS = ((0.46, 0.24, 0.18), (0.30, 0.29, 0.31), (0.40, 0.33, 0.29))
#: Panes from dark rooms to mirrored sky.
GLASS = [rgb(0.12 + 0.36 * sky, 0.15 + 0.41 * sky, 0.19 + 0.45 * sky) for sky in np.linspace(0, 1, 8).tolist()]


@dataclass(frozen=True)
class Facade:
    """How a house looks: colours, the spacing of its windows in metres, and its part of the grain."""

    wall: Float32Array
    roof: Float32Array
    trim: Float32Array
    bay: float
    storey: float
    pane: float  # share of a bay that is glass
    shop: bool
    start: int


def drawn_facade(dice: SceneRNG) -> Facade:
    wall = dice.colour(dice.pick(WALLS), 0.09)
    return Facade(
        wall=wall,
        roof=dice.colour(dice.pick(ROOFS), 0.06),
        trim=np.clip(wall * dice.pick((0.7, 1.25)), 0.05, 0.95),
        bay=dice.between(1.8, 3.4),
        storey=dice.between(2.7, 3.4),
        pane=dice.between(0.36, 0.62),
        shop=dice.chance(0.35),
        start=dice.whole(0, SIDE - 1),
    )


def facade_colours(
    facade: Facade,
    along: Float32Array,
    up: Float32Array,
    eaves: float,
    pixels_per_metre: Float32Array,
    brightness: float,
) -> tuple[Float32Array, Mask]:
    """Colours of a wall at (along, up) metres from its lower corner, and which of it is lit from within at night."""
    grain = fractal(GRAIN)
    bay, storey = np.floor(along / facade.bay), np.floor(up / facade.storey)
    # Windows too far to be told apart would flicker, and are left out.
    across = np.where(pixels_per_metre > 2 / facade.bay, np.abs(along / facade.bay - bay - 0.5), np.float32(1))
    rising = np.abs(up / facade.storey - storey - 0.5)
    below = storey < 1
    glass = (across < facade.pane / 2) & (rising < 0.28) & (up < eaves - 0.5)
    if facade.shop:
        glass |= below & (across < 0.42) & (rising < 0.36)
    # Every window has a tone of its own, by its number.
    tone = looked_up(grain, storey * 37 + facade.start, bay * 101 + 64 * SIDE)
    trim = (up > eaves - 0.45) | ((rising > 0.47) & ~below)
    surface = np.where(glass, (tone * (len(GLASS) - 1)).astype(np.uint8) + np.uint8(2), trim)  # 0 wall, 1 trim, glass
    rough = looked_up(grain, up * 6, along * 6 + facade.start)
    rough *= np.float32(0.24 * brightness)
    rough += np.float32(0.88 * brightness)
    colour = by_number(surface, [facade.wall, facade.trim, *GLASS])
    colour *= rough
    return colour, glass & (tone > 0.52)

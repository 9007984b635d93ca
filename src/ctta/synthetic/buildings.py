"""Houses: boxes along the street with windows, some under a pitched roof."""

from dataclasses import dataclass

import numpy as np

from ctta.corruptions.arrays import Float32Array
from ctta.synthetic.canvas import LIT_WINDOW, Canvas
from ctta.synthetic.classes import BUILDING
from ctta.synthetic.facades import Facade, drawn_facade, facade_colours
from ctta.synthetic.plan import FARTHEST, Side, Street
from ctta.synthetic.rng import SceneRNG
from ctta.synthetic.textures import GRAIN, fractal, looked_up

NEAREST = 1.2  # metres: what is nearer lies beside the picture
FACING_SUN, FACING_AWAY, FACING_US = 0.12, -0.22, -0.08  # what the sun adds to a wall's brightness


@dataclass(frozen=True)
class House:
    """A box on one side: its front runs along the street from near to far, `line` metres beside the camera."""

    side: int
    line: float
    near: float
    far: float
    eaves: float
    deep: float  # across the street
    rise: float  # of the ridge above the eaves; 0 for a flat roof
    facade: Facade


def drawn_houses(side: Side, dice: SceneRNG) -> list[House]:
    """Houses of one side, from beside the camera into the distance, with gaps."""
    if side.park:
        return []
    houses = []
    tall, at = dice.between(0, 1), dice.between(-14, -2)
    set_back = dice.between(0, 1.5)
    while at < FARTHEST:
        if dice.chance(0.18):
            at += dice.between(3, 9)
        length = dice.between(8, 22)
        if at + length > NEAREST + 0.5:
            eaves = dice.between(4.5, 9) + tall * dice.between(0, 13)
            houses.append(
                House(
                    side=side.sign,
                    line=side.building_line + set_back + (dice.between(0, 2.5) if dice.chance(0.3) else 0),
                    near=at,
                    far=at + length,
                    eaves=eaves,
                    deep=dice.between(8, 13),
                    rise=dice.between(2.5, 4.5) if dice.chance(0.75 - 0.6 * tall) else 0.0,
                    facade=drawn_facade(dice),
                )
            )
        at += length
    return houses


def paint_house(canvas: Canvas, street: Street, house: House) -> None:
    sunlit = FACING_AWAY if house.side == street.sun else FACING_SUN
    _front(canvas, house, 1 + street.sunshine * sunlit)
    if house.near > NEAREST:
        _gable(canvas, house, 1 + street.sunshine * FACING_US)
    if house.rise:
        _roof(canvas, house, 1 - street.sunshine * sunlit)


def _front(canvas: Canvas, house: House, brightness: float) -> None:
    """The wall along the street: each column of pixels meets it at one depth."""
    camera = canvas.camera
    near = max(house.near, NEAREST)
    ends = [camera.column(house.side * house.line, depth) for depth in (near, house.far)]
    window = canvas.window(min(ends), camera.row(house.eaves, near), max(ends), camera.row(0, near), near)
    if window is None:
        return
    z = window.wall_depth(house.side, house.line)
    up = camera.above_ground - window.v * z
    inside = (z > near) & (z < house.far) & (up > 0) & (up < house.eaves)
    colour, lit = facade_colours(house.facade, z - house.near, up, house.eaves, camera.focal / z, brightness)
    canvas.paint(window, inside, z, colour, BUILDING, light=lit * np.uint8(LIT_WINDOW))


def _gable(canvas: Canvas, house: House, brightness: float) -> None:
    """The wall that faces us, seen where the house stands out or rises above its neighbour."""
    middle, half = house.side * (house.line + house.deep / 2), house.deep / 2
    window = canvas.upright(middle, house.near, half, 0, house.eaves + house.rise)
    if window is None:
        return
    inwards = half - np.abs(window.u * house.near - middle)  # metres from the nearer edge
    up = canvas.camera.above_ground - window.v * house.near
    top = house.eaves + house.rise * inwards / half
    inside = (inwards > 0) & (up > 0) & (up < top)
    colour, lit = facade_colours(
        house.facade,
        window.u * house.near - middle + half,
        up,
        house.eaves,
        np.full_like(window.u, canvas.camera.focal / house.near),
        brightness,
    )
    canvas.paint(window, inside, house.near, colour, BUILDING, light=lit * np.uint8(LIT_WINDOW))


def _roof(canvas: Canvas, house: House, brightness: float) -> None:
    """The slope from the eaves to the ridge: y = eaves + steepness (x - line), met by each ray at one depth."""
    camera = canvas.camera
    near = max(house.near, NEAREST)
    half = house.deep / 2
    steepness = house.rise / half
    corners = [
        (camera.column(house.side * x, z), camera.row(y, z))
        for x, y in ((house.line, house.eaves), (house.line + half, house.eaves + house.rise))
        for z in (near, house.far)
    ]
    columns, rows = [column for column, _ in corners], [row for _, row in corners]
    window = canvas.window(min(columns), min(rows), max(columns), max(rows), near)
    if window is None:
        return
    sideways = window.towards(house.side)
    slope = window.v + steepness * sideways
    above = camera.above_ground - house.eaves + steepness * house.line
    # Rays that run along the slope, or away from it, meet it nowhere.
    slope = np.where(slope * above > 1e-6, slope, np.float32(np.nan))
    z: Float32Array = np.divide(np.float32(above), slope)
    x = sideways * z
    inside = (z > near) & (z < house.far) & (x > house.line) & (x < house.line + half)
    z = np.where(inside, z, np.float32(1.0))
    grain = looked_up(fractal(GRAIN), z * 5, np.where(inside, x, 0) * 12 + 900)
    tone = brightness * (0.8 + 0.4 * grain)
    canvas.paint(window, inside, z, tone * house.facade.roof, BUILDING, snow=1.0)

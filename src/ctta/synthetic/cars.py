"""Cars: boxes with a cabin, wheels and lights, seen from behind or in front and from the side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctta.corruptions.arrays import Float32Array
from ctta.synthetic.canvas import DARK, RED_LIGHT, WHITE_LIGHT, Canvas, Lamp, Mask
from ctta.synthetic.classes import CAR
from ctta.synthetic.colors import by_number, rgb
from ctta.synthetic.plan import Street

TYRE, RIM = rgb(0.06, 0.06, 0.07), rgb(0.55, 0.55, 0.57)
GRILLE = TYRE * np.float32(2)
GLASS, PLATE = rgb(0.14, 0.18, 0.22), rgb(0.88, 0.88, 0.82)
LAMPS = {RED_LIGHT: rgb(0.75, 0.08, 0.06), WHITE_LIGHT: rgb(0.92, 0.92, 0.86)}


WINDSCREEN, REAR_WINDOW = 0.18, 0.04  # shares of the length by which they lean back


@dataclass(frozen=True)
class Body:
    """Metres, but for `waist` and the cabin's ends, which are shares of height and length, from the rear."""

    half_width: float
    height: float
    length: float
    waist: float
    cabin: tuple[float, float]
    wheel: float


BODIES = (
    Body(0.88, 1.45, 4.2, 0.60, (0.04, 0.72), 0.32),  # hatchback
    Body(0.88, 1.45, 4.2, 0.60, (0.04, 0.72), 0.32),
    Body(0.90, 1.42, 4.6, 0.60, (0.16, 0.70), 0.32),  # saloon
    Body(0.93, 1.70, 4.6, 0.60, (0.02, 0.74), 0.36),  # off-roader
    Body(0.98, 2.25, 5.2, 0.52, (0.00, 0.82), 0.34),  # van
)


@dataclass(frozen=True)
class Car:
    x: float
    z: float  # of the end that faces us
    oncoming: bool
    body: Body
    paint: Float32Array
    parked: bool


def paint_car(canvas: Canvas, street: Street, car: Car) -> None:
    body = car.body
    cabin_behind = (1 - body.cabin[1] if car.oncoming else body.cabin[0]) * body.length
    _cabin_end(canvas, car, car.z + cabin_behind, WINDSCREEN if car.oncoming else REAR_WINDOW)
    _end(canvas, car)
    inner = car.x - math.copysign(body.half_width, car.x)
    if car.x * inner > 0:  # we see the flank that looks towards the middle of the road
        bright = 1 + 0.2 * street.sunshine * (-1 if car.x * street.sun > 0 else 1)
        _flank(canvas, car, inner, bright)
    if car.parked:
        return
    kind = WHITE_LIGHT if car.oncoming else RED_LIGHT
    for sign in (-1, 1):
        canvas.lamps.append(Lamp(car.x + sign * 0.8 * body.half_width, 0.48 * body.height, car.z, 0.5, kind))


def _end(canvas: Canvas, car: Car) -> None:
    """The lower half of rear or front: panel, lights, plate, bumper and wheels."""
    body = car.body
    top = body.waist * body.height
    window = canvas.upright(car.x, car.z, body.half_width, 0, top)
    if window is None:
        return
    across = np.abs(window.u * car.z - car.x) / body.half_width
    up = (canvas.camera.above_ground - window.v * car.z) / top
    panel = (up > 0.2) & (up < 1) & (across < 0.98 - 0.12 * np.clip(up - 0.8, 0, 1) * 5)
    wheels = (up > 0) & (up < 0.4) & (across > 0.62) & (across < 0.95)
    kind = WHITE_LIGHT if car.oncoming else RED_LIGHT
    lamps = (np.abs(up - 0.78) < 0.13) & (across > 0.66) & (across < 0.95)
    parts = [
        (up < 0.42, car.paint * np.float32(0.55)),
        (up < 0.26, TYRE),
        ((np.abs(up - 0.5) < 0.1) & (across < 0.27), PLATE),
        (lamps, LAMPS[kind]),
    ]
    if car.oncoming:
        parts.append(((np.abs(up - 0.72) < 0.1) & (across < 0.5), GRILLE))
    colour = _coloured(lamps.shape, car.paint, parts)
    light = lamps * np.uint8(DARK if car.parked else kind)
    canvas.paint(window, panel | wheels, car.z, colour, CAR, light=light)


def _cabin_end(canvas: Canvas, car: Car, base: float, slant: float) -> None:
    """Rear window or windscreen, narrower towards the roof, and what of boot or bonnet lies before it."""
    body = car.body
    window = canvas.upright(car.x, base, body.half_width, 0.3 * body.height, body.height)
    if window is None:
        return
    # Above the waist it leans back, so that z = base + lean (y - waist), where y = above_ground - v z.
    lean = slant * body.length / (body.height * (1 - body.waist))
    over_waist = canvas.camera.above_ground - body.waist * body.height
    z = np.maximum((base + lean * over_waist) / (1 + lean * window.v), base)
    across = np.abs(window.u * z - car.x) / body.half_width
    up = ((canvas.camera.above_ground - window.v * z) / body.height - body.waist) / (1 - body.waist)
    width = 1.0 - 0.05 * np.clip(up, 0, 1)
    inside = (across < width) & (up < 1)
    pane = (across < width - 0.1) & (up > 0.1) & (up < 0.82)
    mirrored_sky = pane & (up > 0.45 + 0.2 * across)
    colour = _coloured(pane.shape, car.paint, [(pane, GLASS), (mirrored_sky, GLASS * np.float32(1.9))])
    canvas.paint(window, inside, z, colour, CAR, snow=np.where(pane, np.float32(0.15), up))


def _flank(canvas: Canvas, car: Car, x: float, bright: float) -> None:
    """The side, a wall in perspective: body, cabin with windows, two wheels."""
    camera, body = canvas.camera, car.body
    ends = [camera.column(x, z) for z in (car.z, car.z + body.length)]
    window = canvas.window(min(ends), camera.row(body.height, car.z), max(ends), camera.row(0, car.z), car.z)
    if window is None:
        return
    z = window.wall_depth(1 if x > 0 else -1, abs(x))
    metres = camera.above_ground - window.v * z
    along = (z - car.z) / body.length
    if car.oncoming:
        along = 1 - along
    inside, colour, snow = flank_colours(body, car.paint * bright, along, metres)
    canvas.paint(window, inside & (along > -0.02) & (along < 1.02), z, colour, CAR, snow=snow)


def flank_colours(
    body: Body, paint: Float32Array, along: Float32Array, metres: Float32Array
) -> tuple[Mask, Float32Array, Float32Array]:
    """What a side shows at a share of its length from the rear, and metres above the ground."""
    up = metres / body.height
    rising = (up - body.waist) / (1 - body.waist)
    rear, front = body.cabin[0] + REAR_WINDOW * rising, body.cabin[1] - WINDSCREEN * rising
    cabin = (rising > 0) & (rising < 1) & (along > rear) & (along < front)
    hull = (up > 0.16) & (rising <= 0)
    from_wheel = np.minimum(np.abs(along - 0.18), np.abs(along - 0.81)) * body.length
    away = from_wheel**2 + (metres - body.wheel) ** 2
    wheels = away < body.wheel**2
    panes = cabin & (rising > 0.12) & (rising < 0.85) & (along > rear + 0.05) & (along < front - 0.05)
    panes &= np.abs(along - (body.cabin[0] + body.cabin[1]) / 2) > 0.02
    parts = [
        (up < 0.4, paint * np.float32(0.85)),
        (panes, GLASS * np.float32(1.3)),
        (up < 0.24, GRILLE),
        (away < (1.15 * body.wheel) ** 2, TYRE),
        (away < (0.55 * body.wheel) ** 2, RIM),
    ]
    return cabin | hull | wheels, _coloured(up.shape, paint, parts), rising - np.float32(0.6)


def _coloured(shape: tuple[int, ...], paint: Float32Array, parts: Sequence[tuple[Mask, Float32Array]]) -> Float32Array:
    """Parts over the paint, each over those before it: noted by number first, as colours are three times as much."""
    part: NDArray[np.uint8] = np.zeros(shape, np.uint8)
    for number, (where, _) in enumerate(parts, start=1):
        np.copyto(part, np.uint8(number), where=where)
    return by_number(part, [paint, *(colour for _, colour in parts)])

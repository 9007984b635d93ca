"""Poles: street lamps, traffic lights and signs."""

from dataclasses import dataclass

import numpy as np

from ctta.corruptions.arrays import Float32Array
from ctta.synthetic.canvas import GREEN_LIGHT, RED_LIGHT, STREET_LAMP, Canvas, Lamp
from ctta.synthetic.classes import POLE
from ctta.synthetic.colors import rgb
from ctta.synthetic.plan import Street
from ctta.synthetic.rng import SceneRNG

STEELS = ((0.45, 0.46, 0.47), (0.22, 0.24, 0.24), (0.60, 0.60, 0.58), (0.20, 0.28, 0.24))
SIGNS = ((0.75, 0.10, 0.10), (0.10, 0.25, 0.65), (0.88, 0.88, 0.86), (0.90, 0.75, 0.15))
SIGNALS = {RED_LIGHT: rgb(0.85, 0.1, 0.08), GREEN_LIGHT: rgb(0.1, 0.8, 0.4)}


@dataclass(frozen=True)
class Pole:
    x: float
    z: float
    height: float
    half_width: float
    steel: Float32Array
    reach: float = 0.0  # of a lamp's arm, signed
    sign: Float32Array | None = None
    signal: int | None = None  # a traffic light that shows this


def drawn_poles(street: Street, dice: SceneRNG) -> list[Pole]:
    """Lamps at even distances, signs here and there, traffic lights at the crossing."""
    poles = []
    steel, lamp_height, every = dice.colour(dice.pick(STEELS), 0.04), dice.between(5, 8), dice.between(16, 28)
    both = dice.chance(0.5)
    first = dice.between(5, every)
    for side in street.sides:
        x = side.sign * (side.kerb + 0.5)
        if both or side.sign == street.camera_drives_on:
            at = first
            while at < 60:
                poles.append(Pole(x, at, lamp_height, 0.08, steel, reach=-side.sign * dice.between(1.0, 1.8)))
                at += every
        for _ in range(dice.whole(0, 2)):
            sign = dice.colour(dice.pick(SIGNS), 0.05)
            poles.append(Pole(x, dice.between(5, 30), dice.between(2.3, 3.0), 0.045, steel, sign=sign))
        if street.crossing is not None:
            signal = dice.pick((RED_LIGHT, GREEN_LIGHT))
            poles.append(Pole(x, street.crossing - 0.4, dice.between(2.9, 3.6), 0.07, steel, signal=signal))
    return poles


def paint_pole(canvas: Canvas, pole: Pole) -> None:
    half = max(pole.half_width, canvas.camera.metres(0.55, pole.z))
    _block(canvas, pole.x, pole.z, half, 0, pole.height, pole.steel)
    if pole.reach:
        _arm(canvas, pole, half)
    if pole.sign is not None:
        _disc(canvas, pole, pole.sign)
    if pole.signal is not None:
        _traffic_light(canvas, pole, pole.signal)


def _block(
    canvas: Canvas, x: float, z: float, half: float, low: float, high: float, colour: Float32Array, light: int = 0
) -> None:
    """An upright rectangle, brighter on its left half as a round pole is."""
    window = canvas.upright(x, z, half, low, high)
    if window is None:
        return
    across = window.u * z - x
    up = canvas.camera.above_ground - window.v * z
    inside = (np.abs(across) < half) & (up > low) & (up < high)
    tone = np.where(across < 0, np.float32(1.12), np.float32(0.85))
    canvas.paint(window, inside, z, tone * colour, POLE, light=light)


def _arm(canvas: Canvas, pole: Pole, half: float) -> None:
    """The arm over the road and the lamp at its end."""
    thick = max(0.06, canvas.camera.metres(0.55, pole.z))
    middle = pole.x + pole.reach / 2
    _block(canvas, middle, pole.z, abs(pole.reach) / 2, pole.height - 2 * thick, pole.height, pole.steel)
    end, low = pole.x + pole.reach, pole.height - 2 * thick - 0.14
    bulb = rgb(0.9, 0.9, 0.85)
    _block(canvas, end, pole.z, max(0.3, half), low, pole.height - thick, bulb, STREET_LAMP)
    canvas.lamps.append(Lamp(end, low, pole.z, 1.0, STREET_LAMP))


def _disc(canvas: Canvas, pole: Pole, colour: Float32Array) -> None:
    radius, z = 0.36, pole.z - 0.1
    window = canvas.upright(pole.x, z, radius, pole.height - 0.5, pole.height + 0.22)
    if window is None:
        return
    up = canvas.camera.above_ground - window.v * z - pole.height + 0.14
    away = (window.u * z - pole.x) ** 2 + up**2
    inner = np.where((away < (0.6 * radius) ** 2), 0.5 * colour + 0.45, colour)
    canvas.paint(window, away < radius**2, z, inner, POLE)


def _traffic_light(canvas: Canvas, pole: Pole, signal: int) -> None:
    z = pole.z - 0.1
    half = max(0.17, canvas.camera.metres(0.6, z))
    _block(canvas, pole.x, z, half, pole.height - 0.9, pole.height, rgb(0.07, 0.07, 0.07))
    at = pole.height - (0.2 if signal == RED_LIGHT else 0.7)
    size = max(0.1, canvas.camera.metres(0.5, z))
    _block(canvas, pole.x, z - 0.05, size, at - size, at + size, SIGNALS[signal], signal)
    canvas.lamps.append(Lamp(pole.x, at, z - 0.05, 0.3, signal))

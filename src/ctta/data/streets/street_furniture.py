"""Street furniture: lamps, traffic lights and signs on poles."""

from dataclasses import dataclass

import numpy as np

from ctta.data.corruptions.arrays import Float32Array
from ctta.data.streets.canvas import GREEN_LIGHT, NO_LIGHT, RED_LIGHT, STREET_LAMP, Canvas, LightSource
from ctta.data.streets.classes import POLE
from ctta.data.streets.rng import SceneRNG
from ctta.data.streets.street import Street
from ctta.data.streets.textures import rgb

STEELS = ((0.45, 0.46, 0.47), (0.22, 0.24, 0.24), (0.60, 0.60, 0.58), (0.20, 0.28, 0.24))
SIGNS = ((0.75, 0.10, 0.10), (0.10, 0.25, 0.65), (0.88, 0.88, 0.86), (0.90, 0.75, 0.15))
SIGNALS = {RED_LIGHT: rgb(0.85, 0.1, 0.08), GREEN_LIGHT: rgb(0.1, 0.8, 0.4)}


@dataclass(frozen=True)
class Pole:
    """A pole, which carries a lamp, a sign, a traffic light or nothing.

    Attributes:
        x: Meters to the right.
        z: Depth in meters.
        height: Height in meters.
        half_width: Half its thickness in meters.
        steel: Its color.
        arm: Length of the arm of a street lamp, positive to the right; 0 for none.
        sign: Color of a sign.
        signal: RED_LIGHT or GREEN_LIGHT for a traffic light.
    """

    x: float
    z: float
    height: float
    half_width: float
    steel: Float32Array
    arm: float = 0.0
    sign: Float32Array | None = None
    signal: int | None = None


def sample_poles(street: Street, rng: SceneRNG) -> list[Pole]:
    """Sample evenly spaced lamps, a few signs, and traffic lights at the crosswalk."""
    poles = []
    steel, lamp_height, spacing = rng.color(rng.choice(STEELS), 0.04), rng.uniform(5, 8), rng.uniform(16, 28)
    on_both_sides = rng.chance(0.5)
    first = rng.uniform(5, spacing)
    for side in street.sides:
        x = side.sign * (side.curb + 0.5)
        if on_both_sides or side.sign == street.driving_side:
            z = first
            while z < 60:
                poles.append(Pole(x, z, lamp_height, 0.08, steel, arm=-side.sign * rng.uniform(1.0, 1.8)))
                z += spacing
        for _ in range(rng.integer(0, 2)):
            sign = rng.color(rng.choice(SIGNS), 0.05)
            poles.append(Pole(x, rng.uniform(5, 30), rng.uniform(2.3, 3.0), 0.045, steel, sign=sign))
        if street.crosswalk is not None:
            signal = rng.choice((RED_LIGHT, GREEN_LIGHT))
            poles.append(Pole(x, street.crosswalk - 0.4, rng.uniform(2.9, 3.6), 0.07, steel, signal=signal))
    return poles


def paint_pole(canvas: Canvas, pole: Pole) -> None:
    """Paint a pole and what it carries, and add its lights."""
    half_width = max(pole.half_width, canvas.camera.pixels_to_meters(0.55, pole.z))
    _paint_block(canvas, pole.x, pole.z, half_width, 0, pole.height, pole.steel)
    if pole.arm:
        _paint_lamp(canvas, pole, half_width)
    if pole.sign is not None:
        _paint_sign(canvas, pole, pole.sign)
    if pole.signal is not None:
        _paint_traffic_light(canvas, pole, pole.signal)


def _paint_block(
    canvas: Canvas,
    x: float,
    z: float,
    half_width: float,
    low: float,
    high: float,
    color: Float32Array,
    light: int = NO_LIGHT,
) -> None:
    """Paint an upright rectangle, brighter on its left half as a cylinder is."""
    region = canvas.billboard(x, z, half_width, low, high)
    if region is None:
        return
    across = region.u * z - x
    up = canvas.camera.elevation - region.v * z
    inside = (np.abs(across) < half_width) & (up > low) & (up < high)
    tone = np.where(across < 0, np.float32(1.12), np.float32(0.85))
    canvas.paint(region, inside, z, tone * color, POLE, light=light)


def _paint_lamp(canvas: Canvas, pole: Pole, half_width: float) -> None:
    """Paint the arm over the road and the lamp at its end."""
    thickness = max(0.06, canvas.camera.pixels_to_meters(0.55, pole.z))
    center = pole.x + pole.arm / 2
    _paint_block(canvas, center, pole.z, abs(pole.arm) / 2, pole.height - 2 * thickness, pole.height, pole.steel)
    end, low = pole.x + pole.arm, pole.height - 2 * thickness - 0.14
    bulb = rgb(0.9, 0.9, 0.85)
    _paint_block(canvas, end, pole.z, max(0.3, half_width), low, pole.height - thickness, bulb, STREET_LAMP)
    canvas.light_sources.append(LightSource(end, low, pole.z, 1.0, STREET_LAMP))


def _paint_sign(canvas: Canvas, pole: Pole, color: Float32Array) -> None:
    """Paint a disk with a paler center."""
    radius, z = 0.36, pole.z - 0.1
    region = canvas.billboard(pole.x, z, radius, pole.height - 0.5, pole.height + 0.22)
    if region is None:
        return
    up = canvas.camera.elevation - region.v * z - pole.height + 0.14
    squared_distance = (region.u * z - pole.x) ** 2 + up**2
    inner = np.where((squared_distance < (0.6 * radius) ** 2), 0.5 * color + 0.45, color)
    canvas.paint(region, squared_distance < radius**2, z, inner, POLE)


def _paint_traffic_light(canvas: Canvas, pole: Pole, signal: int) -> None:
    z = pole.z - 0.1
    half_width = max(0.17, canvas.camera.pixels_to_meters(0.6, z))
    _paint_block(canvas, pole.x, z, half_width, pole.height - 0.9, pole.height, rgb(0.07, 0.07, 0.07))
    y = pole.height - (0.2 if signal == RED_LIGHT else 0.7)
    size = max(0.1, canvas.camera.pixels_to_meters(0.5, z))
    _paint_block(canvas, pole.x, z - 0.05, size, y - size, y + size, SIGNALS[signal], signal)
    canvas.light_sources.append(LightSource(pole.x, y, z - 0.05, 0.3, signal))

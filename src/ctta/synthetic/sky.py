"""The sky, and what stands at the end of the street."""

import numpy as np

from ctta.synthetic.canvas import Canvas
from ctta.synthetic.classes import BUILDING, VEGETATION
from ctta.synthetic.plan import Street
from ctta.synthetic.rng import SceneRNG
from ctta.synthetic.textures import CLOUDS, GRAIN, SIDE, fractal, looked_up, smoothly

ZENITHS = ((0.28, 0.48, 0.82), (0.36, 0.56, 0.86), (0.45, 0.58, 0.76))
SKYLINE = 240.0  # metres


def paint_sky(canvas: Canvas, street: Street, dice: SceneRNG) -> None:
    """A gradient from the zenith to a pale horizon, and clouds."""
    zenith, haze = dice.colour(dice.pick(ZENITHS), 0.06), dice.colour((0.78, 0.85, 0.92), 0.05)
    cloudiness = dice.between(0.25, 0.8) if street.sunshine > 0.2 else 1.0
    # Below the horizon nothing of it is seen.
    rows = slice(0, min(street.camera.height, street.camera.first_ground_row + 1))
    width, step = street.camera.width, dice.between(60, 120) / street.camera.width
    clouds = smoothly(fractal(CLOUDS), rows.stop, width, dice.between(0, SIDE), dice.between(0, SIDE), step)
    climb = np.clip(-street.camera.v[rows] / 0.55, 0, 1)
    blue = haze + climb * (zenith - haze)
    cover = np.clip((clouds - (1 - cloudiness)) * 3, 0, 1)
    grey = np.float32(dice.between(0.8, 0.95)) - 0.25 * np.clip(clouds - 0.5, 0, 1)
    canvas.colour[:, rows] = blue + cover * (grey - blue)


def paint_skyline(canvas: Canvas, street: Street, dice: SceneRNG) -> None:
    """Far houses or a wood where the street ends; without it, road would meet sky."""
    camera = street.camera
    window = canvas.window(0, camera.row(45, SKYLINE), camera.width, camera.row(0, SKYLINE) + 1)
    if window is None:
        return
    grain = fractal(GRAIN)
    along = window.u * SKYLINE
    start = dice.between(0, SIDE)
    if dice.chance(0.5):
        label, base = VEGETATION, dice.colour((0.30, 0.40, 0.30), 0.06)
        top = 8 + 14 * looked_up(fractal(CLOUDS), np.full_like(along, start), along / 4 + 500)
    else:
        label, base = BUILDING, dice.colour((0.55, 0.53, 0.52), 0.08)
        # Each house is as high as the grain says at its number.
        top = 6 + 30 * looked_up(grain, np.full_like(along, start), along // dice.between(9, 16) * 7 + 500) ** 2
    up = camera.above_ground - window.v * SKYLINE
    tone = 0.85 + 0.3 * looked_up(grain, up / 2, along / 2 + start)
    inside = (up < top) & (up > -4)
    canvas.paint(window, inside, SKYLINE, tone * base, label, snow=0.3)

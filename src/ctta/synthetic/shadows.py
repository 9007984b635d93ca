"""Shadows on the ground: of the houses on the sun's side, and of what stands on it."""

import numpy as np

from ctta.corruptions.arrays import Float32Array
from ctta.synthetic.buildings import House
from ctta.synthetic.canvas import Canvas
from ctta.synthetic.plan import Street


def sunlit(canvas: Canvas, street: Street, houses: list[House], slope: float) -> Float32Array:
    """What the shadows of houses leave of the light; `slope` is the length of a shadow per metre of height."""
    camera = street.camera
    rows = slice(camera.first_ground_row, camera.height)
    z = camera.above_ground / camera.v[rows]
    reach = np.full_like(z, np.inf)  # the ground beyond this, on the sun's side, lies in shadow
    for house in houses:
        if house.side == street.sun:
            beside = (z > house.near - 0.5) & (z < house.far + 0.5)
            reach = np.where(beside, house.line - slope * house.eaves, reach)
    away = street.sun * camera.u * z
    light = np.ones(canvas.label.shape, np.float32)
    on_ground = canvas.depth[rows] == z  # still seen: nothing was painted over it
    light[rows][(away > reach) & on_ground] = 1 - 0.55 * street.sunshine
    return light


def object_shadow(canvas: Canvas, x: float, near: float, far: float, half_width: float) -> None:
    """The dark below a car or a person, which overcast skies leave too: painted into the colour."""
    camera = canvas.camera
    top, bottom = camera.row(0, far), camera.row(0, max(near, 0.5))
    left, right = (camera.column(x + sign * half_width, max(near, 0.5)) for sign in (-1, 1))
    far_left, far_right = (camera.column(x + sign * half_width, far) for sign in (-1, 1))
    window = canvas.window(min(left, far_left), top, max(right, far_right), bottom)
    if window is None:
        return
    z = camera.above_ground / np.maximum(window.v, 1e-4)
    across = (window.u * z - x) / half_width
    along = (z - (near + far) / 2) / ((far - near) / 2)
    inside = across**4 + along**4 < 1
    under = canvas.colour[:, *window.box]
    np.multiply(under, np.float32(0.45), out=under, where=inside)

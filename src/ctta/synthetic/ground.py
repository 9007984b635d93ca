"""The ground: road, lane markings, kerbs, pavements and grass, each point where perspective puts it."""

import numpy as np
from numpy.typing import NDArray

from ctta.corruptions.arrays import Float32Array
from ctta.synthetic.canvas import Canvas, Mask
from ctta.synthetic.classes import LANE, PAVEMENT, ROAD, VEGETATION
from ctta.synthetic.colors import by_number
from ctta.synthetic.plan import Side, Street
from ctta.synthetic.rng import SceneRNG
from ctta.synthetic.textures import GRAIN, SIDE, fractal, looked_up

KERB = 0.22  # metres
CROSSING = 3.2
WHEELS_APART = 0.75  # from the middle of a lane to a wheel's track


class Ground:
    """The part of the canvas below the horizon, with the place in the world of each of its pixels.

    Surfaces are noted by number while they are laid over each other, and coloured once at the end.
    """

    def __init__(self, street: Street) -> None:
        camera = street.camera
        self.street = street
        self.rows = slice(camera.first_ground_row, camera.height)
        self.z: Float32Array = camera.above_ground / camera.v[self.rows]
        self.x: Float32Array = camera.u * self.z
        self.surface: NDArray[np.uint8] = np.zeros(self.x.shape, np.uint8)
        self.surfaces: list[tuple[Float32Array, int, float, float]] = []  # colour, label, roughness, readiness for snow

    def cover(self, where: Mask | bool, colour: Float32Array, label: int, *, rough: float, snow: float) -> None:
        np.copyto(self.surface, np.uint8(len(self.surfaces)), where=where)
        self.surfaces.append((colour, label, rough, snow))

    def paint(self, canvas: Canvas, dice: SceneRNG) -> None:
        colour, label, rough, snow = zip(*self.surfaces, strict=True)
        grain = looked_up(fractal(GRAIN), self.z * 9 + dice.between(0, SIDE), self.x * 9 + 4 * SIDE)
        patches = looked_up(fractal(GRAIN), self.z * 0.8 + dice.between(0, SIDE), self.x * 0.8 + 4 * SIDE)
        # Grain fades with distance, where many grains share a pixel.
        grain -= 0.5
        grain *= 1 / (1 + (self.z / 9) ** 2)
        grain += 0.35 * (patches - 0.5)
        grain *= np.array(rough, np.float32).take(self.surface)
        grain += 1
        np.multiply(by_number(self.surface, colour), grain, out=canvas.colour[:, self.rows])
        canvas.label[self.rows] = np.array(label, np.uint8).take(self.surface)
        canvas.snow[self.rows] = np.array(snow, np.float32).take(self.surface)
        canvas.depth[self.rows] = self.z


def paint_ground(canvas: Canvas, street: Street, dice: SceneRNG) -> None:
    ground = Ground(street)
    ground.cover(True, dice.colour((0.34, 0.44, 0.22), 0.07), VEGETATION, rough=0.9, snow=1.0)
    paving = dice.colour(dice.pick(((0.60, 0.58, 0.55), (0.52, 0.50, 0.50), (0.62, 0.54, 0.47))), 0.06)
    for side in street.sides:
        _pavement(ground, side, paving)
    _road(ground, dice)
    _markings(ground, dice)
    ground.paint(canvas, dice)


def _pavement(ground: Ground, side: Side, paving: Float32Array) -> None:
    away = side.sign * ground.x - side.kerb
    # Houses without a verge stand on the paving, so that no grass shows at their feet.
    width = side.pavement + (0 if side.verge or side.park else 12)
    ground.cover((away > 0) & (away < width), paving, PAVEMENT, rough=0.5, snow=0.9)
    joints = ((away % 0.9 < 0.07) | (ground.z % 0.9 < 0.07)) & (away > KERB) & (away < width) & (ground.z < 14)
    ground.cover(joints, paving * np.float32(0.8), PAVEMENT, rough=0.5, snow=0.9)
    kerb = (away > 0) & (away < KERB)
    ground.cover(kerb, np.minimum(paving * np.float32(1.25), np.float32(0.9)), PAVEMENT, rough=0.3, snow=0.7)


def _road(ground: Ground, dice: SceneRNG) -> None:
    street = ground.street
    left, right = street.sides
    asphalt = dice.colour((0.36, 0.36, 0.38), 0.07)
    road = (ground.x > -left.kerb) & (ground.x < right.kerb)
    ground.cover(road, asphalt, ROAD, rough=0.7, snow=0.65)
    gutter = road & ((ground.x < 0.25 - left.kerb) | (ground.x > right.kerb - 0.25))
    ground.cover(gutter, asphalt * np.float32(0.8), ROAD, rough=0.7, snow=0.8)
    from_middle = np.abs((ground.x - street.centre_line) % street.lane_width - street.lane_width / 2)
    tracks = road & (np.abs(from_middle - WHEELS_APART) < 0.3)
    ground.cover(tracks, asphalt * np.float32(dice.between(0.86, 1.0)), ROAD, rough=0.6, snow=0.3)
    if dice.chance(0.5):  # a patch where the road was mended
        x, z = dice.between(-left.kerb, right.kerb), dice.between(4, 14)
        mended = road & (np.abs(ground.x - x) < dice.between(0.5, 1.6)) & (np.abs(ground.z - z) < dice.between(0.6, 3))
        ground.cover(mended, asphalt * np.float32(dice.between(0.72, 1.15)), ROAD, rough=0.7, snow=0.6)


def _markings(ground: Ground, dice: SceneRNG) -> None:
    street = ground.street
    white, worn = dice.colour((0.86, 0.86, 0.84), 0.07), dice.between(0.2, 0.7)
    yellow = dice.colour((0.85, 0.68, 0.22), 0.05) if dice.chance(0.25) else white
    half = dice.between(0.07, 0.13)
    # A line stays as wide as a pixel, and so visible and labelled, into the distance.
    reach = np.maximum(half, 0.45 * ground.z / street.camera.focal)
    period, phase = dice.between(6, 12), dice.between(0, 12)
    dashed = (ground.z + phase) % period < 0.45 * period
    edges = sorted({lane.x + sign * street.lane_width / 2 for lane in street.lanes for sign in (-1, 1)})
    outer = {edges[0], edges[-1]}
    solid_edges, solid_centre = dice.chance(0.5), dice.chance(0.3)
    clear = np.ones_like(ground.z, np.bool_)
    if street.crossing is not None:
        clear = (ground.z < street.crossing - 1.2) | (ground.z > street.crossing + CROSSING)
    for edge in edges:
        line = (np.abs(ground.x - edge) < reach) & clear
        at_centre = abs(edge - street.centre_line) < 0.1
        if edge in outer:
            if not solid_edges:
                continue
        elif not (at_centre and solid_centre):
            line &= dashed
        ground.cover(line, yellow if at_centre else white, LANE, rough=worn, snow=0.6)
    if street.crossing is not None:
        _crossing(ground, street.crossing, white, worn)


def _crossing(ground: Ground, z: float, white: Float32Array, worn: float) -> None:
    """A zebra crossing, and the line to stop at."""
    street = ground.street
    left, right = street.sides
    on_road = (ground.x > 0.3 - left.kerb) & (ground.x < right.kerb - 0.3)
    stripes = on_road & (ground.z > z) & (ground.z < z + CROSSING) & (ground.x % 1.1 < 0.55)
    ours = street.camera_drives_on * (ground.x - street.centre_line) > 0
    stop = on_road & ours & (np.abs(ground.z - z + 0.9) < 0.2)
    ground.cover(stripes | stop, white, LANE, rough=worn, snow=0.6)

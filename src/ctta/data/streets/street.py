"""The street: its lanes and sides, and what lies behind everything else: sky, skyline, ground and road markings."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctta.data.corruptions.arrays import Float32Array
from ctta.data.streets.canvas import BUILDING, LANE, PAVEMENT, ROAD, VEGETATION, Camera, Canvas, Mask
from ctta.data.streets.textures import (
    CLOUDS,
    SIDE,
    SceneRNG,
    draw_clouds,
    fractal_texture,
    lookup_colors,
    sample_grain,
    sample_texture,
)

MAX_DEPTH = 110.0  # meters: beyond, there is only the skyline
PARKING_WIDTH = 2.3  # meters


@dataclass(frozen=True)
class Side:
    """One side of the street, from the curb outwards, in meters from the line below the camera."""

    sign: int  # -1 left, 1 right
    curb: float  # distance of the curb
    pavement: float  # width of the pavement
    verge: float  # width of the grass behind it
    has_parking: bool  # whether cars are parked along the curb
    is_park: bool  # whether there are trees and hedges instead of houses

    @property
    def building_line(self) -> float:
        """Distance at which private ground begins."""
        return self.curb + self.pavement + self.verge


@dataclass(frozen=True)
class Lane:
    """A lane."""

    x: float  # its center line
    is_oncoming: bool  # whether its traffic comes towards the camera


@dataclass(frozen=True)
class Street:
    """The layout of a street and the camera that sees it."""

    camera: Camera
    sides: tuple[Side, Side]  # left and right
    lanes: tuple[Lane, ...]
    lane_width: float  # width of a lane in meters
    center_line: float  # x of the line between the two directions
    sun: int  # the side the sun shines from: -1 left, 1 right
    sunshine: float  # 0 for an overcast sky to 1
    crosswalk: float | None  # depth at which a crosswalk begins, or None
    driving_side: int  # 1 for right-hand traffic, -1 for left-hand traffic


def sample_street(height: int, width: int, rng: SceneRNG) -> Street:
    """Sample a street of one or two lanes each way, seen from one of them."""
    camera = Camera(
        height=height,
        width=width,
        focal=width * rng.uniform(0.56, 0.70),
        elevation=rng.uniform(1.3, 1.75),
        vanishing_row=height * rng.uniform(0.42, 0.52),
        vanishing_column=width * rng.uniform(0.40, 0.60),
    )
    driving_side = 1 if rng.chance(0.5) else -1
    lane_width = rng.uniform(3.0, 3.7)
    num_ours, num_oncoming = 2 if rng.chance(0.35) else 1, 2 if rng.chance(0.25) else 1
    own = rng.integer(0, num_ours - 1)
    # Lanes are numbered from the center line; the camera drives roughly in the middle of its own.
    center = -(own + 0.5) * lane_width + rng.uniform(-0.3, 0.3)
    numbers = [*range(num_ours), *range(-1, -1 - num_oncoming, -1)]  # oncoming ones are below 0
    lanes = tuple(Lane(driving_side * (center + (number + 0.5) * lane_width), number < 0) for number in numbers)
    sides = []
    for sign in (-1, 1):
        has_parking = rng.chance(0.6)
        reach = center + num_ours * lane_width if sign == driving_side else num_oncoming * lane_width - center
        sides.append(
            Side(
                sign=sign,
                curb=reach + (PARKING_WIDTH if has_parking else 0.3),
                pavement=rng.uniform(1.8, 4.0),
                verge=rng.uniform(1.0, 4.0) if rng.chance(0.35) else 0.0,
                has_parking=has_parking,
                is_park=rng.chance(0.2),
            )
        )
    return Street(
        camera=camera,
        sides=(sides[0], sides[1]),
        lanes=lanes,
        lane_width=lane_width,
        center_line=driving_side * center,
        sun=1 if rng.chance(0.5) else -1,
        sunshine=rng.uniform(0.35, 1.0) if rng.chance(0.75) else 0.1,
        crosswalk=rng.uniform(7, 22) if rng.chance(0.35) else None,
        driving_side=driving_side,
    )


ZENITHS = ((0.28, 0.48, 0.82), (0.36, 0.56, 0.86), (0.45, 0.58, 0.76))
SKYLINE_DEPTH = 240.0  # meters, as are the following
CURB_WIDTH = 0.22
CROSSWALK_LENGTH = 3.2
HALF_TRACK = 0.75  # from the center of a lane to a wheel track


def paint_sky(canvas: Canvas, street: Street, rng: SceneRNG) -> None:
    """Paint a gradient from the zenith to a pale horizon, and clouds."""
    zenith, haze = rng.color(rng.choice(ZENITHS), 0.06), rng.color((0.78, 0.85, 0.92), 0.05)
    cloudiness = rng.uniform(0.25, 0.8) if street.sunshine > 0.2 else 1.0
    rows = slice(0, min(street.camera.height, street.camera.first_ground_row + 1))
    width, step = street.camera.width, rng.uniform(60, 120) / street.camera.width
    clouds = draw_clouds(rows.stop, width, step, rng)
    climb = np.clip(-street.camera.v[rows] / 0.55, 0, 1)
    blue = haze + climb * (zenith - haze)
    cover = np.clip((clouds - (1 - cloudiness)) * 3, 0, 1)
    gray = np.float32(rng.uniform(0.8, 0.95)) - 0.25 * np.clip(clouds - 0.5, 0, 1)
    canvas.color[:, rows] = blue + cover * (gray - blue)


def paint_skyline(canvas: Canvas, street: Street, rng: SceneRNG) -> None:
    """Paint distant houses or trees at the end of the street; without them, road would meet sky."""
    camera = street.camera
    top_row, bottom_row = camera.project_y(45, SKYLINE_DEPTH), camera.project_y(0, SKYLINE_DEPTH) + 1
    if (region := canvas.region(0, top_row, camera.width, bottom_row)) is None:
        return
    along = region.u * SKYLINE_DEPTH
    start = rng.uniform(0, SIDE)
    if rng.chance(0.5):
        label, base = VEGETATION, rng.color((0.30, 0.40, 0.30), 0.06)
        top = 8 + 14 * sample_texture(fractal_texture(CLOUDS), np.full_like(along, start), along / 4 + 500)
    else:
        label, base = BUILDING, rng.color((0.55, 0.53, 0.52), 0.08)
        # The height of each house is the texel at its number.
        house = along // rng.uniform(9, 16)
        top = 6 + 30 * sample_grain(np.full_like(along, start), house * 7 + 500) ** 2
    up = camera.elevation - region.v * SKYLINE_DEPTH
    tone = 0.85 + 0.3 * sample_grain(up / 2, along / 2 + start)
    inside = (up < top) & (up > -4)
    canvas.paint(region, inside, SKYLINE_DEPTH, tone * base, label, snow=0.3)


class Ground:
    """The part of the image below the horizon, with the world coordinates of each of its pixels.

    Surfaces are recorded by number while they are layered, and colored once at the end.
    """

    def __init__(self, street: Street) -> None:
        camera = street.camera
        self.street = street
        self.rows = slice(camera.first_ground_row, camera.height)
        self.z: Float32Array = camera.elevation / camera.v[self.rows]
        self.x: Float32Array = camera.u * self.z
        self._surface: NDArray[np.uint8] = np.zeros(self.x.shape, np.uint8)
        self._surfaces: list[tuple[Float32Array, int, float, float]] = []  # color, label, roughness, snow

    def cover(self, where: Mask | bool, color: Float32Array, label: int, *, roughness: float, snow: float) -> None:
        """Lay a surface over what is there."""
        np.copyto(self._surface, np.uint8(len(self._surfaces)), where=where)
        self._surfaces.append((color, label, roughness, snow))

    def paint(self, canvas: Canvas, rng: SceneRNG) -> None:
        """Write all surfaces to the canvas."""
        colors, labels, roughness, snow = zip(*self._surfaces, strict=True)
        grain = sample_grain(self.z * 9 + rng.uniform(0, SIDE), self.x * 9 + 4 * SIDE)
        patches = sample_grain(self.z * 0.8 + rng.uniform(0, SIDE), self.x * 0.8 + 4 * SIDE)
        # Grain fades with distance, where many texels share a pixel.
        grain -= 0.5
        grain *= 1 / (1 + (self.z / 9) ** 2)
        grain += 0.35 * (patches - 0.5)
        grain *= np.array(roughness, np.float32).take(self._surface)
        grain += 1
        np.multiply(lookup_colors(self._surface, colors), grain, out=canvas.color[:, self.rows])
        canvas.label[self.rows] = np.array(labels, np.uint8).take(self._surface)
        canvas.snow[self.rows] = np.array(snow, np.float32).take(self._surface)
        canvas.depth[self.rows] = self.z


def paint_ground(canvas: Canvas, street: Street, rng: SceneRNG) -> None:
    """Paint grass, pavements, the road and its markings."""
    ground = Ground(street)
    ground.cover(True, rng.color((0.34, 0.44, 0.22), 0.07), VEGETATION, roughness=0.9, snow=1.0)
    paving = rng.color(rng.choice(((0.60, 0.58, 0.55), (0.52, 0.50, 0.50), (0.62, 0.54, 0.47))), 0.06)
    for side in street.sides:
        _cover_pavement(ground, side, paving)
    _cover_road(ground, rng)
    _cover_markings(ground, rng)
    ground.paint(canvas, rng)


def _cover_pavement(ground: Ground, side: Side, paving: Float32Array) -> None:
    away = side.sign * ground.x - side.curb
    # Without a verge the paving extends below the houses, so that no grass shows at their base.
    width = side.pavement + (0 if side.verge or side.is_park else 12)
    ground.cover((away > 0) & (away < width), paving, PAVEMENT, roughness=0.5, snow=0.9)
    joints = ((away % 0.9 < 0.07) | (ground.z % 0.9 < 0.07)) & (away > CURB_WIDTH) & (away < width) & (ground.z < 14)
    ground.cover(joints, paving * np.float32(0.8), PAVEMENT, roughness=0.5, snow=0.9)
    curb = (away > 0) & (away < CURB_WIDTH)
    ground.cover(curb, np.minimum(paving * np.float32(1.25), np.float32(0.9)), PAVEMENT, roughness=0.3, snow=0.7)


def _cover_road(ground: Ground, rng: SceneRNG) -> None:
    street = ground.street
    left, right = street.sides
    asphalt = rng.color((0.36, 0.36, 0.38), 0.07)
    road = (ground.x > -left.curb) & (ground.x < right.curb)
    ground.cover(road, asphalt, ROAD, roughness=0.7, snow=0.65)
    gutter = road & ((ground.x < 0.25 - left.curb) | (ground.x > right.curb - 0.25))
    ground.cover(gutter, asphalt * np.float32(0.8), ROAD, roughness=0.7, snow=0.8)
    from_center = np.abs((ground.x - street.center_line) % street.lane_width - street.lane_width / 2)
    tracks = road & (np.abs(from_center - HALF_TRACK) < 0.3)
    ground.cover(tracks, asphalt * np.float32(rng.uniform(0.86, 1.0)), ROAD, roughness=0.6, snow=0.3)
    if rng.chance(0.5):
        x, z = rng.uniform(-left.curb, right.curb), rng.uniform(4, 14)
        patch = road & (np.abs(ground.x - x) < rng.uniform(0.5, 1.6)) & (np.abs(ground.z - z) < rng.uniform(0.6, 3))
        ground.cover(patch, asphalt * np.float32(rng.uniform(0.72, 1.15)), ROAD, roughness=0.7, snow=0.6)


def _cover_markings(ground: Ground, rng: SceneRNG) -> None:
    street = ground.street
    white, roughness = rng.color((0.86, 0.86, 0.84), 0.07), rng.uniform(0.2, 0.7)
    yellow = rng.color((0.85, 0.68, 0.22), 0.05) if rng.chance(0.25) else white
    half_width = rng.uniform(0.07, 0.13)
    # A line is never narrower than a pixel, so that it stays visible and labeled in the distance.
    reach = np.maximum(half_width, 0.45 * ground.z / street.camera.focal)
    period, phase = rng.uniform(6, 12), rng.uniform(0, 12)
    dashes = (ground.z + phase) % period < 0.45 * period
    edges = sorted({lane.x + sign * street.lane_width / 2 for lane in street.lanes for sign in (-1, 1)})
    outer = {edges[0], edges[-1]}
    has_edge_lines, is_center_solid = rng.chance(0.5), rng.chance(0.3)
    off_crosswalk = np.ones_like(ground.z, np.bool_)
    if street.crosswalk is not None:
        off_crosswalk = (ground.z < street.crosswalk - 1.2) | (ground.z > street.crosswalk + CROSSWALK_LENGTH)
    for edge in edges:
        line = (np.abs(ground.x - edge) < reach) & off_crosswalk
        is_center = abs(edge - street.center_line) < 0.1
        if edge in outer:
            if not has_edge_lines:
                continue
        elif not (is_center and is_center_solid):
            line &= dashes
        ground.cover(line, yellow if is_center else white, LANE, roughness=roughness, snow=0.6)
    if street.crosswalk is not None:
        _cover_crosswalk(ground, street.crosswalk, white, roughness)


def _cover_crosswalk(ground: Ground, z: float, white: Float32Array, roughness: float) -> None:
    """Cover the stripes of a crosswalk, and the stop line before it."""
    street = ground.street
    left, right = street.sides
    on_road = (ground.x > 0.3 - left.curb) & (ground.x < right.curb - 0.3)
    stripes = on_road & (ground.z > z) & (ground.z < z + CROSSWALK_LENGTH) & (ground.x % 1.1 < 0.55)
    our_direction = street.driving_side * (ground.x - street.center_line) > 0
    stop_line = on_road & our_direction & (np.abs(ground.z - z + 0.9) < 0.2)
    ground.cover(stripes | stop_line, white, LANE, roughness=roughness, snow=0.6)


def paint_contact_shadow(canvas: Canvas, x: float, near: float, far: float, half_width: float) -> None:
    """Darken the ground below a car or a person, as under an overcast sky too."""
    camera = canvas.camera
    top, bottom = camera.project_y(0, far), camera.project_y(0, max(near, 0.5))
    left, right = (camera.project_x(x + sign * half_width, max(near, 0.5)) for sign in (-1, 1))
    far_left, far_right = (camera.project_x(x + sign * half_width, far) for sign in (-1, 1))
    if (region := canvas.region(min(left, far_left), top, max(right, far_right), bottom)) is None:
        return
    z = camera.elevation / np.maximum(region.v, 1e-4)
    across = (region.u * z - x) / half_width
    along = (z - (near + far) / 2) / ((far - near) / 2)
    inside = across**4 + along**4 < 1
    under = canvas.color[:, *region.box]
    np.multiply(under, np.float32(0.45), out=under, where=inside)

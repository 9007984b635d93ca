"""What stands beside the road: houses, trees and hedges, lamps, signs and traffic lights."""

from dataclasses import dataclass

import numpy as np

from ctta.data.corruptions.arrays import Float32Array
from ctta.data.streets.canvas import (
    BUILDING,
    GREEN_LIGHT,
    LIT_WINDOW,
    NO_LIGHT,
    POLE,
    RED_LIGHT,
    STREET_LAMP,
    VEGETATION,
    Canvas,
    LightSource,
    Mask,
)
from ctta.data.streets.street import MAX_DEPTH, Side, Street
from ctta.data.streets.textures import SIDE, SceneRNG, lookup_colors, rgb, sample_grain

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
#: Window panes from dark rooms to reflected sky.
PANES = [rgb(0.12 + 0.36 * sky, 0.15 + 0.41 * sky, 0.19 + 0.45 * sky) for sky in np.linspace(0, 1, 8).tolist()]

NEAR_PLANE = 1.2  # meters: what is nearer is outside the image
FACING_SUN, FACING_AWAY, FACING_CAMERA = 0.12, -0.22, -0.08  # what the sun adds to the brightness of a wall


@dataclass(frozen=True)
class House:
    """A box on one side of the street, with its front along the street."""

    side: int  # -1 left, 1 right
    offset: float  # distance of the front from the line below the camera, in meters as all lengths
    near: float  # depth at which the front begins
    far: float  # depth at which the front ends
    eaves: float  # height of the walls
    thickness: float  # extent of the house across the street
    rise: float  # height of the ridge above the eaves; 0 for a flat roof
    wall: Float32Array  # a color, as is roof
    roof: Float32Array
    trim: float  # brightness of the trim relative to the wall
    bay: float  # horizontal distance between windows in meters
    story: float  # height of a story in meters
    pane: float  # fraction of a bay that is glass
    has_shop: bool  # whether the ground floor has shop windows
    start: int  # offset into the texture


def sample_houses(side: Side, rng: SceneRNG) -> list[House]:
    """Sample the houses of one side, from beside the camera into the distance, with gaps."""
    if side.is_park:
        return []
    houses = []
    tallness, z = rng.uniform(0, 1), rng.uniform(-14, -2)
    setback = rng.uniform(0, 1.5)
    while z < MAX_DEPTH:
        if rng.chance(0.18):
            z += rng.uniform(3, 9)
        length = rng.uniform(8, 22)
        if z + length > NEAR_PLANE + 0.5:
            eaves = rng.uniform(4.5, 9) + tallness * rng.uniform(0, 13)
            houses.append(
                House(
                    side=side.sign,
                    offset=side.building_line + setback + (rng.uniform(0, 2.5) if rng.chance(0.3) else 0),
                    near=z,
                    far=z + length,
                    eaves=eaves,
                    thickness=rng.uniform(8, 13),
                    rise=rng.uniform(2.5, 4.5) if rng.chance(0.75 - 0.6 * tallness) else 0.0,
                    wall=rng.color(rng.choice(WALLS), 0.09),
                    roof=rng.color(rng.choice(ROOFS), 0.06),
                    trim=rng.choice((0.7, 1.25)),
                    bay=rng.uniform(1.8, 3.4),
                    story=rng.uniform(2.7, 3.4),
                    pane=rng.uniform(0.36, 0.62),
                    has_shop=rng.chance(0.35),
                    start=rng.integer(0, SIDE - 1),
                )
            )
        z += length
    return houses


def shade_facade(
    house: House, along: Float32Array, up: Float32Array, pixels_per_meter: Float32Array | float, brightness: float
) -> tuple[Float32Array, Mask]:
    """Return the colors of a wall at (along, up) meters from its lower corner, and which pixels are lit at night."""
    bay, story = np.floor(along / house.bay), np.floor(up / house.story)
    # Windows that are too small to be resolved would alias, and are left out.
    across = np.where(pixels_per_meter > 2 / house.bay, np.abs(along / house.bay - bay - 0.5), np.float32(1))
    rising = np.abs(up / house.story - story - 0.5)
    on_ground_floor = story < 1
    glass = (across < house.pane / 2) & (rising < 0.28) & (up < house.eaves - 0.5)
    if house.has_shop:
        glass |= on_ground_floor & (across < 0.42) & (rising < 0.36)
    # Every window has one tone, by its bay and story.
    tone = sample_grain(story * 37 + house.start, bay * 101 + 64 * SIDE)
    trim = (up > house.eaves - 0.45) | ((rising > 0.47) & ~on_ground_floor)
    surface = np.where(glass, (tone * (len(PANES) - 1)).astype(np.uint8) + np.uint8(2), trim)  # 0 wall, 1 trim, glass
    shade = sample_grain(up * 6, along * 6 + house.start)
    shade *= np.float32(0.24 * brightness)
    shade += np.float32(0.88 * brightness)
    color = lookup_colors(surface, [house.wall, np.clip(house.wall * house.trim, 0.05, 0.95), *PANES])
    color *= shade
    return color, glass & (tone > 0.52)


def paint_house(canvas: Canvas, street: Street, house: House) -> None:
    """Paint the front, the gable and the roof of a house."""
    sunlit = FACING_AWAY if house.side == street.sun else FACING_SUN
    _paint_front(canvas, house, 1 + street.sunshine * sunlit)
    if house.near > NEAR_PLANE:
        _paint_gable(canvas, house, 1 + street.sunshine * FACING_CAMERA)
    if house.rise:
        _paint_roof(canvas, house, 1 - street.sunshine * sunlit)


def _paint_front(canvas: Canvas, house: House, brightness: float) -> None:
    """Paint the wall along the street: each column of pixels meets it at one depth."""
    camera = canvas.camera
    near = max(house.near, NEAR_PLANE)
    ends = [camera.project_x(house.side * house.offset, depth) for depth in (near, house.far)]
    top, bottom = camera.project_y(house.eaves, near), camera.project_y(0, near)
    if (region := canvas.region(min(ends), top, max(ends), bottom, near)) is None:
        return
    z = region.wall_depth(house.side, house.offset)
    up = camera.elevation - region.v * z
    inside = (z > near) & (z < house.far) & (up > 0) & (up < house.eaves)
    color, lit = shade_facade(house, z - house.near, up, camera.focal / z, brightness)
    canvas.paint(region, inside, z, color, BUILDING, light=lit * np.uint8(LIT_WINDOW))


def _paint_gable(canvas: Canvas, house: House, brightness: float) -> None:
    """Paint the wall that faces the camera, seen where the house protrudes beyond or above its neighbor."""
    center, half = house.side * (house.offset + house.thickness / 2), house.thickness / 2
    if (gable := canvas.billboard(center, house.near, half, 0, house.eaves + house.rise)) is None:
        return
    inwards = half - np.abs(gable.across)  # meters from the nearer edge
    top = house.eaves + house.rise * inwards / half
    inside = (inwards > 0) & (gable.up > 0) & (gable.up < top)
    pixels_per_meter = canvas.camera.focal / house.near
    color, lit = shade_facade(house, gable.across + half, gable.up, pixels_per_meter, brightness)
    canvas.paint(gable, inside, house.near, color, BUILDING, light=lit * np.uint8(LIT_WINDOW))


def _paint_roof(canvas: Canvas, house: House, brightness: float) -> None:
    """Paint the slope y = eaves + steepness (x - offset) up to the ridge; each ray meets it at one depth."""
    camera = canvas.camera
    near = max(house.near, NEAR_PLANE)
    half = house.thickness / 2
    steepness = house.rise / half
    corners = [
        (camera.project_x(house.side * x, z), camera.project_y(y, z))
        for x, y in ((house.offset, house.eaves), (house.offset + half, house.eaves + house.rise))
        for z in (near, house.far)
    ]
    columns, rows = [column for column, _ in corners], [row for _, row in corners]
    if (region := canvas.region(min(columns), min(rows), max(columns), max(rows), near)) is None:
        return
    sideways = region.slope_towards(house.side)
    slope = region.v + steepness * sideways
    above = camera.elevation - house.eaves + steepness * house.offset
    # Rays parallel to the slope, or away from it, do not meet it.
    slope = np.where(slope * above > 1e-6, slope, np.float32(np.nan))
    z: Float32Array = np.divide(np.float32(above), slope)
    x = sideways * z
    inside = (z > near) & (z < house.far) & (x > house.offset) & (x < house.offset + half)
    z = np.where(inside, z, np.float32(1.0))
    grain = sample_grain(z * 5, np.where(inside, x, 0) * 12 + 900)
    tone = brightness * (0.8 + 0.4 * grain)
    canvas.paint(region, inside, z, tone * house.roof, BUILDING, snow=1.0)


def compute_sunlight(canvas: Canvas, street: Street, houses: list[House], slope: float) -> Float32Array:
    """Return the light that the shadows of houses leave on the ground; ``slope`` is shadow length per height."""
    camera = street.camera
    rows = slice(camera.first_ground_row, camera.height)
    z = camera.elevation / camera.v[rows]
    reach = np.full_like(z, np.inf)  # the ground beyond this, on the sun's side, is in shadow
    for house in houses:
        if house.side == street.sun:
            beside = (z > house.near - 0.5) & (z < house.far + 0.5)
            reach = np.where(beside, house.offset - slope * house.eaves, reach)
    away = street.sun * camera.u * z
    light = np.ones(canvas.label.shape, np.float32)
    is_ground = canvas.depth[rows] == z  # nothing was painted over it
    light[rows][(away > reach) & is_ground] = 1 - 0.55 * street.sunshine
    return light


FOLIAGE = ((0.22, 0.38, 0.14), (0.30, 0.44, 0.16), (0.16, 0.30, 0.16), (0.46, 0.42, 0.14), (0.52, 0.32, 0.12))
BARK = rgb(0.27, 0.21, 0.16)
LEAVES_PER_METER = 7.0


@dataclass(frozen=True)
class Tree:
    """A tree, with lengths in meters."""

    x: float  # position to the right
    z: float  # depth
    height: float
    radius: float  # radius of the crown
    trunk: float  # height at which the crown begins
    is_conifer: bool  # whether the crown is a cone
    foliage: Float32Array  # color of the leaves
    lobes: tuple[tuple[float, float, float], ...]  # round parts of the crown: (across, up, radius) as fractions of it
    start: int  # offset into the texture


def sample_trees(side: Side, rng: SceneRNG) -> list[Tree]:
    """Sample a row of trees behind the curb or in the verge, or the trees of a park."""
    trees = []
    is_dense = side.is_park or rng.chance(0.55)
    spacing = rng.uniform(7, 14) if is_dense else rng.uniform(18, 40)
    color = rng.choice(FOLIAGE)
    z = rng.uniform(4, 4 + spacing)
    while z < 55:
        if side.is_park:
            offset = side.curb + side.pavement + rng.uniform(0.8, 7)
        else:
            offset = side.curb + (side.pavement + side.verge / 2 if side.verge else 0.7)
        trees.append(sample_tree(side.sign * offset, z, color, rng))
        z += spacing * rng.uniform(0.45, 1.0) * (0.6 if side.is_park else 1.2)
    return trees


def sample_tree(x: float, z: float, color: tuple[float, float, float], rng: SceneRNG) -> Tree:
    """Sample the appearance of a tree."""
    height = rng.uniform(4, 9.5)
    is_conifer = rng.chance(0.15)
    lobes = tuple(
        (rng.uniform(-0.5, 0.5), rng.uniform(-0.45, 0.5), rng.uniform(0.42, 0.62))
        for _ in range(0 if is_conifer else 3)
    )
    return Tree(
        x=x,
        z=z,
        height=height,
        radius=height * (rng.uniform(0.18, 0.24) if is_conifer else rng.uniform(0.26, 0.38)),
        trunk=0.8 if is_conifer else min(height * 0.4, rng.uniform(1.8, 2.8)),
        is_conifer=is_conifer,
        foliage=rng.color(color, 0.05),
        lobes=((0.0, 0.0, 0.68), *lobes),
        start=rng.integer(0, SIDE - 1),
    )


def paint_tree(canvas: Canvas, street: Street, tree: Tree) -> None:
    """Paint the trunk and the crown of a tree."""
    half = max(0.02 * tree.height, canvas.camera.pixels_to_meters(0.55, tree.z))
    if (trunk := canvas.billboard(tree.x, tree.z, half, 0, tree.trunk + 0.5)) is not None:
        inside = (np.abs(trunk.across) < half) & (trunk.up > 0) & (trunk.up < tree.trunk + 0.5)
        canvas.paint(trunk, inside, tree.z, BARK, VEGETATION)
    if (crown := canvas.billboard(tree.x, tree.z, 1.1 * tree.radius, tree.trunk - 0.3, tree.height + 0.3)) is None:
        return
    half_height = (tree.height - tree.trunk) / 2
    across, up = crown.across / tree.radius, (crown.up - tree.trunk) / half_height - 1
    leaf = sample_grain(
        up * half_height * LEAVES_PER_METER + tree.start, across * tree.radius * LEAVES_PER_METER + tree.start + SIDE
    )
    inside = _conifer_mask(across, up, leaf) if tree.is_conifer else _round_crown_mask(tree, across, up, leaf)
    facing_sun = street.sunshine * street.sun * across
    tone = 0.45 + 0.85 * leaf + 0.25 * up + 0.15 * facing_sun
    snow = up * 0.6 + 0.1 + 0.5 * leaf
    canvas.paint(crown, inside, tree.z, np.maximum(tone, 0.2) * tree.foliage, VEGETATION, snow=snow)


def _round_crown_mask(tree: Tree, across: Float32Array, up: Float32Array, leaf: Float32Array) -> Mask:
    """Return the pixels within any of the lobes, with rims roughened by the leaves."""
    roughness = 0.72 + 0.56 * leaf
    inside = np.zeros(leaf.shape, np.bool_)
    for right, above, radius in tree.lobes:
        inside |= (across - right) ** 2 + (up - above) ** 2 < (radius * roughness) ** 2
    return inside


def _conifer_mask(across: Float32Array, up: Float32Array, leaf: Float32Array) -> Mask:
    width = (1 - up) / 2 * (0.75 + 0.25 * ((up * 3) % 1)) + 0.25 * (leaf - 0.5)
    inside: Mask = (np.abs(across) < width) & (up > -1) & (up < 1)
    return inside


def paint_hedge(canvas: Canvas, side: Side, rng: SceneRNG) -> None:
    """Paint a hedge along the far edge of the pavement, around every park and some gardens."""
    if not (rng.chance(0.2) or side.is_park):
        return
    camera = canvas.camera
    offset, height = side.building_line + 0.2, rng.uniform(0.9, 2.2)
    near, far = rng.uniform(1.3, 8), rng.uniform(30, 90)
    foliage, start = rng.color(rng.choice(FOLIAGE[:3]), 0.04), rng.uniform(0, SIDE)
    ends = [camera.project_x(side.sign * offset, z) for z in (near, far)]
    top, bottom = camera.project_y(height + 0.3, near), camera.project_y(0, near)
    if (region := canvas.region(min(ends), top, max(ends), bottom, near)) is None:
        return
    z = region.wall_depth(side.sign, offset)
    up = camera.elevation - region.v * z
    leaf = sample_grain(up * LEAVES_PER_METER + 40, z * LEAVES_PER_METER + start)
    inside = (z > near) & (z < far) & (up > 0) & (up < height * (0.9 + 0.2 * leaf))
    tone = 0.5 + 0.8 * leaf + 0.15 * up / height
    canvas.paint(region, inside, z, tone * foliage, VEGETATION, snow=np.clip(2 * up / height - 1.2, 0, 1))


STEELS = ((0.45, 0.46, 0.47), (0.22, 0.24, 0.24), (0.60, 0.60, 0.58), (0.20, 0.28, 0.24))
SIGNS = ((0.75, 0.10, 0.10), (0.10, 0.25, 0.65), (0.88, 0.88, 0.86), (0.90, 0.75, 0.15))
SIGNALS = {RED_LIGHT: rgb(0.85, 0.1, 0.08), GREEN_LIGHT: rgb(0.1, 0.8, 0.4)}


@dataclass(frozen=True)
class Pole:
    """A pole, which carries a lamp, a sign, a traffic light or nothing; with lengths in meters."""

    x: float  # position to the right
    z: float  # depth
    height: float
    half_width: float  # half its thickness
    steel: Float32Array  # its color
    arm: float = 0.0  # length of the arm of a street lamp, positive to the right; 0 for none
    sign: Float32Array | None = None  # color of a sign
    signal: int | None = None  # RED_LIGHT or GREEN_LIGHT for a traffic light


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
    if (block := canvas.billboard(x, z, half_width, low, high)) is None:
        return
    inside = (np.abs(block.across) < half_width) & (block.up > low) & (block.up < high)
    tone = np.where(block.across < 0, np.float32(1.12), np.float32(0.85))
    canvas.paint(block, inside, z, tone * color, POLE, light=light)


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
    if (disk := canvas.billboard(pole.x, z, radius, pole.height - 0.5, pole.height + 0.22)) is None:
        return
    squared_distance = disk.across**2 + (disk.up - pole.height + 0.14) ** 2
    inner = np.where((squared_distance < (0.6 * radius) ** 2), 0.5 * color + 0.45, color)
    canvas.paint(disk, squared_distance < radius**2, z, inner, POLE)


def _paint_traffic_light(canvas: Canvas, pole: Pole, signal: int) -> None:
    z = pole.z - 0.1
    half_width = max(0.17, canvas.camera.pixels_to_meters(0.6, z))
    _paint_block(canvas, pole.x, z, half_width, pole.height - 0.9, pole.height, rgb(0.07, 0.07, 0.07))
    y = pole.height - (0.2 if signal == RED_LIGHT else 0.7)
    size = max(0.1, canvas.camera.pixels_to_meters(0.5, z))
    _paint_block(canvas, pole.x, z - 0.05, size, y - size, y + size, SIGNALS[signal], signal)
    canvas.light_sources.append(LightSource(pole.x, y, z - 0.05, 0.3, signal))

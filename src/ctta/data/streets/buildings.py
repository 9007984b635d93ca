"""Houses along the street: boxes with a facade of windows, some under a pitched roof."""

from dataclasses import dataclass

import numpy as np

from ctta.data.corruptions.arrays import Float32Array
from ctta.data.streets.canvas import LIT_WINDOW, Canvas, Mask
from ctta.data.streets.classes import BUILDING
from ctta.data.streets.rng import SceneRNG
from ctta.data.streets.street import MAX_DEPTH, Side, Street
from ctta.data.streets.textures import GRAIN, SIDE, fractal_texture, lookup_colors, rgb, sample_texture

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
class Facade:
    """The appearance of a house.

    Attributes:
        wall: Color of the walls.
        roof: Color of the roof.
        trim: Color of the trim.
        bay: Horizontal distance between windows in meters.
        story: Height of a story in meters.
        pane: Fraction of a bay that is glass.
        has_shop: Whether the ground floor has shop windows.
        start: Offset into the texture.
    """

    wall: Float32Array
    roof: Float32Array
    trim: Float32Array
    bay: float
    story: float
    pane: float
    has_shop: bool
    start: int


@dataclass(frozen=True)
class House:
    """A box on one side of the street, with its front along the street.

    Attributes:
        side: -1 left, 1 right.
        offset: Distance of the front from the line below the camera, in meters as all lengths.
        near: Depth at which the front begins.
        far: Depth at which the front ends.
        eaves: Height of the walls.
        thickness: Extent of the house across the street.
        rise: Height of the ridge above the eaves; 0 for a flat roof.
        facade: Its appearance.
    """

    side: int
    offset: float
    near: float
    far: float
    eaves: float
    thickness: float
    rise: float
    facade: Facade


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
                    facade=sample_facade(rng),
                )
            )
        z += length
    return houses


def sample_facade(rng: SceneRNG) -> Facade:
    """Sample the appearance of a house."""
    wall = rng.color(rng.choice(WALLS), 0.09)
    return Facade(
        wall=wall,
        roof=rng.color(rng.choice(ROOFS), 0.06),
        trim=np.clip(wall * rng.choice((0.7, 1.25)), 0.05, 0.95),
        bay=rng.uniform(1.8, 3.4),
        story=rng.uniform(2.7, 3.4),
        pane=rng.uniform(0.36, 0.62),
        has_shop=rng.chance(0.35),
        start=rng.integer(0, SIDE - 1),
    )


def shade_facade(
    facade: Facade,
    along: Float32Array,
    up: Float32Array,
    eaves: float,
    pixels_per_meter: Float32Array,
    brightness: float,
) -> tuple[Float32Array, Mask]:
    """Return the colors of a wall at (along, up) meters from its lower corner, and which pixels are lit at night."""
    grain = fractal_texture(GRAIN)
    bay, story = np.floor(along / facade.bay), np.floor(up / facade.story)
    # Windows that are too small to be resolved would alias, and are left out.
    across = np.where(pixels_per_meter > 2 / facade.bay, np.abs(along / facade.bay - bay - 0.5), np.float32(1))
    rising = np.abs(up / facade.story - story - 0.5)
    on_ground_floor = story < 1
    glass = (across < facade.pane / 2) & (rising < 0.28) & (up < eaves - 0.5)
    if facade.has_shop:
        glass |= on_ground_floor & (across < 0.42) & (rising < 0.36)
    # Every window has one tone, by its bay and story.
    tone = sample_texture(grain, story * 37 + facade.start, bay * 101 + 64 * SIDE)
    trim = (up > eaves - 0.45) | ((rising > 0.47) & ~on_ground_floor)
    surface = np.where(glass, (tone * (len(PANES) - 1)).astype(np.uint8) + np.uint8(2), trim)  # 0 wall, 1 trim, glass
    shade = sample_texture(grain, up * 6, along * 6 + facade.start)
    shade *= np.float32(0.24 * brightness)
    shade += np.float32(0.88 * brightness)
    color = lookup_colors(surface, [facade.wall, facade.trim, *PANES])
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
    region = canvas.region(min(ends), top, max(ends), bottom, near)
    if region is None:
        return
    z = region.wall_depth(house.side, house.offset)
    up = camera.elevation - region.v * z
    inside = (z > near) & (z < house.far) & (up > 0) & (up < house.eaves)
    color, lit = shade_facade(house.facade, z - house.near, up, house.eaves, camera.focal / z, brightness)
    canvas.paint(region, inside, z, color, BUILDING, light=lit * np.uint8(LIT_WINDOW))


def _paint_gable(canvas: Canvas, house: House, brightness: float) -> None:
    """Paint the wall that faces the camera, seen where the house protrudes beyond or above its neighbor."""
    center, half = house.side * (house.offset + house.thickness / 2), house.thickness / 2
    region = canvas.billboard(center, house.near, half, 0, house.eaves + house.rise)
    if region is None:
        return
    inwards = half - np.abs(region.u * house.near - center)  # meters from the nearer edge
    up = canvas.camera.elevation - region.v * house.near
    top = house.eaves + house.rise * inwards / half
    inside = (inwards > 0) & (up > 0) & (up < top)
    color, lit = shade_facade(
        house.facade,
        region.u * house.near - center + half,
        up,
        house.eaves,
        np.full_like(region.u, canvas.camera.focal / house.near),
        brightness,
    )
    canvas.paint(region, inside, house.near, color, BUILDING, light=lit * np.uint8(LIT_WINDOW))


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
    region = canvas.region(min(columns), min(rows), max(columns), max(rows), near)
    if region is None:
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
    grain = sample_texture(fractal_texture(GRAIN), z * 5, np.where(inside, x, 0) * 12 + 900)
    tone = brightness * (0.8 + 0.4 * grain)
    canvas.paint(region, inside, z, tone * house.facade.roof, BUILDING, snow=1.0)

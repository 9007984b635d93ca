"""Traffic: cars that drive or are parked, and people."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctta.data.corruptions.arrays import Float32Array
from ctta.data.streets.canvas import CAR, NO_LIGHT, PERSON, RED_LIGHT, WHITE_LIGHT, Canvas, LightSource, Mask
from ctta.data.streets.street import PARKING_WIDTH, Side, Street
from ctta.data.streets.textures import SceneRNG, lookup_colors, rgb

PAINTS = (
    (0.75, 0.76, 0.78),
    (0.12, 0.12, 0.14),
    (0.55, 0.08, 0.08),
    (0.12, 0.20, 0.48),
    (0.88, 0.88, 0.88),
    (0.36, 0.38, 0.40),
    (0.16, 0.36, 0.24),
    (0.80, 0.62, 0.14),
)
TIRE, RIM = rgb(0.06, 0.06, 0.07), rgb(0.55, 0.55, 0.57)
GRILLE = TIRE * np.float32(2)
GLASS, PLATE = rgb(0.14, 0.18, 0.22), rgb(0.88, 0.88, 0.82)
LIGHTS = {RED_LIGHT: rgb(0.75, 0.08, 0.06), WHITE_LIGHT: rgb(0.92, 0.92, 0.86)}

WINDSHIELD, REAR_WINDOW = 0.18, 0.04  # how far they lean back, as fractions of the length
SPACE = 6.0  # meters of street that a car needs


@dataclass(frozen=True)
class CarBody:
    """The shape of a car, with lengths in meters."""

    half_width: float
    height: float
    length: float
    waist: float  # height at which the windows begin, as a fraction of the height
    cabin: tuple[float, float]  # rear and front end of the cabin, as fractions of the length from the rear
    wheel: float  # radius of a wheel


BODIES = (
    CarBody(0.88, 1.45, 4.2, 0.60, (0.04, 0.72), 0.32),  # hatchback
    CarBody(0.88, 1.45, 4.2, 0.60, (0.04, 0.72), 0.32),
    CarBody(0.90, 1.42, 4.6, 0.60, (0.16, 0.70), 0.32),  # sedan
    CarBody(0.93, 1.70, 4.6, 0.60, (0.02, 0.74), 0.36),  # SUV
    CarBody(0.98, 2.25, 5.2, 0.52, (0.00, 0.82), 0.34),  # van
)


@dataclass(frozen=True)
class Car:
    """A car on the street."""

    x: float  # position of its center line in meters
    z: float  # depth of the end that faces the camera
    is_oncoming: bool  # whether its front faces the camera
    body: CarBody
    paint: Float32Array  # its color
    is_parked: bool  # with its lights off


def sample_cars(street: Street, rng: SceneRNG) -> list[Car]:
    """Sample the cars that drive and those that are parked."""
    cars = []
    for lane in street.lanes:
        z = rng.uniform(9, 34) if lane.is_oncoming else rng.uniform(11, 40)
        for _ in range(rng.integer(0, 3)):
            cars.append(_sample_car(lane.x + rng.uniform(-0.3, 0.3), z, lane.is_oncoming, False, rng))
            z += SPACE + rng.uniform(2, 25)
    for side in street.sides:
        if side.has_parking:
            cars += _sample_parked_cars(street, side, rng)
    return cars


def _sample_parked_cars(street: Street, side: Side, rng: SceneRNG) -> list[Car]:
    cars = []
    x = side.sign * (side.curb - PARKING_WIDTH / 2 + rng.uniform(-0.05, 0.15))
    z, occupancy = rng.uniform(3.5, 10), rng.uniform(0.2, 0.85)
    while z < 55:
        at_crosswalk = street.crosswalk is not None and street.crosswalk - SPACE < z < street.crosswalk + 4
        if rng.chance(occupancy) and not at_crosswalk:
            cars.append(_sample_car(x, z, side.sign != street.driving_side, True, rng))
        z += SPACE * rng.uniform(0.9, 1.3)
    return cars


def _sample_car(x: float, z: float, is_oncoming: bool, is_parked: bool, rng: SceneRNG) -> Car:
    body = rng.choice(BODIES)
    return Car(x, z, is_oncoming, body, paint=rng.color(rng.choice(PAINTS), 0.06), is_parked=is_parked)


def paint_car(canvas: Canvas, street: Street, car: Car) -> None:
    """Paint a car and add its lights."""
    body = car.body
    cabin_setback = (1 - body.cabin[1] if car.is_oncoming else body.cabin[0]) * body.length
    _paint_cabin_end(canvas, car, car.z + cabin_setback, WINDSHIELD if car.is_oncoming else REAR_WINDOW)
    _paint_body_end(canvas, car)
    inner = car.x - math.copysign(body.half_width, car.x)
    if car.x * inner > 0:  # the side towards the middle of the road is visible
        brightness = 1 + 0.2 * street.sunshine * (-1 if car.x * street.sun > 0 else 1)
        _paint_side(canvas, car, inner, brightness)
    if car.is_parked:
        return
    kind = WHITE_LIGHT if car.is_oncoming else RED_LIGHT
    for sign in (-1, 1):
        x, y = car.x + sign * 0.8 * body.half_width, 0.48 * body.height
        canvas.light_sources.append(LightSource(x, y, car.z, 0.5, kind))


def _paint_body_end(canvas: Canvas, car: Car) -> None:
    """Paint the lower half of rear or front: panel, lights, license plate, bumper and wheels."""
    body = car.body
    top = body.waist * body.height
    if (end := canvas.billboard(car.x, car.z, body.half_width, 0, top)) is None:
        return
    across, up = np.abs(end.across) / body.half_width, end.up / top
    panel = (up > 0.2) & (up < 1) & (across < 0.98 - 0.12 * np.clip(up - 0.8, 0, 1) * 5)
    wheels = (up > 0) & (up < 0.4) & (across > 0.62) & (across < 0.95)
    kind = WHITE_LIGHT if car.is_oncoming else RED_LIGHT
    lights = (np.abs(up - 0.78) < 0.13) & (across > 0.66) & (across < 0.95)
    parts = [
        (up < 0.42, car.paint * np.float32(0.55)),
        (up < 0.26, TIRE),
        ((np.abs(up - 0.5) < 0.1) & (across < 0.27), PLATE),
        (lights, LIGHTS[kind]),
    ]
    if car.is_oncoming:
        parts.append(((np.abs(up - 0.72) < 0.1) & (across < 0.5), GRILLE))
    color = _layer_colors(lights.shape, car.paint, parts)
    light = lights * np.uint8(NO_LIGHT if car.is_parked else kind)
    canvas.paint(end, panel | wheels, car.z, color, CAR, light=light)


def _paint_cabin_end(canvas: Canvas, car: Car, base: float, slant: float) -> None:
    """Paint the rear window or windshield, narrower towards the roof, and the trunk or hood below it."""
    body = car.body
    if (region := canvas.billboard(car.x, base, body.half_width, 0.3 * body.height, body.height)) is None:
        return
    # Above the waist it leans back, so that z = base + lean (y - waist), where y = elevation - v z.
    lean = slant * body.length / (body.height * (1 - body.waist))
    over_waist = canvas.camera.elevation - body.waist * body.height
    z = np.maximum((base + lean * over_waist) / (1 + lean * region.v), base)
    across = np.abs(region.u * z - car.x) / body.half_width
    up = ((canvas.camera.elevation - region.v * z) / body.height - body.waist) / (1 - body.waist)
    width = 1.0 - 0.05 * np.clip(up, 0, 1)
    inside = (across < width) & (up < 1)
    pane = (across < width - 0.1) & (up > 0.1) & (up < 0.82)
    reflected_sky = pane & (up > 0.45 + 0.2 * across)
    color = _layer_colors(pane.shape, car.paint, [(pane, GLASS), (reflected_sky, GLASS * np.float32(1.9))])
    canvas.paint(region, inside, z, color, CAR, snow=np.where(pane, np.float32(0.15), up))


def _paint_side(canvas: Canvas, car: Car, x: float, brightness: float) -> None:
    """Paint the side, a wall in perspective: body, cabin with windows, two wheels."""
    camera, body = canvas.camera, car.body
    ends = [camera.project_x(x, z) for z in (car.z, car.z + body.length)]
    top, bottom = camera.project_y(body.height, car.z), camera.project_y(0, car.z)
    if (region := canvas.region(min(ends), top, max(ends), bottom, car.z)) is None:
        return
    z = region.wall_depth(1 if x > 0 else -1, abs(x))
    height = camera.elevation - region.v * z
    along = (z - car.z) / body.length
    if car.is_oncoming:
        along = 1 - along
    inside, color, snow = _shade_side(body, car.paint * brightness, along, height)
    canvas.paint(region, inside & (along > -0.02) & (along < 1.02), z, color, CAR, snow=snow)


def _shade_side(
    body: CarBody, paint: Float32Array, along: Float32Array, height: Float32Array
) -> tuple[Mask, Float32Array, Float32Array]:
    """Return mask, color and snow of a side, by fraction of its length from the rear and meters above the ground."""
    up = height / body.height
    rising = (up - body.waist) / (1 - body.waist)
    rear, front = body.cabin[0] + REAR_WINDOW * rising, body.cabin[1] - WINDSHIELD * rising
    cabin = (rising > 0) & (rising < 1) & (along > rear) & (along < front)
    hull = (up > 0.16) & (rising <= 0)
    from_wheel = np.minimum(np.abs(along - 0.18), np.abs(along - 0.81)) * body.length
    squared_distance = from_wheel**2 + (height - body.wheel) ** 2
    wheels = squared_distance < body.wheel**2
    panes = cabin & (rising > 0.12) & (rising < 0.85) & (along > rear + 0.05) & (along < front - 0.05)
    panes &= np.abs(along - (body.cabin[0] + body.cabin[1]) / 2) > 0.02
    parts = [
        (up < 0.4, paint * np.float32(0.85)),
        (panes, GLASS * np.float32(1.3)),
        (up < 0.24, GRILLE),
        (squared_distance < (1.15 * body.wheel) ** 2, TIRE),
        (squared_distance < (0.55 * body.wheel) ** 2, RIM),
    ]
    return cabin | hull | wheels, _layer_colors(up.shape, paint, parts), rising - np.float32(0.6)


def _layer_colors(
    shape: tuple[int, ...], paint: Float32Array, parts: Sequence[tuple[Mask, Float32Array]]
) -> Float32Array:
    """Return the colors of parts layered over the paint, later ones on top.

    The layers are composed as part numbers, a third of the size of colors.
    """
    part: NDArray[np.uint8] = np.zeros(shape, np.uint8)
    for number, (where, _) in enumerate(parts, start=1):
        np.copyto(part, np.uint8(number), where=where)
    return lookup_colors(part, [paint, *(color for _, color in parts)])


SKIN = ((0.86, 0.68, 0.56), (0.66, 0.46, 0.34), (0.42, 0.28, 0.20))
HAIR = ((0.14, 0.10, 0.08), (0.40, 0.28, 0.16), (0.70, 0.62, 0.50))
COATS = (
    (0.70, 0.14, 0.14),
    (0.14, 0.22, 0.46),
    (0.12, 0.12, 0.13),
    (0.80, 0.78, 0.72),
    (0.22, 0.40, 0.24),
    (0.78, 0.56, 0.18),
    (0.46, 0.26, 0.46),
)
TROUSERS = ((0.12, 0.14, 0.22), (0.10, 0.10, 0.10), (0.36, 0.32, 0.28), (0.26, 0.30, 0.40))
HALF_WIDTH = 0.36  # meters, including arms and stride


@dataclass(frozen=True)
class Person:
    """A person on the street."""

    x: float  # meters to the right
    z: float  # depth in meters
    height: float  # in meters
    build: float  # relative width of the body
    stride: float  # distance of each foot from the center in meters
    coat_end: float  # height at which the coat ends, as a fraction of the height
    skin: Float32Array  # a color, as are the following
    hair: Float32Array
    coat: Float32Array
    trousers: Float32Array


def sample_people(street: Street, rng: SceneRNG) -> list[Person]:
    """Sample the people on the pavements and on the crosswalk."""
    people = []
    for side in street.sides:
        for _ in range(rng.integer(1, 4)):
            offset = side.curb + rng.uniform(0.4, side.pavement - 0.2)
            z = rng.uniform(5, 13) if rng.chance(0.4) else rng.uniform(9, 38)
            people.append(sample_person(side.sign * offset, z, rng))
            if rng.chance(0.3):  # a companion
                x, z = side.sign * (offset + rng.uniform(0.5, 0.7)), z + rng.uniform(-0.4, 0.4)
                people.append(sample_person(x, z, rng))
    if street.crosswalk is not None and rng.chance(0.75):
        for _ in range(rng.integer(1, 3)):
            x = rng.uniform(-street.sides[0].curb, street.sides[1].curb)
            people.append(sample_person(x, street.crosswalk + rng.uniform(0.4, 2.8), rng))
    return people


def sample_person(x: float, z: float, rng: SceneRNG) -> Person:
    """Sample the appearance of a person."""
    return Person(
        x=x,
        z=z,
        height=rng.uniform(1.1, 1.4) if rng.chance(0.12) else rng.uniform(1.55, 1.92),
        build=rng.uniform(0.9, 1.25),
        stride=rng.uniform(0.05, 0.26),
        coat_end=rng.uniform(0.32, 0.5),
        skin=rng.color(rng.choice(SKIN), 0.04),
        hair=rng.color(rng.choice(HAIR), 0.04),
        coat=rng.color(rng.choice(COATS), 0.08),
        trousers=rng.color(rng.choice(TROUSERS), 0.05),
    )


def paint_person(canvas: Canvas, person: Person) -> None:
    """Paint a person."""
    if (figure := canvas.billboard(person.x, person.z, HALF_WIDTH, 0, person.height)) is None:
        return
    across, away, up = figure.across, np.abs(figure.across), figure.up / person.height
    half_pixel = canvas.camera.pixels_to_meters(0.5, person.z)  # nothing gets narrower than a pixel

    crown = up - 0.925
    head = (across / max(0.105, half_pixel)) ** 2 + (crown / 0.075) ** 2 < 1
    shoulders = person.build * (0.21 - 0.10 * np.clip((up - 0.80) / 0.07, 0, 1) + 0.04 * np.clip(0.6 - up, 0, 1))
    coat = (up > person.coat_end) & (up < 0.87) & (away < np.maximum(shoulders, half_pixel))
    arm_range = (up > 0.44) & (up < 0.80)
    arms = arm_range & (np.abs(away - person.build * (0.22 + 0.12 * (0.8 - up))) < max(0.05, half_pixel / 2))
    foot = person.stride * (1 - up / 0.5)  # legs part from the hip downwards
    legs = (up > 0) & (up < 0.5) & (np.abs(away - np.maximum(foot, 0.05)) < max(0.075, half_pixel / 2))

    part = legs.astype(np.uint8)  # 0 shoes, 1 trousers, 2 sleeves, 3 coat, 4 skin, 5 hair
    for number, where in ((2, arms), (3, coat), (4, head), (5, head & (crown > 0.02)), (0, up < 0.04)):
        np.copyto(part, np.uint8(number), where=where)
    shoes, sleeves = person.trousers * np.float32(0.4), person.coat * np.float32(0.8)
    color = lookup_colors(part, [shoes, person.trousers, sleeves, person.coat, person.skin, person.hair])
    canvas.paint(figure, head | coat | arms | legs, person.z, color, PERSON)

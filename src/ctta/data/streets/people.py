"""People: a head, a coat, arms and walking legs."""

from dataclasses import dataclass

import numpy as np

from ctta.data.corruptions.arrays import Float32Array
from ctta.data.streets.canvas import Canvas
from ctta.data.streets.classes import PERSON
from ctta.data.streets.rng import SceneRNG
from ctta.data.streets.street import Street
from ctta.data.streets.textures import lookup_colors

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
    """A person on the street.

    Attributes:
        x: Meters to the right.
        z: Depth in meters.
        height: Height in meters.
        build: Relative width of the body.
        stride: Distance of each foot from the center in meters.
        coat_end: Height at which the coat ends, as a fraction of the height.
        skin: Color of the skin.
        hair: Color of the hair.
        coat: Color of the coat.
        trousers: Color of the trousers.
    """

    x: float
    z: float
    height: float
    build: float
    stride: float
    coat_end: float
    skin: Float32Array
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
    region = canvas.billboard(person.x, person.z, HALF_WIDTH, 0, person.height)
    if region is None:
        return
    across = region.u * person.z - person.x
    away = np.abs(across)
    up = (canvas.camera.elevation - region.v * person.z) / person.height
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
    canvas.paint(region, head | coat | arms | legs, person.z, color, PERSON)

"""People: a head, a coat, arms and legs that walk."""

from dataclasses import dataclass

import numpy as np

from ctta.corruptions.arrays import Float32Array
from ctta.synthetic.canvas import Canvas
from ctta.synthetic.classes import PERSON
from ctta.synthetic.colors import by_number
from ctta.synthetic.rng import SceneRNG

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
HALF_WIDTH = 0.36  # metres, arms and stride included


@dataclass(frozen=True)
class Person:
    x: float
    z: float
    height: float
    stout: float
    stride: float  # how far each foot is from the middle, in metres
    coat_length: float  # share of the height at which it ends
    skin: Float32Array
    hair: Float32Array
    coat: Float32Array
    trousers: Float32Array


def drawn_person(x: float, z: float, dice: SceneRNG) -> Person:
    return Person(
        x=x,
        z=z,
        height=dice.between(1.1, 1.4) if dice.chance(0.12) else dice.between(1.55, 1.92),
        stout=dice.between(0.9, 1.25),
        stride=dice.between(0.05, 0.26),
        coat_length=dice.between(0.32, 0.5),
        skin=dice.colour(dice.pick(SKIN), 0.04),
        hair=dice.colour(dice.pick(HAIR), 0.04),
        coat=dice.colour(dice.pick(COATS), 0.08),
        trousers=dice.colour(dice.pick(TROUSERS), 0.05),
    )


def paint_person(canvas: Canvas, person: Person) -> None:
    window = canvas.upright(person.x, person.z, HALF_WIDTH, 0, person.height)
    if window is None:
        return
    across = window.u * person.z - person.x
    away = np.abs(across)
    up = (canvas.camera.above_ground - window.v * person.z) / person.height
    thin = canvas.camera.metres(0.5, person.z)  # nothing gets narrower than a pixel

    crown = up - 0.925
    head = (across / max(0.105, thin)) ** 2 + (crown / 0.075) ** 2 < 1
    shoulders = person.stout * (0.21 - 0.10 * np.clip((up - 0.80) / 0.07, 0, 1) + 0.04 * np.clip(0.6 - up, 0, 1))
    coat = (up > person.coat_length) & (up < 0.87) & (away < np.maximum(shoulders, thin))
    hands_down = (up > 0.44) & (up < 0.80)
    arms = hands_down & (np.abs(away - person.stout * (0.22 + 0.12 * (0.8 - up))) < max(0.05, thin / 2))
    foot = person.stride * (1 - up / 0.5)  # legs part from the hip downwards
    legs = (up > 0) & (up < 0.5) & (np.abs(away - np.maximum(foot, 0.05)) < max(0.075, thin / 2))

    part = legs.astype(np.uint8)  # 0 shoes, 1 trousers, 2 sleeves, 3 coat, 4 skin, 5 hair
    for number, where in ((2, arms), (3, coat), (4, head), (5, head & (crown > 0.02)), (0, up < 0.04)):
        np.copyto(part, np.uint8(number), where=where)
    shoes, sleeves = person.trousers * np.float32(0.4), person.coat * np.float32(0.8)
    colour = by_number(part, [shoes, person.trousers, sleeves, person.coat, person.skin, person.hair])
    canvas.paint(window, head | coat | arms | legs, person.z, colour, PERSON)

"""Traffic: which cars and people are where."""

from ctta.synthetic.cars import BODIES, Car
from ctta.synthetic.people import Person, drawn_person
from ctta.synthetic.plan import PARKING, Side, Street
from ctta.synthetic.rng import SceneRNG

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
WITH_CAR = 6.0  # metres of street that a car needs


def drawn_cars(street: Street, dice: SceneRNG) -> list[Car]:
    cars = []
    for lane in street.lanes:
        at = dice.between(9, 34) if lane.oncoming else dice.between(11, 40)
        for _ in range(dice.whole(0, 3)):
            cars.append(_car(lane.x + dice.between(-0.3, 0.3), at, lane.oncoming, False, dice))
            at += WITH_CAR + dice.between(2, 25)
    for side in street.sides:
        if side.parking:
            cars += _parked(street, side, dice)
    return cars


def _parked(street: Street, side: Side, dice: SceneRNG) -> list[Car]:
    cars = []
    x = side.sign * (side.kerb - PARKING / 2 + dice.between(-0.05, 0.15))
    at, filled = dice.between(3.5, 10), dice.between(0.2, 0.85)
    while at < 55:
        free_for_crossing = street.crossing is not None and street.crossing - WITH_CAR < at < street.crossing + 4
        if dice.chance(filled) and not free_for_crossing:
            cars.append(_car(x, at, side.sign != street.camera_drives_on, True, dice))
        at += WITH_CAR * dice.between(0.9, 1.3)
    return cars


def _car(x: float, z: float, oncoming: bool, parked: bool, dice: SceneRNG) -> Car:
    body = dice.pick(BODIES)
    return Car(x=x, z=z, oncoming=oncoming, body=body, paint=dice.colour(dice.pick(PAINTS), 0.06), parked=parked)


def drawn_people(street: Street, dice: SceneRNG) -> list[Person]:
    people = []
    for side in street.sides:
        for _ in range(dice.whole(1, 4)):
            out = side.kerb + dice.between(0.4, side.pavement - 0.2)
            z = dice.between(5, 13) if dice.chance(0.4) else dice.between(9, 38)
            people.append(drawn_person(side.sign * out, z, dice))
            if dice.chance(0.3):  # somebody walks along with them
                people.append(
                    drawn_person(side.sign * (out + dice.between(0.5, 0.7)), z + dice.between(-0.4, 0.4), dice)
                )
    if street.crossing is not None and dice.chance(0.75):
        for _ in range(dice.whole(1, 3)):
            x = dice.between(-street.sides[0].kerb, street.sides[1].kerb)
            people.append(drawn_person(x, street.crossing + dice.between(0.4, 2.8), dice))
    return people

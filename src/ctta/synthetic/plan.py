"""The plan of a street: how wide it is, where its lanes run, where the sun stands."""

from dataclasses import dataclass

from ctta.synthetic.camera import Camera
from ctta.synthetic.rng import SceneRNG

FARTHEST = 110.0  # metres: beyond, nothing is placed but the skyline


@dataclass(frozen=True)
class Side:
    """One side of the street, from the kerb outwards, in metres from the line below the camera."""

    sign: int  # -1 left, 1 right
    kerb: float
    pavement: float  # width
    verge: float  # width of the grass behind it
    parking: bool
    park: bool  # trees and hedges instead of houses

    @property
    def building_line(self) -> float:
        return self.kerb + self.pavement + self.verge


@dataclass(frozen=True)
class Lane:
    """The middle of a lane, and whether its traffic comes towards us."""

    x: float
    oncoming: bool


@dataclass(frozen=True)
class Street:
    camera: Camera
    sides: tuple[Side, Side]
    lanes: tuple[Lane, ...]
    lane_width: float
    centre_line: float
    sun: int  # the side it shines from
    sunshine: float  # 0 overcast to 1
    crossing: float | None  # depth at which a zebra crossing begins
    camera_drives_on: int  # 1 right-hand traffic

    def side(self, sign: int) -> Side:
        return self.sides[0] if sign < 0 else self.sides[1]


PARKING = 2.3  # metres


def drawn_plan(height: int, width: int, dice: SceneRNG) -> Street:
    """A street of one to two lanes each way, seen from one of ours."""
    camera = Camera(
        height=height,
        width=width,
        focal=width * dice.between(0.56, 0.70),
        above_ground=dice.between(1.3, 1.75),
        vanishing_row=height * dice.between(0.42, 0.52),
        vanishing_column=width * dice.between(0.40, 0.60),
    )
    drives_on = 1 if dice.chance(0.5) else -1
    lane_width = dice.between(3.0, 3.7)
    ours, theirs = 2 if dice.chance(0.35) else 1, 2 if dice.chance(0.25) else 1
    own = dice.whole(0, ours - 1)
    # Lanes are numbered from the centre line; ours lies below the camera, give or take.
    centre = -(own + 0.5) * lane_width + dice.between(-0.3, 0.3)
    lanes = [Lane(drives_on * (centre + (number + 0.5) * lane_width), oncoming=False) for number in range(ours)]
    lanes += [Lane(drives_on * (centre - (number + 0.5) * lane_width), oncoming=True) for number in range(theirs)]
    sides = []
    for sign in (-1, 1):
        parking = dice.chance(0.6)
        reach = centre + ours * lane_width if sign == drives_on else theirs * lane_width - centre
        sides.append(
            Side(
                sign=sign,
                kerb=reach + (PARKING if parking else 0.3),
                pavement=dice.between(1.8, 4.0),
                verge=dice.between(1.0, 4.0) if dice.chance(0.35) else 0.0,
                parking=parking,
                park=dice.chance(0.2),
            )
        )
    return Street(
        camera=camera,
        sides=(sides[0], sides[1]),
        lanes=tuple(lanes),
        lane_width=lane_width,
        centre_line=drives_on * centre,
        sun=1 if dice.chance(0.5) else -1,
        sunshine=dice.between(0.35, 1.0) if dice.chance(0.75) else 0.1,
        crossing=dice.between(7, 22) if dice.chance(0.35) else None,
        camera_drives_on=drives_on,
    )

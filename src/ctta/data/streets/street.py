"""The layout of a street: its lanes, its two sides, and where the sun is."""

from dataclasses import dataclass

from ctta.data.streets.camera import Camera
from ctta.data.streets.rng import SceneRNG

MAX_DEPTH = 110.0  # meters: beyond, there is only the skyline
PARKING_WIDTH = 2.3  # meters


@dataclass(frozen=True)
class Side:
    """One side of the street, from the curb outwards, in meters from the line below the camera.

    Attributes:
        sign: -1 left, 1 right.
        curb: Distance of the curb.
        pavement: Width of the pavement.
        verge: Width of the grass behind it.
        has_parking: Whether cars are parked along the curb.
        is_park: Whether there are trees and hedges instead of houses.
    """

    sign: int
    curb: float
    pavement: float
    verge: float
    has_parking: bool
    is_park: bool

    @property
    def building_line(self) -> float:
        """Distance at which private ground begins."""
        return self.curb + self.pavement + self.verge


@dataclass(frozen=True)
class Lane:
    """A lane.

    Attributes:
        x: Its center line.
        is_oncoming: Whether its traffic comes towards the camera.
    """

    x: float
    is_oncoming: bool


@dataclass(frozen=True)
class Street:
    """The layout of a street and the camera that sees it.

    Attributes:
        camera: The camera.
        sides: The left and the right side.
        lanes: All lanes.
        lane_width: Width of a lane in meters.
        center_line: x of the line between the two directions.
        sun: The side the sun shines from: -1 left, 1 right.
        sunshine: 0 for an overcast sky to 1.
        crosswalk: Depth at which a crosswalk begins, or None.
        driving_side: 1 for right-hand traffic, -1 for left-hand traffic.
    """

    camera: Camera
    sides: tuple[Side, Side]
    lanes: tuple[Lane, ...]
    lane_width: float
    center_line: float
    sun: int
    sunshine: float
    crosswalk: float | None
    driving_side: int


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
    lanes = [
        Lane(driving_side * (center + (number + 0.5) * lane_width), is_oncoming=False) for number in range(num_ours)
    ]
    lanes += [
        Lane(driving_side * (center - (number + 0.5) * lane_width), is_oncoming=True) for number in range(num_oncoming)
    ]
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
        lanes=tuple(lanes),
        lane_width=lane_width,
        center_line=driving_side * center,
        sun=1 if rng.chance(0.5) else -1,
        sunshine=rng.uniform(0.35, 1.0) if rng.chance(0.75) else 0.1,
        crosswalk=rng.uniform(7, 22) if rng.chance(0.35) else None,
        driving_side=driving_side,
    )

"""A scene in clear weather: everything put on the canvas."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ctta.corruptions.arrays import Float32Array
from ctta.synthetic.buildings import drawn_houses, paint_house
from ctta.synthetic.camera import Camera
from ctta.synthetic.canvas import Canvas, Lamp
from ctta.synthetic.cars import Car, paint_car
from ctta.synthetic.classes import Labels
from ctta.synthetic.greenery import Tree, drawn_trees, paint_hedge, paint_tree
from ctta.synthetic.ground import paint_ground
from ctta.synthetic.people import Person, paint_person
from ctta.synthetic.pictures import exposed, softened
from ctta.synthetic.plan import drawn_plan
from ctta.synthetic.poles import drawn_poles, paint_pole
from ctta.synthetic.rng import SceneRNG
from ctta.synthetic.shadows import object_shadow, sunlit
from ctta.synthetic.sky import paint_sky, paint_skyline
from ctta.synthetic.traffic import drawn_cars, drawn_people


@dataclass(frozen=True)
class Scene:
    """What there is to see, before any weather: colours in [0, 1], the class of each pixel, its distance and more."""

    camera: Camera
    colour: Float32Array  # (3, H, W), without the shadows of the sun
    sunlit: Float32Array  # (H, W): what those shadows leave
    label: Labels
    depth: Float32Array  # metres along the road; the sky is infinitely far
    snow: Float32Array  # how readily snow lies here, 0 to 1
    light: NDArray[np.uint8]  # what shines at night, see ctta.synthetic.canvas
    lamps: tuple[Lamp, ...]

    @cached_property
    def clear(self) -> Float32Array:
        """The picture in clear weather."""
        return softened(self.colour * self.sunlit)

    @cached_property
    def overcast(self) -> Float32Array:
        """The same without the shadows of houses."""
        return softened(self.colour)

    @cached_property
    def distance(self) -> Float32Array:
        """Metres along each pixel's ray, which is what light has to travel."""
        return self.depth * self.camera.ray_length


def drawn_scene(seed: int, split: str, index: int, height: int, width: int) -> Scene:
    """The scene of that number: the same in every weather."""

    def dice(purpose: str) -> SceneRNG:
        return SceneRNG(seed, f"{split} {purpose}", index)

    street = drawn_plan(height, width, dice("plan"))
    canvas = Canvas(street.camera)
    paint_sky(canvas, street, dice("sky"))
    paint_ground(canvas, street, dice("ground"))
    houses = [house for side in street.sides for house in drawn_houses(side, dice(f"houses {side.sign}"))]
    cars, people = drawn_cars(street, dice("cars")), drawn_people(street, dice("people"))
    light = dice("light")
    # Shadows fall on the bare ground, so they come before what stands on it.
    for car in cars:
        object_shadow(canvas, car.x, car.z - 0.3, car.z + car.body.length, 1.1 * car.body.half_width)
    for person in people:
        object_shadow(canvas, person.x, person.z - 0.25, person.z + 0.25, 0.4)
    trees = [tree for side in street.sides for tree in drawn_trees(side, dice(f"trees {side.sign}"))]
    # What is near comes first, as it hides much of the rest.
    for person in sorted(people, key=depth_of):
        paint_person(canvas, person)
    for car in sorted(cars, key=depth_of):
        paint_car(canvas, street, car)
    for pole in drawn_poles(street, dice("poles")):
        paint_pole(canvas, pole)
    for tree in sorted(trees, key=depth_of):
        paint_tree(canvas, street, tree)
    for side in street.sides:
        paint_hedge(canvas, side, dice(f"hedge {side.sign}"))
    for house in houses:
        paint_house(canvas, street, house)
    paint_skyline(canvas, street, dice("skyline"))
    exposed(canvas.colour, light)
    return Scene(
        camera=street.camera,
        colour=canvas.colour,
        sunlit=sunlit(canvas, street, houses, light.between(0.3, 1.4)),
        label=canvas.label,
        depth=canvas.depth,
        snow=canvas.snow,
        light=canvas.light,
        lamps=tuple(canvas.lamps),
    )


def depth_of(thing: Tree | Car | Person) -> float:
    return thing.z

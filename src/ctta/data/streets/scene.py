"""A scene before weather: everything painted on the canvas."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ctta.data.corruptions.arrays import Float32Array
from ctta.data.streets.canvas import Camera, Canvas, LabelMap, LightSource, expose_, soften
from ctta.data.streets.roadside import (
    compute_sunlight,
    paint_hedge,
    paint_house,
    paint_pole,
    paint_tree,
    sample_houses,
    sample_poles,
    sample_trees,
)
from ctta.data.streets.street import paint_contact_shadow, paint_ground, paint_sky, paint_skyline, sample_street
from ctta.data.streets.textures import SceneRNG
from ctta.data.streets.traffic import paint_car, paint_person, sample_cars, sample_people


@dataclass(frozen=True)
class Scene:
    """What the camera sees, before any weather."""

    camera: Camera
    color: Float32Array  # colors in [0, 1] without the shadows of the sun, (3, H, W)
    sunlight: Float32Array  # the light that those shadows leave, (H, W)
    label: LabelMap  # class index of each pixel
    depth: Float32Array  # meters along the road; infinite for the sky
    snow: Float32Array  # how readily snow settles, 0 to 1
    light: NDArray[np.uint8]  # what shines at night, see :mod:`ctta.data.streets.canvas`
    light_sources: tuple[LightSource, ...]  # lamps, headlights and traffic lights

    @cached_property
    def clear(self) -> Float32Array:
        """Image in clear weather."""
        return soften(self.color * self.sunlight)

    @cached_property
    def overcast(self) -> Float32Array:
        """Image without the shadows of houses."""
        return soften(self.color)

    @cached_property
    def distance(self) -> Float32Array:
        """Meters along each pixel's ray."""
        return self.depth * self.camera.ray_length


def render_scene(seed: int, split: str, index: int, height: int, width: int) -> Scene:
    """Render one scene, which is the same in every weather."""

    def make_rng(purpose: str) -> SceneRNG:
        return SceneRNG(seed, f"{split} {purpose}", index)

    street = sample_street(height, width, make_rng("plan"))
    canvas = Canvas(street.camera)
    paint_sky(canvas, street, make_rng("sky"))
    paint_ground(canvas, street, make_rng("ground"))
    houses = [house for side in street.sides for house in sample_houses(side, make_rng(f"houses {side.sign}"))]
    cars, people = sample_cars(street, make_rng("cars")), sample_people(street, make_rng("people"))
    trees = [tree for side in street.sides for tree in sample_trees(side, make_rng(f"trees {side.sign}"))]
    # Shadows darken the bare ground, so they are painted before the objects on it.
    for car in cars:
        paint_contact_shadow(canvas, car.x, car.z - 0.3, car.z + car.body.length, 1.1 * car.body.half_width)
    for person in people:
        paint_contact_shadow(canvas, person.x, person.z - 0.25, person.z + 0.25, 0.4)
    # Near objects first, as they hide much of the rest (see Canvas.region).
    for person in sorted(people, key=lambda person: person.z):
        paint_person(canvas, person)
    for car in sorted(cars, key=lambda car: car.z):
        paint_car(canvas, street, car)
    for pole in sample_poles(street, make_rng("poles")):
        paint_pole(canvas, pole)
    for tree in sorted(trees, key=lambda tree: tree.z):
        paint_tree(canvas, street, tree)
    for side in street.sides:
        paint_hedge(canvas, side, make_rng(f"hedge {side.sign}"))
    for house in houses:
        paint_house(canvas, street, house)
    paint_skyline(canvas, street, make_rng("skyline"))
    light_rng = make_rng("light")
    expose_(canvas.color, light_rng)
    return Scene(
        camera=street.camera,
        color=canvas.color,
        sunlight=compute_sunlight(canvas, street, houses, light_rng.uniform(0.3, 1.4)),
        label=canvas.label,
        depth=canvas.depth,
        snow=canvas.snow,
        light=canvas.light,
        light_sources=tuple(canvas.light_sources),
    )

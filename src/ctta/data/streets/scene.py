"""A scene before weather: everything painted on the canvas."""

import numpy as np

from ctta.data.streets.canvas import Canvas
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
from ctta.data.streets.textures import SceneRNG, rgb
from ctta.data.streets.traffic import paint_car, paint_person, sample_cars, sample_people


def render_scene(seed: int, split: str, index: int, height: int, width: int) -> Canvas:
    """Paint one scene, which is the same in every weather."""

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
        canvas.object_number += 1
        paint_person(canvas, person)
    for car in sorted(cars, key=lambda car: car.z):
        canvas.object_number += 1
        paint_car(canvas, street, car)
    canvas.object_number = 0
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
    gain, warmth = light_rng.uniform(0.85, 1.15), light_rng.uniform(-0.06, 0.06)  # exposure and white balance
    canvas.color *= rgb(gain * (1 + warmth), gain, gain * (1 - warmth))
    np.clip(canvas.color, 0, 1, out=canvas.color)
    canvas.sunlight = compute_sunlight(canvas, street, houses, light_rng.uniform(0.3, 1.4))
    return canvas

"""Vegetation: trees along the pavement and in parks, and hedges."""

from dataclasses import dataclass

import numpy as np

from ctta.data.corruptions.arrays import Float32Array
from ctta.data.streets.canvas import Canvas, Mask
from ctta.data.streets.classes import VEGETATION
from ctta.data.streets.rng import SceneRNG
from ctta.data.streets.street import Side, Street
from ctta.data.streets.textures import GRAIN, SIDE, fractal_texture, rgb, sample_texture

FOLIAGE = ((0.22, 0.38, 0.14), (0.30, 0.44, 0.16), (0.16, 0.30, 0.16), (0.46, 0.42, 0.14), (0.52, 0.32, 0.12))
BARK = rgb(0.27, 0.21, 0.16)
LEAVES_PER_METER = 7.0


@dataclass(frozen=True)
class Tree:
    """A tree.

    Attributes:
        x: Meters to the right.
        z: Depth in meters.
        height: Height in meters.
        radius: Radius of the crown in meters.
        trunk: Height at which the crown begins.
        is_conifer: Whether the crown is a cone.
        foliage: Color of the leaves.
        lobes: (across, up, radius) of the round parts of the crown, as fractions of it.
        start: Offset into the texture.
    """

    x: float
    z: float
    height: float
    radius: float
    trunk: float
    is_conifer: bool
    foliage: Float32Array
    lobes: tuple[tuple[float, float, float], ...]
    start: int


def sample_trees(side: Side, rng: SceneRNG) -> list[Tree]:
    """Sample a row of trees behind the curb or in the verge, or the trees of a park."""
    trees = []
    is_dense = side.is_park or rng.chance(0.55)
    spacing = rng.uniform(7, 14) if is_dense else rng.uniform(18, 40)
    color = rng.choice(FOLIAGE)
    z = rng.uniform(4, 4 + spacing)
    while z < 55:
        if side.is_park:
            offset = side.curb + side.pavement + rng.uniform(0.8, 7)
        else:
            offset = side.curb + (side.pavement + side.verge / 2 if side.verge else 0.7)
        trees.append(sample_tree(side.sign * offset, z, color, rng))
        z += spacing * rng.uniform(0.45, 1.0) * (0.6 if side.is_park else 1.2)
    return trees


def sample_tree(x: float, z: float, color: tuple[float, float, float], rng: SceneRNG) -> Tree:
    """Sample the appearance of a tree."""
    height = rng.uniform(4, 9.5)
    is_conifer = rng.chance(0.15)
    lobes = tuple(
        (rng.uniform(-0.5, 0.5), rng.uniform(-0.45, 0.5), rng.uniform(0.42, 0.62))
        for _ in range(0 if is_conifer else 3)
    )
    return Tree(
        x=x,
        z=z,
        height=height,
        radius=height * (rng.uniform(0.18, 0.24) if is_conifer else rng.uniform(0.26, 0.38)),
        trunk=0.8 if is_conifer else min(height * 0.4, rng.uniform(1.8, 2.8)),
        is_conifer=is_conifer,
        foliage=rng.color(color, 0.05),
        lobes=((0.0, 0.0, 0.68), *lobes),
        start=rng.integer(0, SIDE - 1),
    )


def paint_tree(canvas: Canvas, street: Street, tree: Tree) -> None:
    """Paint the trunk and the crown of a tree."""
    camera = canvas.camera
    half = max(0.02 * tree.height, camera.pixels_to_meters(0.55, tree.z))
    if (trunk := canvas.billboard(tree.x, tree.z, half, 0, tree.trunk + 0.5)) is not None:
        inside = np.abs(trunk.u * tree.z - tree.x) < half
        up = camera.elevation - trunk.v * tree.z
        canvas.paint(trunk, inside & (up > 0) & (up < tree.trunk + 0.5), tree.z, BARK, VEGETATION)
    crown = canvas.billboard(tree.x, tree.z, 1.1 * tree.radius, tree.trunk - 0.3, tree.height + 0.3)
    if crown is None:
        return
    half_height = (tree.height - tree.trunk) / 2
    across = (crown.u * tree.z - tree.x) / tree.radius
    up = (camera.elevation - crown.v * tree.z - tree.trunk) / half_height - 1
    leaf = sample_texture(
        fractal_texture(GRAIN),
        up * half_height * LEAVES_PER_METER + tree.start,
        across * tree.radius * LEAVES_PER_METER + tree.start + SIDE,
    )
    inside = _conifer_mask(across, up, leaf) if tree.is_conifer else _round_crown_mask(tree, across, up, leaf)
    facing_sun = street.sunshine * street.sun * across
    tone = 0.45 + 0.85 * leaf + 0.25 * up + 0.15 * facing_sun
    snow = up * 0.6 + 0.1 + 0.5 * leaf
    canvas.paint(crown, inside, tree.z, np.maximum(tone, 0.2) * tree.foliage, VEGETATION, snow=snow)


def _round_crown_mask(tree: Tree, across: Float32Array, up: Float32Array, leaf: Float32Array) -> Mask:
    """Return the pixels within any of the lobes, with rims roughened by the leaves."""
    roughness = 0.72 + 0.56 * leaf
    inside = np.zeros(leaf.shape, np.bool_)
    for right, above, radius in tree.lobes:
        inside |= (across - right) ** 2 + (up - above) ** 2 < (radius * roughness) ** 2
    return inside


def _conifer_mask(across: Float32Array, up: Float32Array, leaf: Float32Array) -> Mask:
    width = (1 - up) / 2 * (0.75 + 0.25 * ((up * 3) % 1)) + 0.25 * (leaf - 0.5)
    inside: Mask = (np.abs(across) < width) & (up > -1) & (up < 1)
    return inside


def paint_hedge(canvas: Canvas, side: Side, rng: SceneRNG) -> None:
    """Paint a hedge along the far edge of the pavement, around every park and some gardens."""
    if not (rng.chance(0.2) or side.is_park):
        return
    camera = canvas.camera
    offset, height = side.curb + side.pavement + side.verge + 0.2, rng.uniform(0.9, 2.2)
    near, far = rng.uniform(1.3, 8), rng.uniform(30, 90)
    foliage, start = rng.color(rng.choice(FOLIAGE[:3]), 0.04), rng.uniform(0, SIDE)
    ends = [camera.project_x(side.sign * offset, z) for z in (near, far)]
    top, bottom = camera.project_y(height + 0.3, near), camera.project_y(0, near)
    region = canvas.region(min(ends), top, max(ends), bottom, near)
    if region is None:
        return
    z = region.wall_depth(side.sign, offset)
    up = camera.elevation - region.v * z
    leaf = sample_texture(fractal_texture(GRAIN), up * LEAVES_PER_METER + 40, z * LEAVES_PER_METER + start)
    inside = (z > near) & (z < far) & (up > 0) & (up < height * (0.9 + 0.2 * leaf))
    tone = 0.5 + 0.8 * leaf + 0.15 * up / height
    canvas.paint(region, inside, z, tone * foliage, VEGETATION, snow=np.clip(2 * up / height - 1.2, 0, 1))

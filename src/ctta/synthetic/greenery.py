"""Greenery: trees along the pavement and in parks, and hedges."""

from dataclasses import dataclass

import numpy as np

from ctta.corruptions.arrays import Float32Array
from ctta.synthetic.canvas import Canvas, Mask
from ctta.synthetic.classes import VEGETATION
from ctta.synthetic.colors import rgb
from ctta.synthetic.plan import Side, Street
from ctta.synthetic.rng import SceneRNG
from ctta.synthetic.textures import GRAIN, SIDE, fractal, looked_up

LEAVES = ((0.22, 0.38, 0.14), (0.30, 0.44, 0.16), (0.16, 0.30, 0.16), (0.46, 0.42, 0.14), (0.52, 0.32, 0.12))
BARK = rgb(0.27, 0.21, 0.16)
LEAVES_PER_METRE = 7.0


@dataclass(frozen=True)
class Tree:
    x: float
    z: float
    height: float
    radius: float
    trunk: float  # height at which the crown begins
    conifer: bool
    leaves: Float32Array
    lobes: tuple[tuple[float, float, float], ...]  # (across, up, radius) of the round parts, in shares of the crown
    start: int


def drawn_trees(side: Side, dice: SceneRNG) -> list[Tree]:
    """A row of trees behind the kerb or in the verge, or a wood."""
    trees = []
    in_row = side.park or dice.chance(0.55)
    every = dice.between(7, 14) if in_row else dice.between(18, 40)
    kind = dice.pick(LEAVES)
    at = dice.between(4, 4 + every)
    while at < 55:
        if side.park:
            out = side.kerb + side.pavement + dice.between(0.8, 7)
        else:
            out = side.kerb + (side.pavement + side.verge / 2 if side.verge else 0.7)
        trees.append(drawn_tree(side.sign * out, at, kind, dice))
        at += every * dice.between(0.45, 1.0) * (0.6 if side.park else 1.2)
    return trees


def drawn_tree(x: float, z: float, kind: tuple[float, float, float], dice: SceneRNG) -> Tree:
    height = dice.between(4, 9.5)
    conifer = dice.chance(0.15)
    lobes = tuple(
        (dice.between(-0.5, 0.5), dice.between(-0.45, 0.5), dice.between(0.42, 0.62))
        for _ in range(0 if conifer else 3)
    )
    return Tree(
        x=x,
        z=z,
        height=height,
        radius=height * (dice.between(0.18, 0.24) if conifer else dice.between(0.26, 0.38)),
        trunk=0.8 if conifer else min(height * 0.4, dice.between(1.8, 2.8)),
        conifer=conifer,
        leaves=dice.colour(kind, 0.05),
        lobes=((0.0, 0.0, 0.68), *lobes),
        start=dice.whole(0, SIDE - 1),
    )


def paint_tree(canvas: Canvas, street: Street, tree: Tree) -> None:
    camera = canvas.camera
    half = max(0.02 * tree.height, camera.metres(0.55, tree.z))
    if (trunk := canvas.upright(tree.x, tree.z, half, 0, tree.trunk + 0.5)) is not None:
        inside = np.abs(trunk.u * tree.z - tree.x) < half
        up = camera.above_ground - trunk.v * tree.z
        canvas.paint(trunk, inside & (up > 0) & (up < tree.trunk + 0.5), tree.z, BARK, VEGETATION)
    crown = canvas.upright(tree.x, tree.z, 1.1 * tree.radius, tree.trunk - 0.3, tree.height + 0.3)
    if crown is None:
        return
    half_height = (tree.height - tree.trunk) / 2
    across = (crown.u * tree.z - tree.x) / tree.radius
    up = (camera.above_ground - crown.v * tree.z - tree.trunk) / half_height - 1
    leaf = looked_up(
        fractal(GRAIN),
        up * half_height * LEAVES_PER_METRE + tree.start,
        across * tree.radius * LEAVES_PER_METRE + tree.start + SIDE,
    )
    inside = _conifer(across, up, leaf) if tree.conifer else _round_crown(tree, across, up, leaf)
    facing_sun = street.sunshine * street.sun * across
    tone = 0.45 + 0.85 * leaf + 0.25 * up + 0.15 * facing_sun
    snow = up * 0.6 + 0.1 + 0.5 * leaf
    canvas.paint(crown, inside, tree.z, np.maximum(tone, 0.2) * tree.leaves, VEGETATION, snow=snow)


def _round_crown(tree: Tree, across: Float32Array, up: Float32Array, leaf: Float32Array) -> Mask:
    """Within any of the round parts, whose rims the leaves fray."""
    frayed = 0.72 + 0.56 * leaf
    inside = np.zeros(leaf.shape, np.bool_)
    for right, above, radius in tree.lobes:
        inside |= (across - right) ** 2 + (up - above) ** 2 < (radius * frayed) ** 2
    return inside


def _conifer(across: Float32Array, up: Float32Array, leaf: Float32Array) -> Mask:
    width = (1 - up) / 2 * (0.75 + 0.25 * ((up * 3) % 1)) + 0.25 * (leaf - 0.5)
    inside: Mask = (np.abs(across) < width) & (up > -1) & (up < 1)
    return inside


def paint_hedge(canvas: Canvas, side: Side, dice: SceneRNG) -> None:
    """A green wall along the far edge of the pavement, around every park and some gardens."""
    if not (dice.chance(0.2) or side.park):
        return
    camera = canvas.camera
    line, height = side.kerb + side.pavement + side.verge + 0.2, dice.between(0.9, 2.2)
    near, far = dice.between(1.3, 8), dice.between(30, 90)
    leaves, start = dice.colour(dice.pick(LEAVES[:3]), 0.04), dice.between(0, SIDE)
    ends = [camera.column(side.sign * line, z) for z in (near, far)]
    window = canvas.window(min(ends), camera.row(height + 0.3, near), max(ends), camera.row(0, near), near)
    if window is None:
        return
    z = window.wall_depth(side.sign, line)
    up = camera.above_ground - window.v * z
    leaf = looked_up(fractal(GRAIN), up * LEAVES_PER_METRE + 40, z * LEAVES_PER_METRE + start)
    inside = (z > near) & (z < far) & (up > 0) & (up < height * (0.9 + 0.2 * leaf))
    tone = 0.5 + 0.8 * leaf + 0.15 * up / height
    canvas.paint(window, inside, z, tone * leaves, VEGETATION, snow=np.clip(2 * up / height - 1.2, 0, 1))

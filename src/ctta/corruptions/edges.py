"""Edges and distances to them on batches of grey images, as the spatter corruption needs them."""

import numpy as np
from numpy.typing import NDArray

from ctta.corruptions.arrays import UInt8Array
from ctta.corruptions.filters import filtered

Mask = NDArray[np.bool_]
Whole = NDArray[np.int32]

SOBEL = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])
TAN_22 = 13573  # tan 22.5° · 2^15
FAR = 1 << 28

# Chamfer steps in 1/65536 pixel: to a side, to a corner, and a knight's move away.
SIDE, CORNER, KNIGHT = (round(step * 65536) for step in (1.0, 1.4, 2.1969))
ABOVE = (  # rows up, columns to the right, length
    (1, 0, SIDE),
    (1, -1, CORNER),
    (1, 1, CORNER),
    (1, -2, KNIGHT),
    (1, 2, KNIGHT),
    (2, -1, KNIGHT),
    (2, 1, KNIGHT),
)


def canny(grey: UInt8Array, low: int, high: int) -> Mask:
    """Canny edges of (N, H, W): thin ridges of the gradient over `low` that touch one over `high`."""
    slope_x = filtered(grey, SOBEL, "edge").astype(np.int32)
    slope_y = filtered(grey, SOBEL.T, "edge").astype(np.int32)
    strength = np.abs(slope_x) + np.abs(slope_y)
    ridge = (strength > low) & is_ridge(strength, slope_x, slope_y)
    return grown(ridge & (strength > high), ridge)


def grown(seed: Mask, within: Mask) -> Mask:
    """What is connected to a seed within `within`, diagonals included: spread until nothing changes."""
    while True:
        padded = np.pad(seed, ((0, 0), (1, 1), (1, 1)))
        tall = padded[:, :-2] | padded[:, 1:-1] | padded[:, 2:]
        larger = (tall[:, :, :-2] | tall[:, :, 1:-1] | tall[:, :, 2:]) & within
        if np.array_equal(larger, seed):
            return larger
        seed = larger


def is_ridge(strength: Whole, slope_x: Whole, slope_y: Whole) -> Mask:
    """Whether a pixel is a local maximum across its edge, the gradient rounded to eight directions."""
    padded = np.pad(strength, ((0, 0), (1, 1), (1, 1)))
    height, width = strength.shape[1:]

    def neighbour(down: int, right: int) -> Whole:
        return padded[:, 1 + down : 1 + down + height, 1 + right : 1 + right + width]

    flat = np.abs(slope_x).astype(np.int64)
    steep = np.abs(slope_y).astype(np.int64) << 15
    sideways = steep < flat * TAN_22
    upright = steep > flat * TAN_22 + (flat << 16)
    falling = (slope_x < 0) != (slope_y < 0)

    # Of two equal neighbours along an axis the first wins.
    across = (strength > neighbour(0, -1)) & (strength >= neighbour(0, 1))
    along = (strength > neighbour(-1, 0)) & (strength >= neighbour(1, 0))
    diagonal = (strength > neighbour(-1, -1)) & (strength > neighbour(1, 1))
    other_diagonal = (strength > neighbour(-1, 1)) & (strength > neighbour(1, -1))
    slanted = np.where(falling, other_diagonal, diagonal)
    return np.where(sideways, across, np.where(upright, along, slanted))


def chamfer_distance(edge: Mask) -> NDArray[np.float32]:
    """Distance of every pixel of (N, H, W) to the nearest edge, along steps of 1, 1.4 and 2.1969.

    Two sweeps, one row of the whole batch at a time: a row takes the shortest way from the two rows before,
    then the shortest way along itself, which is a running minimum once the steps taken are subtracted.
    """
    distance = np.where(edge, 0, FAR).astype(np.int32)
    for view in (distance, distance[:, ::-1, ::-1]):
        sweep_(view)
    return (distance / np.float32(65536)).astype(np.float32)


def sweep_(distance: Whole) -> None:
    width = distance.shape[2]
    walked = np.arange(width, dtype=np.int32) * SIDE
    for y in range(distance.shape[1]):
        row = distance[:, y]
        for up, right, step in ABOVE:
            if up <= y:
                here = slice(max(0, -right), width - max(0, right))
                there = slice(max(0, right), width - max(0, -right))
                np.minimum(row[:, here], distance[:, y - up, there] + step, out=row[:, here])
        row -= walked
        np.minimum.accumulate(row, axis=1, out=row)
        row += walked

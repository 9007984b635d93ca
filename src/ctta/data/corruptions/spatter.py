"""Spatter: drops of water or mud on the lens, with the edge detection that OpenCV does in the published code."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctta.data.corruptions.arrays import Float32Array, UInt8Array, blend, select_parameters, truncate_to_uint8
from ctta.data.corruptions.filters import correlate, gaussian_filter
from ctta.data.corruptions.rng import PerImageRNG

Mask = NDArray[np.bool_]
Int32Array = NDArray[np.int32]

# Severities 0..5 at (32, 224) pixels; 0 is where the interpolation below 1 starts.
SPATTER = (  # mean and standard deviation of the noise, its sigma, threshold, intensity, whether it is mud
    (
        (0.62, 0.1, 0.7, 0.7, 0.0, False),
        (0.62, 0.1, 0.7, 0.7, 0.5, False),
        (0.65, 0.1, 0.8, 0.7, 0.5, False),
        (0.65, 0.3, 1.0, 0.69, 0.5, False),
        (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    ),
    (
        (0.65, 0.3, 4.0, 0.69, 0.0, False),
        (0.65, 0.3, 4.0, 0.69, 0.6, False),
        (0.65, 0.3, 3.0, 0.68, 0.6, False),
        (0.65, 0.3, 2.0, 0.68, 0.5, False),
        (0.65, 0.3, 1.0, 0.65, 1.5, True),
        (0.67, 0.4, 1.0, 0.65, 1.5, True),
    ),
)
WATER = np.array([175, 238, 238], np.float32)  # pale turquoise
MUD = np.array([63, 42, 20], np.float32)  # brown
EMBOSS = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
BOX = np.full((3, 3), 1 / 9)
MAX_DISTANCE = 20  # distances are clipped here

SOBEL = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])
TAN_22 = 13573  # tan 22.5° · 2^15
INFINITY = 1 << 28

# Chamfer steps in 1/65536 pixel: to a side, to a corner, and a knight's move away.
SIDE, CORNER, KNIGHT = (round(step * 65536) for step in (1.0, 1.4, 2.1969))
STEPS_ABOVE = (  # rows up, columns to the right, length
    (1, 0, SIDE),
    (1, -1, CORNER),
    (1, 1, CORNER),
    (1, -2, KNIGHT),
    (1, 2, KNIGHT),
    (2, -1, KNIGHT),
    (2, 1, KNIGHT),
)


def spatter(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Cover the image with blobs of liquid: smooth noise over a threshold."""
    parameters = select_parameters(images)
    low, high, weight = parameters.neighbors(SPATTER, severity)
    noise = rng.normal(images.shape[1:3])
    if low[-1] == high[-1]:
        return truncate_to_uint8(add_liquid(images, noise, blend(low, high, weight), parameters.scale))
    # The intensity of water and that of mud have different meanings: the one fades into the other.
    water, mud = (truncate_to_uint8(add_liquid(images, noise, each, parameters.scale)) for each in (low, high))
    return truncate_to_uint8(water * np.float32(1 - weight) + mud * np.float32(weight))


def add_liquid(
    images: UInt8Array, noise: Float32Array, parameters: tuple[float, ...], scale: float
) -> NDArray[np.floating[Any]]:
    """Return the images under blobs that are made of standard normal noise, (N, H, W)."""
    mean, std, sigma, threshold, intensity, is_mud = parameters
    liquid = gaussian_filter(noise * np.float32(std) + np.float32(mean), sigma * scale)
    liquid[liquid < threshold] = 0
    if is_mud:
        cover = mud_cover((liquid > threshold).astype(np.float32), intensity * scale)[..., None]
        return images * (1 - cover) + MUD * cover
    water = WATER * (np.float32(intensity) * water_highlights(truncate_to_uint8(liquid * 255))[..., None])
    return water + images


def mud_cover(blobs: Float32Array, sigma: float) -> Float32Array:
    """Return how much of each pixel mud covers: the blobs with soft edges, without their thin parts."""
    cover = gaussian_filter(blobs, sigma)
    cover[cover < 0.8] = 0
    return cover


def water_highlights(liquid: UInt8Array) -> Float32Array:
    """Return how much drops shine, at most 1: an emboss filter over the distance to their rims."""
    distance = np.minimum(chamfer_distance(canny_edges(liquid, 50, 150)), MAX_DISTANCE)
    relief = equalize_histogram(truncate_to_uint8(correlate(distance, BOX, "reflect")))
    embossed = truncate_to_uint8(correlate(relief, EMBOSS, "reflect"))
    highlights = np.rint(correlate(embossed, BOX, "reflect"))
    highlights *= liquid
    highlights /= np.maximum(highlights.max(axis=(1, 2), keepdims=True), 1)
    return highlights


def equalize_histogram(distance: UInt8Array) -> UInt8Array:
    """Replace each value by its rank within the image, from 0 for the lowest to 255."""
    levels = np.arange(MAX_DISTANCE + 1, dtype=np.uint8)
    cumulative = np.stack([(distance <= level).sum(axis=(1, 2)) for level in levels], axis=1)
    lowest = distance.min(axis=(1, 2))
    num_lowest = np.take_along_axis(cumulative, lowest[:, None].astype(np.int64), axis=1)
    num_others = distance[0].size - num_lowest
    ranks = np.rint((cumulative - num_lowest) * (255 / np.maximum(num_others, 1)))
    ranks = np.where(num_others > 0, ranks, lowest[:, None])  # a flat image stays as it is
    flat = distance.reshape(len(distance), -1).astype(np.int64)
    return np.take_along_axis(truncate_to_uint8(ranks), flat, axis=1).reshape(distance.shape)


def canny_edges(gray: UInt8Array, low: int, high: int) -> Mask:
    """Return the Canny edges of (N, H, W): thin ridges of the gradient over ``low`` connected to one over ``high``."""
    gradient_x = correlate(gray, SOBEL, "edge").astype(np.int32)
    gradient_y = correlate(gray, SOBEL.T, "edge").astype(np.int32)
    magnitude = np.abs(gradient_x) + np.abs(gradient_y)
    ridge = (magnitude > low) & is_ridge(magnitude, gradient_x, gradient_y)
    return grow_seeds(ridge & (magnitude > high), ridge)


def grow_seeds(seeds: Mask, region: Mask) -> Mask:
    """Return the pixels of ``region`` that are connected to a seed, including diagonally."""
    while True:
        padded = np.pad(seeds, ((0, 0), (1, 1), (1, 1)))
        tall = padded[:, :-2] | padded[:, 1:-1] | padded[:, 2:]
        grown = (tall[:, :, :-2] | tall[:, :, 1:-1] | tall[:, :, 2:]) & region
        if np.array_equal(grown, seeds):
            return grown
        seeds = grown


def is_ridge(magnitude: Int32Array, gradient_x: Int32Array, gradient_y: Int32Array) -> Mask:
    """Return where the magnitude is a local maximum along the gradient, which is rounded to eight directions."""
    padded = np.pad(magnitude, ((0, 0), (1, 1), (1, 1)))
    height, width = magnitude.shape[1:]

    def shift(down: int, right: int) -> Int32Array:
        return padded[:, 1 + down : 1 + down + height, 1 + right : 1 + right + width]

    dx = np.abs(gradient_x).astype(np.int64)
    dy = np.abs(gradient_y).astype(np.int64) << 15
    is_horizontal = dy < dx * TAN_22
    is_vertical = dy > dx * TAN_22 + (dx << 16)
    is_antidiagonal = (gradient_x < 0) != (gradient_y < 0)

    # Of two equal neighbors along an axis the first wins.
    horizontal = (magnitude > shift(0, -1)) & (magnitude >= shift(0, 1))
    vertical = (magnitude > shift(-1, 0)) & (magnitude >= shift(1, 0))
    diagonal = (magnitude > shift(-1, -1)) & (magnitude > shift(1, 1))
    antidiagonal = (magnitude > shift(-1, 1)) & (magnitude > shift(1, -1))
    oblique = np.where(is_antidiagonal, antidiagonal, diagonal)
    return np.where(is_horizontal, horizontal, np.where(is_vertical, vertical, oblique))


def chamfer_distance(edge: Mask) -> Float32Array:
    """Return the distance of every pixel of (N, H, W) to the nearest edge, along steps of 1, 1.4 and 2.1969.

    Two sweeps process one row of the whole batch at a time: a row takes the shortest path from the two rows before,
    then the shortest path along itself, which is a running minimum once the steps taken are subtracted.
    """
    distance = np.where(edge, 0, INFINITY).astype(np.int32)
    for view in (distance, distance[:, ::-1, ::-1]):
        sweep_down_(view)
    return (distance / np.float32(65536)).astype(np.float32)


def sweep_down_(distance: Int32Array) -> None:
    """Propagate distances downwards and to the right, in place."""
    width = distance.shape[2]
    walked = np.arange(width, dtype=np.int32) * SIDE
    for y in range(distance.shape[1]):
        row = distance[:, y]
        for up, right, step in STEPS_ABOVE:
            if up <= y:
                here = slice(max(0, -right), width - max(0, right))
                there = slice(max(0, right), width - max(0, -right))
                np.minimum(row[:, here], distance[:, y - up, there] + step, out=row[:, here])
        row -= walked
        np.minimum.accumulate(row, axis=1, out=row)
        row += walked

"""Digital: what processing, storage and transmission do to a picture."""

import io
import math

import numpy as np

from ctta.corruptions.arrays import Float32Array, UInt8Array, truncated
from ctta.corruptions.filters import smoothed
from ctta.corruptions.recipe import recipe_of
from ctta.corruptions.resample import box_shrunk, nearest, sample
from ctta.corruptions.rng import PerImageRNG
from ctta.io.images import import_pillow

# Severities 1..5 at (32, 224) pixels.
CONTRAST = ((0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05))
SATURATE = (  # factor, offset
    ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)),
    ((0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (20.0, 0.2)),
)
ELASTIC = (  # strength and smoothness of the displacement, shift of the affine's points; times ELASTIC_SIZE
    ((0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ((2.0, 0.7, 0.1), (2.0, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
)
ELASTIC_SIZE = (32, 244)  # 244 as published, for images of 224
PIXELATE = ((0.95, 0.9, 0.85, 0.75, 0.65), (0.6, 0.5, 0.4, 0.3, 0.25))  # share of the resolution kept
JPEG_QUALITY = ((80, 65, 58, 50, 40), (25, 18, 15, 10, 7))


def contrast(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Pull every value towards the mean of its channel."""
    factor = recipe_of(images).pick(CONTRAST, severity)
    sums = images.sum(axis=(1, 2), keepdims=True, dtype=np.int64)  # whole numbers: exact in any order
    mean = sums / (images.shape[1] * images.shape[2])
    return truncated(images * np.float32(factor) + (mean * (1 - factor)).astype(np.float32))


def saturate(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Change the saturation of HSV, which moves a colour's smaller channels away from its largest."""
    factor, offset = recipe_of(images).pick(SATURATE, severity)
    largest = images.max(axis=-1, keepdims=True).astype(np.float32)
    spread = largest - images.min(axis=-1, keepdims=True)
    saturation = spread / np.maximum(largest, 1)
    target = np.clip(saturation * np.float32(factor) + np.float32(offset), 0, 1)
    below = (largest - images) / np.maximum(spread, 1)  # 0 for the largest channel, 1 for the smallest
    below = np.where(spread > 0, below, np.array([0, 1, 1], np.float32))  # grey has hue 0, which is red
    return truncated(largest - largest * target * below)


def elastic_transform(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Distort by a random affine map, then by a smooth random displacement of every pixel."""
    recipe = recipe_of(images)
    size = ELASTIC_SIZE[recipe.column] * recipe.scale
    strength, smoothness, shift = (size * value for value in recipe.pick(ELASTIC, severity))
    height, width = images.shape[1:3]
    rows, columns = np.indices((height, width), np.float32)

    warped = sample(images.astype(np.float32), *affine_grid(height, width, shift, draws), repeat_edge=False)
    if not strength:
        return truncated(warped)
    fields = smoothed(draws.uniform((height, width, 2), -1, 1), smoothness, "symmetric", num_sigmas=3)
    fields *= np.float32(strength)
    return truncated(sample(warped, rows + fields[..., 0], columns + fields[..., 1], repeat_edge=True))


def affine_grid(height: int, width: int, shift: float, draws: PerImageRNG) -> tuple[Float32Array, Float32Array]:
    """Where each pixel looks when three points around the centre have moved by up to `shift` per axis."""
    reach = min(height, width) // 3
    centre_x, centre_y = width // 2, height // 2
    points = np.array([(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0)]) * reach + (centre_x, centre_y)
    moved = points + draws.uniform((3, 2), -shift, shift)
    ones = np.ones((len(moved), 3, 1))
    # (x, y, 1) of a moved point times `back` is the point it came from.
    back = np.linalg.solve(np.concatenate([moved, ones], axis=2), np.broadcast_to(points, moved.shape))
    back = back[:, None, None]
    rows, columns = np.indices((height, width), np.float64)
    source = columns[..., None] * back[..., 0, :] + rows[..., None] * back[..., 1, :] + back[..., 2, :]
    return source[..., 1].astype(np.float32), source[..., 0].astype(np.float32)


def pixelate(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Shrink by averaging boxes, and enlarge again by repeating pixels."""
    share = recipe_of(images).pick(PIXELATE, severity)
    small = images
    for axis in (2, 1):  # Pillow's order: it matters, as each pass rounds to whole values
        small = box_shrunk(small, max(1, math.floor(images.shape[axis] * share)), axis)
    return nearest(nearest(small, images.shape[1], axis=1), images.shape[2], axis=2)


def jpeg_compression(images: UInt8Array, severity: int, draws: PerImageRNG) -> UInt8Array:
    """Store as JPEG and read back; the codec takes one picture at a time."""
    quality = recipe_of(images).pick(JPEG_QUALITY, severity)
    pillow = import_pillow()
    stored = np.empty_like(images)
    for image, place in zip(images, stored, strict=True):
        file = io.BytesIO()
        pillow.fromarray(image).save(file, "JPEG", quality=quality)
        place[...] = pillow.open(file)
    return stored

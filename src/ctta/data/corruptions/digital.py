"""Digital: the artifacts of processing, storage and transmission."""

import io
import math

import numpy as np

from ctta.data.corruptions.arrays import Float32Array, PerImageRNG, UInt8Array, select_parameters, truncate_to_uint8
from ctta.data.corruptions.filters import downsample_box, gaussian_filter, sample_bilinear, upsample_nearest
from ctta.io.images import import_pillow

# Severities 0..5 at (32, 224) pixels; 0 is where the interpolation below 1 starts.
CONTRAST = ((1.0, 0.75, 0.5, 0.4, 0.3, 0.15), (1.0, 0.4, 0.3, 0.2, 0.1, 0.05))
SATURATE = (  # factor, offset
    ((1.0, 0.0), (0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)),
    ((1.0, 0.0), (0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (20.0, 0.2)),
)
ELASTIC = (  # strength and sigma of the displacement, shift of the affine map's points; all times ELASTIC_SIZE
    ((0.0, 0.0, 0.0), (0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    (
        (0.0, 999 / 244, 0.0),
        (2.0, 0.7, 0.1),
        (2.0, 0.08, 0.2),
        (0.05, 0.01, 0.02),
        (0.07, 0.01, 0.02),
        (0.12, 0.01, 0.02),
    ),
)
ELASTIC_SIZE = (32, 244)  # 244 as in the published code, for images of 224
PIXELATE = ((1.0, 0.95, 0.9, 0.85, 0.75, 0.65), (1.0, 0.6, 0.5, 0.4, 0.3, 0.25))  # fraction of the resolution kept
JPEG_QUALITY = ((100, 80, 65, 58, 50, 40), (85, 25, 18, 15, 10, 7))


def contrast(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Move every value towards the mean of its channel."""
    factor = select_parameters(images).lookup(CONTRAST, severity)
    sums = images.sum(axis=(1, 2), keepdims=True, dtype=np.int64)  # integers: exact in any order
    mean = sums / (images.shape[1] * images.shape[2])
    return truncate_to_uint8(images * np.float32(factor) + (mean * (1 - factor)).astype(np.float32))


def saturate(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Change the S of HSV, which moves the smaller channels of a color away from its largest."""
    factor, offset = select_parameters(images).lookup(SATURATE, severity)
    largest = images.max(axis=-1, keepdims=True).astype(np.float32)
    chroma = largest - images.min(axis=-1, keepdims=True)
    saturation = chroma / np.maximum(largest, 1)
    target = np.clip(saturation * np.float32(factor) + np.float32(offset), 0, 1)
    below = (largest - images) / np.maximum(chroma, 1)  # 0 for the largest channel, 1 for the smallest
    below = np.where(chroma > 0, below, np.array([0, 1, 1], np.float32))  # gray has hue 0, which is red
    return truncate_to_uint8(largest - largest * target * below)


def elastic_transform(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Distort by a random affine map, then by a smooth random displacement of every pixel."""
    parameters = select_parameters(images)
    size = ELASTIC_SIZE[parameters.column] * parameters.scale
    strength, sigma, shift = (size * value for value in parameters.lookup(ELASTIC, severity))
    height, width = images.shape[1:3]
    rows, columns = np.indices((height, width), np.float32)

    grid = affine_grid(height, width, shift, rng)
    warped = sample_bilinear(images.astype(np.float32), *grid, repeat_edge=False)
    if not strength:
        return truncate_to_uint8(warped)
    fields = gaussian_filter(rng.uniform((height, width, 2), -1, 1), sigma, "symmetric", truncate=3)
    fields *= np.float32(strength)
    rows, columns = rows + fields[..., 0], columns + fields[..., 1]
    return truncate_to_uint8(sample_bilinear(warped, rows, columns, repeat_edge=True))


def affine_grid(height: int, width: int, shift: float, rng: PerImageRNG) -> tuple[Float32Array, Float32Array]:
    """Return where each pixel samples from when three points around the center move by up to ``shift`` per axis."""
    reach = min(height, width) // 3
    center_x, center_y = width // 2, height // 2
    points = np.array([(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0)]) * reach + (center_x, center_y)
    moved = points + rng.uniform((3, 2), -shift, shift)
    ones = np.ones((len(moved), 3, 1))
    # (x, y, 1) of a moved point times `inverse` is the point it came from.
    inverse = np.linalg.solve(np.concatenate([moved, ones], axis=2), np.broadcast_to(points, moved.shape))
    inverse = inverse[:, None, None]
    rows, columns = np.indices((height, width), np.float64)
    source = columns[..., None] * inverse[..., 0, :] + rows[..., None] * inverse[..., 1, :] + inverse[..., 2, :]
    return source[..., 1].astype(np.float32), source[..., 0].astype(np.float32)


def pixelate(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Downsample by averaging boxes, and upsample again by repeating pixels."""
    fraction = select_parameters(images).lookup(PIXELATE, severity)
    small = images
    for axis in (2, 1):  # the order of Pillow: it matters, as each pass rounds to integers
        small = downsample_box(small, max(1, math.floor(images.shape[axis] * fraction)), axis)
    return upsample_nearest(upsample_nearest(small, images.shape[1], axis=1), images.shape[2], axis=2)


def jpeg_compression(images: UInt8Array, severity: float, rng: PerImageRNG) -> UInt8Array:
    """Encode as JPEG and decode again, one image at a time."""
    quality = round(select_parameters(images).lookup(JPEG_QUALITY, severity))
    pillow = import_pillow()
    decoded = np.empty_like(images)
    for image, target in zip(images, decoded, strict=True):
        file = io.BytesIO()
        pillow.fromarray(image).save(file, "JPEG", quality=quality)
        target[...] = pillow.open(file)
    return decoded

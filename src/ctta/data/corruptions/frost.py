"""Frost: crops of photographs of frosted glass, shipped with the package or the user's own."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from os import PathLike
from pathlib import Path

import numpy as np

from ctta.data.corruptions.arrays import UInt8Array, select_parameters, truncate_to_uint8
from ctta.data.corruptions.filters import rescale
from ctta.data.corruptions.rng import PerImageRNG
from ctta.errors import ConfigError
from ctta.io.images import import_pillow

# Severities 0..5 at (32, 224) pixels; 0 is where the interpolation below 1 starts.
FROST = (  # weight of the image, weight of the frost
    ((1.0, 0.0), (1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    ((1.0, 0.0), (1.0, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
)
PHOTO_SCALE = (0.2, 1.0)

# The published code has six photographs and draws from the first five; the third is a copy of the second.
SHIPPED = ("frost1.png", "frost2.png", "frost2.png", "frost4.jpg", "frost5.jpg")
SUFFIXES = {".jpeg", ".jpg", ".png", ".webp"}

PhotoPaths = str | PathLike[str] | Sequence[str | PathLike[str]]  # a folder, a file, or several files


def frost(images: UInt8Array, severity: float, rng: PerImageRNG, photos: PhotoPaths | None = None) -> UInt8Array:
    """Add a random crop of one of five photographs of frosted glass."""
    parameters = select_parameters(images)
    image_weight, frost_weight = parameters.lookup(FROST, severity)
    height, width = images.shape[1:3]
    scale = PHOTO_SCALE[parameters.column] * parameters.scale
    textures = load_textures(resolve_photos(photos), scale, height, width)

    # All textures are concatenated into one array of pixels, so that the crops of the whole batch are one gather.
    heights, widths = (np.array([texture.shape[axis] for texture in textures]) for axis in (0, 1))
    starts = np.cumsum(heights * widths) - heights * widths
    which = rng.integers((), 0, len(textures))
    position = rng.uniform((2,)).astype(np.float64)
    top = (position[:, 0] * (heights[which] - height)).astype(np.int64)
    left = (position[:, 1] * (widths[which] - width)).astype(np.int64)
    corner = starts[which] + top * widths[which] + left
    rows = corner[:, None] + np.arange(height) * widths[which, None]
    pixels = np.concatenate([texture.reshape(-1, 3) for texture in textures])
    crops = pixels[rows[:, :, None] + np.arange(width)]

    frosted = np.float32(image_weight) * images
    frosted += np.float32(frost_weight) * crops
    return truncate_to_uint8(frosted)


def resolve_photos(photos: PhotoPaths | None) -> tuple[Path, ...]:
    """Return the image files: the first five of a folder by name, exactly those listed, or those shipped."""
    if photos is None:
        photos = [Path(__file__).parent / "frost_textures" / name for name in SHIPPED]
    if not isinstance(photos, str | PathLike):
        paths = tuple(Path(photo) for photo in photos)
    elif Path(photos).is_dir():
        visible = (path for path in Path(photos).iterdir() if not path.name.startswith("."))
        paths = tuple(sorted(path for path in visible if path.suffix.lower() in SUFFIXES)[: len(SHIPPED)])
    else:
        paths = (Path(photos),)
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        raise ConfigError(
            f"frost_photos={photos!r} names no usable image (missing: {missing}); "
            f"give a folder with {', '.join(sorted(SUFFIXES))} files, or a list of such files"
        )
    return paths


def hash_photos(photos: PhotoPaths) -> str:
    """Return a short hash of the content of the user's photographs, independent of their location."""
    digest = hashlib.sha256()
    for path in resolve_photos(photos):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:8]


@lru_cache(maxsize=4)
def load_textures(paths: tuple[Path, ...], scale: float, height: int, width: int) -> tuple[UInt8Array, ...]:
    """Return every photograph at ``scale``, or larger where a crop of (height, width) would not fit otherwise."""
    textures = []
    for path in paths:
        with import_pillow().open(path) as image:
            photo = np.asarray(image.convert("RGB"))
        # One pixel more than the crop, so that the range of its position is never empty.
        factor = max(scale, (height + 1) / photo.shape[0], (width + 1) / photo.shape[1])
        textures.append(rescale(photo, factor))
    return tuple(textures)

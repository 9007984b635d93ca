"""Photographs of frosted glass: the ones that come with the package, or the user's own."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from os import PathLike
from pathlib import Path

import numpy as np

from ctta.corruptions.arrays import UInt8Array
from ctta.corruptions.resample import scaled
from ctta.io.images import import_pillow

# Of its six photographs the published code draws from the first five; the third is the second again.
SHIPPED = ("frost1.png", "frost2.png", "frost2.png", "frost4.jpg", "frost5.jpg")
SUFFIXES = {".jpeg", ".jpg", ".png", ".webp"}

PhotoPaths = str | PathLike[str] | Sequence[str | PathLike[str]]  # a folder, a file, or several files


def frost_textures(scale: float, height: int, width: int, photos: PhotoPaths | None) -> tuple[UInt8Array, ...]:
    """Every photograph at `scale`, or larger where a crop of (height, width) would not fit otherwise."""
    return scaled_photos(photo_paths(photos), scale, height, width)


def photo_paths(photos: PhotoPaths | None) -> tuple[Path, ...]:
    """The files meant: a folder's first five pictures by name, or exactly the files listed."""
    if photos is None:
        photos = [Path(__file__).parent / "frost_textures" / name for name in SHIPPED]
    if not isinstance(photos, str | PathLike):
        paths = tuple(Path(photo) for photo in photos)
    elif Path(photos).is_dir():
        visible = (path for path in Path(photos).iterdir() if not path.name.startswith("."))
        pictures = (path for path in visible if path.suffix.lower() in SUFFIXES)
        paths = tuple(sorted(pictures)[: len(SHIPPED)])
    else:
        paths = (Path(photos),)
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        raise ValueError(
            f"frost_photos={photos!r} names no usable picture (missing: {missing}); "
            f"give a folder with {', '.join(sorted(SUFFIXES))} files, or a list of such files"
        )
    return paths


def hash_photos(photos: PhotoPaths) -> str:
    """A short hash of what the user's own photographs hold, wherever they lie."""
    digest = hashlib.sha256()
    for path in photo_paths(photos):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:8]


@lru_cache(maxsize=4)
def scaled_photos(paths: tuple[Path, ...], scale: float, height: int, width: int) -> tuple[UInt8Array, ...]:
    textures = []
    for path in paths:
        with import_pillow().open(path) as picture:
            photo = np.asarray(picture.convert("RGB"))
        # One pixel more than the crop, so that there is always a place to draw.
        factor = max(scale, (height + 1) / photo.shape[0], (width + 1) / photo.shape[1])
        textures.append(scaled(photo, factor))
    return tuple(textures)

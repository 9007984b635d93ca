"""Writers of benchmark folders in the published layouts of CIFAR-10-C and ImageNet-C."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import ArrayLike

from ctta.core.validation import check_integer
from ctta.data.corruptions.arrays import UInt8Array, images_to_uint8
from ctta.data.corruptions.registry import (
    CORRUPTIONS,
    HOLD_OUT,
    OTHERS,
    VERSION,
    check_corruption,
    check_severity,
    corrupt,
)
from ctta.data.corruptions.weather import PhotoPaths
from ctta.errors import ConfigError, DataError, InputError
from ctta.io.atomic import atomic_write
from ctta.io.images import IMAGE_SUFFIXES, decoding_errors, import_pillow, is_image_file, resize_and_center_crop
from ctta.io.provenance import record_settings

SEVERITIES = (1, 2, 3, 4, 5)
SETTINGS_FILE = "made_from.json"
BATCH_SIZE = 16  # images in memory at once
JPEG_QUALITY = 85  # of the published files of ImageNet-C

ProgressCallback = Callable[[int, int], None]


def write_cifar_c(
    images: UInt8Array,
    labels: ArrayLike,
    folder: str | PathLike[str],
    *,
    names: Sequence[str] = tuple(CORRUPTIONS),
    seed: int = 0,
    frost_photos: PhotoPaths | None = None,
    progress: ProgressCallback | None = None,
) -> None:
    """Write a folder in the layout of CIFAR-10-C: one <corruption>.npy with all five severities, and labels.npy.

    A file holds (5N, H, W, 3) bytes, severity s in rows [N(s-1), Ns). Files are written atomically: a killed run that
    is started again skips those that are complete. Only one process at a time may write to a folder.

    Args:
        images: Clean uint8 images (N, H, W, 3).
        labels: N integers, written once per severity.
        folder: Folder to write to; created if needed.
        names: Names of the corruptions.
        seed: Seed of the draws; image i has index i.
        frost_photos: Photographs for "frost", as for :func:`corrupt`.
        progress: Called with (done, total) corrupted images, including those that were complete before.

    Raises:
        InputError: The images or labels are not what is expected.
        ConfigError: A name is unknown, or the folder was made with other settings.
        TypeError: An argument has the wrong type or dtype.
    """
    check_names(names)
    seed = check_integer("seed", seed)
    images_to_uint8(images)  # raises for what `corrupt` would refuse, before anything is written
    if images.dtype != np.uint8:
        raise TypeError(f"images have dtype {images.dtype}; expected uint8, as in the files of the benchmark")
    classes = np.asarray(labels)
    if classes.shape != (len(images),):
        raise InputError(f"labels has shape {classes.shape} for {len(images)} images; expected one label per image")
    if not np.issubdtype(classes.dtype, np.integer):
        raise TypeError(f"labels has dtype {classes.dtype}; expected integers, the class index of each image")
    root = Path(folder)
    settings = {
        "generator": VERSION,
        "seed": seed,
        "frost_photos": str(frost_photos),
        "images": hashlib.sha256(images.tobytes()).hexdigest(),
        "labels": hashlib.sha256(classes.astype("<i8").tobytes()).hexdigest(),
    }
    record_settings(root / SETTINGS_FILE, settings)
    with atomic_write(root / "labels.npy", unique=False) as partial, partial.open("wb") as file:
        np.save(file, np.tile(classes, len(SEVERITIES)))

    count, total = len(images), len(images) * len(SEVERITIES) * len(names)
    for position, name in enumerate(names):
        done = position * count * len(SEVERITIES)
        path = root / f"{name}.npy"
        if not path.exists():
            with atomic_write(path, unique=False) as partial:
                stored = open_memmap(partial, "w+", np.uint8, (len(SEVERITIES) * count, *images.shape[1:]))
                for severity in SEVERITIES:
                    rows = slice(count * (severity - 1), count * severity)
                    stored[rows] = corrupt(images, name, severity, seed=seed, frost_photos=frost_photos)
                    if progress:
                        progress(done + severity * count, total)
                stored.flush()
                del stored  # Windows cannot rename a file that is mapped
        elif progress:
            progress(done + len(SEVERITIES) * count, total)


def write_imagenet_c(
    source: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    names: Sequence[str] = tuple(CORRUPTIONS),
    severities: Sequence[float] = SEVERITIES,
    seed: int = 0,
    crop: bool = False,
    frost_photos: PhotoPaths | None = None,
    progress: ProgressCallback | None = None,
) -> None:
    """Write a folder in the layout of ImageNet-C: <corruption>/<severity>/<class>/<name>.JPEG.

    Every image is corrupted at its own size, or at that of ImageNet-C, and saved as JPEG of quality 85. Its draws
    depend on seed, corruption, severity and <class>/<name>, not on the other images, so images may be added later.
    Files are written atomically; those that exist are skipped.

    Args:
        source: Folder of clean images, <class>/<name>.<suffix>.
        folder: Folder to write to; created if needed.
        names: Names of the corruptions.
        severities: Severities from 1 to 5, or fractions above 0, for which the folder has a name such as ``2.25``.
        seed: Seed of the draws.
        crop: Whether to resize the shorter side of each image to 256 and crop the central 224x224, as was done for
            ImageNet-C.
        frost_photos: Photographs for "frost", as for :func:`corrupt`.
        progress: Called with (done, total) corrupted images, including those that were complete before.

    Raises:
        ConfigError: A name or severity is unknown, or the folder was made with other settings.
        DataError: ``source`` has no images, or one that cannot be read.
    """
    check_names(names)
    seed = check_integer("seed", seed)
    levels = [check_severity(severity) for severity in severities]
    if not all(levels):
        raise ConfigError("severity 0 leaves images as they are: give severities above 0")
    clean_root = Path(source)
    image_paths = sorted(path for path in clean_root.glob("*/*") if is_image_file(path, clean_root))
    stems = [f"{path.parent.name}/{path.stem}" for path in image_paths]
    if not image_paths:
        raise DataError(f"{source} holds no images; expected <class>/<name> with one of {sorted(IMAGE_SUFFIXES)}")
    stem, count = Counter(stems).most_common(1)[0]
    if count > 1:
        raise DataError(f"{source} holds {stem} with two suffixes, which would be written to one file; rename one")
    root = Path(folder)
    settings = {"generator": VERSION, "seed": seed, "frost_photos": str(frost_photos)}
    # Folders that were made before images kept their size have no such entry, and all of them were cropped.
    record_settings(root / SETTINGS_FILE, settings if crop else {**settings, "size": "original"})
    domains = [(name, severity) for name in names for severity in levels]

    for start in range(0, len(image_paths), BATCH_SIZE):
        batch = slice(start, start + BATCH_SIZE)
        targets = {
            (name, severity): [root / name / str(severity) / f"{stem}.JPEG" for stem in stems[batch]]
            for name, severity in domains
        }
        if not all(path.exists() for paths in targets.values() for path in paths):
            clean = [load_image(path, crop=crop) for path in image_paths[batch]]
            # A non-negative integer for <class>/<name>, which the draws of an image depend on.
            hashes = [hashlib.blake2b(stem.encode(), digest_size=8).digest() for stem in stems[batch]]
            index = np.array([int.from_bytes(each, "little") >> 1 for each in hashes])
            for size, ((name, severity), paths) in product({image.shape for image in clean}, targets.items()):
                rows = [row for row, image in enumerate(clean) if image.shape == size and not paths[row].exists()]
                if rows:
                    same_size = np.stack([clean[row] for row in rows])
                    results = corrupt(
                        same_size, name, severity, seed=seed, index=index[rows], frost_photos=frost_photos
                    )
                    for row, result in zip(rows, results, strict=True):
                        paths[row].parent.mkdir(parents=True, exist_ok=True)
                        with atomic_write(paths[row], unique=False) as partial:
                            import_pillow().fromarray(result).save(partial, "JPEG", quality=JPEG_QUALITY, optimize=True)
        if progress:
            done = min(start + BATCH_SIZE, len(image_paths))
            progress(done * len(domains), len(image_paths) * len(domains))


def load_image(path: Path, *, crop: bool) -> UInt8Array:
    """Read an image in RGB; with ``crop``, resize its shorter side to 256 and return its central 224x224 pixels."""
    try:
        with import_pillow().open(path) as file:
            image = file.convert("RGB")
    except decoding_errors() as error:
        raise DataError(
            f"{path} is truncated or not an image ({error}): replace or remove it and start again; "
            "files that are complete are kept"
        ) from error
    return np.asarray(resize_and_center_crop(image) if crop else image)


def check_names(names: Sequence[str]) -> None:
    """Raise unless ``names`` is a non-empty sequence of known corruptions."""
    if not names or isinstance(names, str):
        raise ConfigError(f"names is {names!r}; expected a list of {', '.join(CORRUPTIONS | HOLD_OUT | OTHERS)}")
    for name in names:
        check_corruption(name, severity=1)

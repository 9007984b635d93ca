"""Benchmark folders in the published layouts, made from clean images."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import ArrayLike

from ctta.corruptions.arrays import Int64Array, UInt8Array
from ctta.corruptions.batches import to_bytes
from ctta.corruptions.frost import PhotoPaths
from ctta.corruptions.registry import CORRUPTIONS, HOLD_OUT, VERSION, check_corruption, corrupt
from ctta.io.atomic import atomic_write
from ctta.io.images import IMAGE_SUFFIXES, decoding_errors, import_pillow, is_image_file, resize_and_center_crop
from ctta.io.settings import record_settings
from ctta.validation import check_integer

SEVERITIES = (1, 2, 3, 4, 5)
SETTINGS_FILE = "made_from.json"
BATCH = 16  # pictures held at once
STORED_QUALITY = 85  # of ImageNet-C's own JPEG files

Progress = Callable[[int, int], None]


def write_cifar_c(
    images: UInt8Array,
    labels: ArrayLike,
    folder: str | PathLike[str],
    *,
    names: Sequence[str] = tuple(CORRUPTIONS),
    seed: int = 0,
    frost_photos: PhotoPaths | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a folder shaped like CIFAR-10-C: one <corruption>.npy for all five severities, and labels.npy.

    A file holds (5N, H, W, 3) bytes, severity s in rows [N(s-1), Ns), and appears only when complete: a
    killed run, started again, skips what is there. One process at a time may write to a folder.

    Args:
        images: clean uint8 images (N, H, W, 3).
        labels: N integers, written five times over.
        folder: where to write; created if needed.
        names: which corruptions.
        seed, frost_photos: as for `corrupt`; image i has index i.
        progress: called with (done, total) corrupted images, also for those found complete.
    """
    check_names(names)
    check_integer("seed", seed)
    to_bytes(images)  # raises for what `corrupt` would not take, before anything is written
    if images.dtype != np.uint8:
        raise TypeError(f"images has dtype {images.dtype}; expected uint8, as the benchmark's files have")
    classes = np.asarray(labels)
    if classes.shape != (len(images),):
        raise ValueError(f"labels has shape {classes.shape} for {len(images)} images; expected one label per image")
    if not np.issubdtype(classes.dtype, np.integer):
        raise TypeError(f"labels has dtype {classes.dtype}; expected whole numbers, the place of each image's class")
    root = Path(folder)
    settings = {
        "generator": VERSION,
        "seed": int(seed),
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
        elif progress:
            progress(done + len(SEVERITIES) * count, total)


def write_imagenet_c(
    source: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    names: Sequence[str] = tuple(CORRUPTIONS),
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    frost_photos: PhotoPaths | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a folder shaped like ImageNet-C: <corruption>/<severity>/<class>/<name>.JPEG.

    Every picture is resized to 256 on its shorter side, cut to the middle 224x224, corrupted, and stored as
    JPEG of quality 85. Its draw depends on seed, corruption, severity and <class>/<name>, not on the other
    pictures, so pictures may be added later. Files appear only when complete; those there are skipped.

    Args:
        source: folder of clean pictures, <class>/<name>.<suffix>.
        folder: where to write; created if needed.
        names, severities: which corruptions.
        seed, frost_photos: as for `corrupt`.
        progress: called with (done, total) corrupted images, also for those found complete.
    """
    check_names(names)
    check_integer("seed", seed)
    for severity in severities:
        check_corruption(names[0], severity)
    clean_root = Path(source)
    pictures = sorted(path for path in clean_root.glob("*/*") if is_image_file(path, clean_root))
    stems = [f"{path.parent.name}/{path.stem}" for path in pictures]
    if not pictures:
        raise ValueError(f"{source} holds no pictures; expected <class>/<name> with one of {sorted(IMAGE_SUFFIXES)}")
    stem, times = Counter(stems).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{source} holds {stem} with two suffixes, which would be written to one file; rename one")
    root = Path(folder)
    settings = {"generator": VERSION, "seed": int(seed), "frost_photos": str(frost_photos)}
    record_settings(root / SETTINGS_FILE, settings)
    kinds = [(name, severity) for name in names for severity in severities]

    for start in range(0, len(pictures), BATCH):
        batch = slice(start, start + BATCH)
        targets = {kind: [root / kind[0] / str(kind[1]) / f"{stem}.JPEG" for stem in stems[batch]] for kind in kinds}
        if not all(path.exists() for paths in targets.values() for path in paths):
            clean = np.stack([centre_crop(path) for path in pictures[batch]])
            index = np.array([identity(stem) for stem in stems[batch]])
            for (name, severity), paths in targets.items():
                write_missing(paths, clean, index, name, severity, seed, frost_photos)
        if progress:
            progress(min(start + BATCH, len(pictures)) * len(kinds), len(pictures) * len(kinds))


def write_missing(
    paths: list[Path],
    clean: UInt8Array,
    index: Int64Array,
    name: str,
    severity: int,
    seed: int,
    frost_photos: PhotoPaths | None,
) -> None:
    """Corrupt and store those of a batch that are not there yet."""
    missing = [i for i, path in enumerate(paths) if not path.exists()]
    if not missing:
        return
    results = corrupt(clean[missing], name, severity, seed=seed, index=index[missing], frost_photos=frost_photos)
    for i, result in zip(missing, results, strict=True):
        paths[i].parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(paths[i], unique=False) as partial:
            import_pillow().fromarray(result).save(partial, "JPEG", quality=STORED_QUALITY, optimize=True)


def centre_crop(path: Path) -> UInt8Array:
    """The picture in RGB, its shorter side resized to 256, its middle 224x224."""
    try:
        with import_pillow().open(path) as file:
            picture = file.convert("RGB")
    except decoding_errors() as error:
        raise ValueError(
            f"{path} is truncated or no picture ({error}): replace or remove it and start again; what is written stays"
        ) from error
    return np.asarray(resize_and_center_crop(picture))


def identity(stem: str) -> int:
    """A whole number for a picture's name, to key its draws by."""
    return int.from_bytes(hashlib.blake2b(stem.encode(), digest_size=8).digest(), "little") >> 1


def check_names(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in CORRUPTIONS | HOLD_OUT]
    if unknown or not names or isinstance(names, str):
        raise ValueError(f"names is {names!r}; expected a list of {', '.join(CORRUPTIONS | HOLD_OUT)}")

"""Streams made directly from images: arrays, folders, ACDC, Cityscapes, drawn streets."""

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctta.core.validation import check_choice
from ctta.data.datasets.base import ImageDomain, PixelArray, describe_arrays
from ctta.data.datasets.image_files import (
    READ_AHEAD,
    ImageFiles,
    Order,
    Transform,
    check_order,
    describe_files,
    find_images,
    find_labeled_images,
    is_class_tree,
    sort_images,
)
from ctta.data.datasets.scenes import CONDITIONS, StreetScenes, find_scenes
from ctta.data.streams.stream import Segment, Stream
from ctta.data.streets.frames import HOLD_OUT, SPLITS
from ctta.errors import ConfigError
from ctta.io.images import Resize

#: Default conditions of each split of the drawn streets.
STREET_CONDITIONS = {"train": ("clear",), "choose": tuple(HOLD_OUT), "report": ("fog", "night", "rain", "snow")}


def in_memory(
    images: NDArray[np.uint8], labels: ArrayLike | None = None, *, name: str, batch_size: int = 200
) -> Stream:
    """Return a stream of images in memory, such as ``in_memory(*clean_cifar(folder), name="clean")``.

    Args:
        images: uint8 array of shape (N, H, W, 3).
        labels: N integers, or one per pixel (N, H, W) with 255 where a pixel is not scored, if known.
        name: Name of the domain.
        batch_size: Images per batch.

    Returns:
        A stream of one segment.

    Raises:
        InputError: An array has another shape or data type.
    """
    label_array = None if labels is None else np.asarray(labels)
    described = describe_arrays(name, images, label_array)
    if label_array is not None and label_array.ndim > 1:
        pixels = PixelArray(described, images, None, label_array)
    else:
        pixels = PixelArray(described, images, label_array)
    return Stream(f"in_memory {pixels.name}", [_whole_domain(name, pixels)], batch_size=batch_size)


def folder(
    path: str | PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    order: Order | None = None,
    seed: int = 0,
    batch_size: int = 32,
    name: str | None = None,
) -> Stream:
    """Return a stream of the images in a folder and below, without labels.

    Args:
        path: The folder.
        size: (height, width) to resize to; without it, the images of a batch must have the same size.
        order: "shuffle", "name" (by path) or "time" (of the last modification). By default "name", and "shuffle" for
            a folder per class, whose images would come class by class; folders named by date are a camera's.
        seed: Seed of the shuffle, which depends on nothing else but the names of the images.
        batch_size: Images per batch.
        name: Name of the domain; that of the folder by default.

    Returns:
        A stream of one segment.

    Raises:
        ConfigError: There is no such order.
        DataError: The folder contains no images.
    """
    root = Path(path)
    check_order(order)
    paths = find_images(root)
    names = [found.relative_to(root).as_posix() for found in paths]
    if (order := order or ("shuffle" if is_class_tree(names) else "name")) != "name":
        paths = [paths[row] for row in sort_images(root, names, order, seed=seed)]
    images = ImageFiles(describe_files(root, paths, str(size)), tuple(paths), None, Resize(size) if size else None)
    segment = _whole_domain(name or _get_folder_name(root), images)
    return Stream(f"folder {images.name}", [segment], batch_size=batch_size, read_ahead=READ_AHEAD)


def image_folder(
    path: str | PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    transform: Transform | None = None,
    transform_name: str = "",
    num_per_class: int | None = None,
    images: Sequence[str] | None = None,
    order: Order | None = None,
    seed: int = 0,
    batch_size: int = 32,
    name: str | None = None,
) -> Stream:
    """Return a stream of a tree ``<class>/<image>``, shuffled by default.

    In the order of their names, the images would come class by class. Batch statistics of a single class are useless,
    and methods that learn from such batches unlearn the other classes.

    A class is labeled by its place among the folders that exist, sorted by name. A missing class therefore shifts the
    labels of those after it; an empty folder in its place prevents that, if ``images`` lists the images to take.

    Args:
        path: Root of the tree.
        size: (height, width) to resize to; without it, the images of a batch must have the same size.
        transform: Instead of a size, a function from PIL image to PIL image.
        transform_name: What the transform does, which enters the hash of the stream.
        num_per_class: Number of images to take from each class, the first ones by name; None for all.
        images: Instead, the images to take, as ``<class>/<image>``.
        order: "shuffle", "name" (by path, so class by class) or "time" (of the last modification). By default
            "shuffle", and for a list of ``images`` the order of the list.
        seed: Seed of the shuffle, which depends on nothing else but the names of the images.
        batch_size: Images per batch.
        name: Name of the domain; that of the folder by default.

    Returns:
        A stream of one segment.

    Raises:
        ConfigError: There is no such order, two arguments exclude each other, or a transform has no name.
        DataError: There are no classes, or an image is missing.
    """
    root = Path(path)
    check_order(order)
    if (transform is None) == bool(transform_name):
        raise ConfigError("give transform and transform_name together, such as transform_name='crop 224', for the hash")
    if size and transform:
        raise ConfigError("give size or transform, not both: the transform can resize too")
    files = find_labeled_images(
        root,
        Resize(size) if size else transform,
        str(size or transform_name),
        num_per_class=num_per_class,
        images=images,
        hint="check the path, or use ctta.data.streams.folder for images without classes",
    )
    if order is None and images is not None:
        rows = np.arange(len(files))
    else:
        entries = [file.relative_to(root).as_posix() for file in files.paths]
        rows = np.array(sort_images(root, entries, order or "shuffle", seed=seed), np.int64)
    segment = Segment(name or _get_folder_name(root), files, rows)
    return Stream(f"image_folder {files.name}", [segment], batch_size=batch_size, read_ahead=READ_AHEAD)


def acdc(
    folder: str | PathLike[str],
    *,
    conditions: Sequence[str] = CONDITIONS,
    split: str = "train",
    size: tuple[int, int] | None = (540, 960),
    batch_size: int = 1,
) -> Stream:
    """Return ACDC's conditions in the paper's order: fog, night, rain, snow. Repeat it with :func:`rounds`.

    Args:
        folder: The folder that contains ``rgb_anon`` and ``gt``.
        conditions: The conditions, in order.
        split: "train" (400 images per condition, as in the paper) or "val".
        size: (height, width) to resize images to, or None; label maps keep their size.
        batch_size: Scenes per batch.

    Returns:
        A stream with one segment per condition.

    Raises:
        ConfigError: ``conditions`` is a string.
        DataError: A file is missing or damaged.
    """
    if isinstance(conditions, str):
        raise ConfigError(f"conditions must be a sequence of {', '.join(CONDITIONS)}, got {conditions!r}: give a tuple")
    root = Path(folder)
    segments = []
    for condition in conditions:
        images, maps = root / "rgb_anon" / condition / split, root / "gt" / condition / split
        segments.append(_whole_domain(condition, find_scenes(images, "_rgb_anon.png", maps, "_gt_", size)))
    name = f"acdc {split} {'+'.join(conditions)} size={size}"
    return Stream(name, segments, batch_size=batch_size, read_ahead=READ_AHEAD)


def cityscapes(
    folder: str | PathLike[str], *, split: str = "val", size: tuple[int, int] | None = None, batch_size: int = 1
) -> Stream:
    """Return a stream of Cityscapes, the source domain of ACDC.

    Args:
        folder: The folder that contains ``leftImg8bit`` and ``gtFine``.
        split: "train" or "val".
        size: (height, width) to resize images to, or None; label maps keep their size.
        batch_size: Scenes per batch.

    Returns:
        A stream of one segment, "clear".

    Raises:
        DataError: A file is missing or damaged.
    """
    root = Path(folder)
    images, maps = root / "leftImg8bit" / split, root / "gtFine" / split
    segment = _whole_domain("clear", find_scenes(images, "_leftImg8bit.png", maps, "_gtFine_", size))
    return Stream(f"cityscapes {split} size={size}", [segment], batch_size=batch_size, read_ahead=READ_AHEAD)


def streets(
    *,
    split: str = "report",
    conditions: Sequence[str] | None = None,
    num_scenes: int = 100,
    seed: int = 0,
    size: tuple[int, int] = (128, 256),
    batch_size: int = 4,
) -> Stream:
    """Return a stream of drawn street scenes in fog, at night, in rain and in snow. Repeat it with :func:`rounds`.

    Nothing is read from disk. Each split has its own conditions, so that nothing is trained or chosen on what is
    reported: "train" is clear, "choose" has dusk and dust, and "report" the paper's four.

    Args:
        split: "train", "choose" or "report"; each has other scenes.
        conditions: Other conditions of this split, in order.
        num_scenes: Number of scenes per condition; each condition shows the same ones.
        seed: Seed of the street.
        size: (height, width) of images and label maps.
        batch_size: Scenes per batch.

    Returns:
        A stream with one segment per condition.

    Raises:
        ConfigError: A setting has no such value.

    >>> from ctta.data.streams import rounds
    >>> stream = rounds(streets(num_scenes=8), 10)
    >>> stream.domains[:5], len(stream)
    (['fog', 'night', 'rain', 'snow', 'fog'], 80)
    """
    if isinstance(conditions, str):
        raise ConfigError(f"conditions must be a sequence, got {conditions!r}: give ({conditions!r},)")
    check_choice("split", split, tuple(SPLITS))
    chosen = STREET_CONDITIONS[split] if conditions is None else tuple(conditions)
    domains = {name: StreetScenes(name, split, num_scenes, seed, size) for name in dict.fromkeys(chosen)}
    segments = [_whole_domain(name, domains[name]) for name in chosen]
    name = f"streets {split} {'+'.join(chosen)} scenes={num_scenes} seed={seed} size={size} batch={batch_size}"
    # One batch ahead: rendering needs one core, and the model does not use all of them all the time.
    return Stream(name, segments, batch_size=batch_size, read_ahead=1)


def _whole_domain(name: str, images: ImageDomain) -> Segment:
    """Return a segment of all images of a domain, in order."""
    return Segment(name, images, np.arange(len(images)))


def _get_folder_name(root: Path) -> str:
    """Return the name of a folder, also if it was given as '.'; a link is not resolved, as it has its own name."""
    return os.path.basename(os.path.abspath(root)) or str(root)

"""Streams made directly from a data set: arrays, folders of images, ACDC, Cityscapes, drawn streets."""

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctta.datasets.arrays import PixelArray, describe_arrays
from ctta.datasets.image_files import (
    READ_AHEAD,
    ImageFiles,
    Resize,
    Transform,
    describe_files,
    find_images,
    find_labeled_images,
)
from ctta.datasets.segmentation import CONDITIONS, find_scenes
from ctta.datasets.streets import StreetScenes
from ctta.streams.stream import Segment, Stream
from ctta.synthetic.frames import HOLD_OUT, SPLITS
from ctta.validation import check_choice

#: What a stream of each part goes through unless told otherwise.
WEATHER = {"train": ("clear",), "choose": tuple(HOLD_OUT), "report": ("fog", "night", "rain", "snow")}


def in_memory(
    images: NDArray[np.uint8], labels: ArrayLike | None = None, *, name: str, batch_size: int = 200
) -> Stream:
    """A stream of images in memory as they are: ``in_memory(*clean_cifar(folder), name="clean")``.

    Args:
        images: uint8 (N, H, W, 3).
        labels: N integers, where known.
        name: of the domain.
        batch_size: images per batch.
    """
    label_array = None if labels is None else np.asarray(labels)
    pixels = PixelArray(describe_arrays(name, images, label_array), images, label_array)
    segment = Segment(name, pixels, np.arange(len(images)))
    return Stream(f"in_memory {pixels.name}", [segment], batch_size=batch_size)


def folder(
    path: str | PathLike[str], *, size: tuple[int, int] | None = None, batch_size: int = 32, name: str | None = None
) -> Stream:
    """The pictures of a folder and below, in the order of their paths, without labels: a camera's own dump.

    Args:
        path: the folder.
        size: (height, width) to resize to; without, pictures of one batch must be of one size.
        batch_size: pictures per batch.
        name: of the domain; by default the folder's.
    """
    root = Path(path)
    paths = find_images(root)
    pictures = ImageFiles(describe_files(root, paths, str(size)), tuple(paths), None, Resize(size) if size else None)
    segment = Segment(name or folder_name(root), pictures, np.arange(len(paths)))
    return Stream(f"folder {pictures.name}", [segment], batch_size=batch_size, read_ahead=READ_AHEAD)


def image_folder(
    path: str | PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    transform: Transform | None = None,
    transform_name: str = "",
    per_class: int | None = None,
    images: Sequence[str] | None = None,
    batch_size: int = 32,
    name: str | None = None,
) -> Stream:
    """A tree ``<class>/<picture>``; the label of a class is its place among the folders that are there, sorted by name.

    So a missing class shifts the labels of those after it; an empty folder with its name keeps its place, if ``images``
    says which pictures to take.

    Args:
        path: the root of the tree.
        size: (height, width) to resize to; without, pictures of one batch must be of one size.
        transform: instead of a size, what to do with each picture, PIL image to PIL image.
        transform_name: what the transform does, in a word, so that the stream's hash can tell.
        per_class: only the first so many of each class, by name.
        images: instead, only these ``<class>/<picture>``, in this order.
        batch_size: pictures per batch.
        name: of the domain; by default the folder's.
    """
    root = Path(path)
    if (transform is None) == bool(transform_name):
        raise ValueError("give a transform and its name together, such as transform_name='crop 224', for the hash")
    if size and transform:
        raise ValueError("give size or transform, not both: the transform can resize too")
    pictures = find_labeled_images(
        root, Resize(size) if size else transform, str(size or transform_name), per_class=per_class, images=images
    )
    segment = Segment(name or folder_name(root), pictures, np.arange(len(pictures)))
    return Stream(f"image_folder {pictures.name}", [segment], batch_size=batch_size, read_ahead=READ_AHEAD)


def folder_name(root: Path) -> str:
    """What a folder is called, also where it was given as '.'; not resolved, as a link has a name of its own."""
    return os.path.basename(os.path.abspath(root)) or str(root)


def acdc(
    folder: str | PathLike[str],
    *,
    conditions: tuple[str, ...] = CONDITIONS,
    split: str = "train",
    size: tuple[int, int] | None = (540, 960),
    batch_size: int = 1,
) -> Stream:
    """ACDC's weather in the paper's order, fog, night, rain, snow: one round; see :func:`rounds` for ten.

    Args:
        folder: with ``rgb_anon`` and ``gt`` in it.
        conditions: which, in this order.
        split: ``train`` (400 pictures of each, as the paper uses) or ``val``.
        size: (height, width) of the pictures; the label maps keep theirs.
        batch_size: scenes per batch.
    """
    if isinstance(conditions, str):
        raise ValueError(f"conditions must be several of {', '.join(CONDITIONS)}, got {conditions!r}: give a tuple")
    root = Path(folder)
    segments = []
    for condition in conditions:
        scenes = find_scenes(
            root / "rgb_anon" / condition / split,
            "_rgb_anon.png",
            root / "gt" / condition / split,
            "_gt_",
            size,
        )
        segments.append(Segment(condition, scenes, np.arange(len(scenes))))
    return Stream(
        f"acdc {split} {'+'.join(conditions)} size={size}", segments, batch_size=batch_size, read_ahead=READ_AHEAD
    )


def cityscapes(
    folder: str | PathLike[str],
    *,
    split: str = "val",
    size: tuple[int, int] | None = None,
    batch_size: int = 1,
) -> Stream:
    """Cityscapes, the source domain, as one segment; the folder holds ``leftImg8bit`` and ``gtFine``.

    Other args as for :func:`acdc`.
    """
    root = Path(folder)
    scenes = find_scenes(root / "leftImg8bit" / split, "_leftImg8bit.png", root / "gtFine" / split, "_gtFine_", size)
    segment = Segment("clear", scenes, np.arange(len(scenes)))
    return Stream(f"cityscapes {split} size={size}", [segment], batch_size=batch_size, read_ahead=READ_AHEAD)


def streets(
    *,
    split: str = "report",
    conditions: Sequence[str] | None = None,
    scenes: int = 100,
    seed: int = 0,
    size: tuple[int, int] = (128, 256),
    batch_size: int = 4,
) -> Stream:
    """The embedded street in fog, at night, in rain and in snow: one round; see :func:`rounds` for ten.

    Nothing is read from disk. The weather of each part is its own, so that no setting is learnt or chosen on what is
    reported: "train" is clear, "choose" has dusk and dust, "report" the paper's four.

    >>> from ctta.streams import rounds
    >>> stream = rounds(streets(scenes=8), 10)
    >>> stream.domains[:5], len(stream)
    (['fog', 'night', 'rain', 'snow', 'fog'], 80)

    Args:
        split: "train", "choose" or "report"; each has scenes of its own.
        conditions: other weather that this split may be seen in, in this order.
        scenes: how many of each condition; the same ones in each.
        seed: another seed, other streets.
        size: (height, width) of pictures and label maps.
        batch_size: scenes per batch.
    """
    if isinstance(conditions, str):
        raise ValueError(f"conditions must be a sequence of weather, got {conditions!r}: give ({conditions!r},)")
    check_choice("split", split, tuple(SPLITS))
    chosen = WEATHER[split] if conditions is None else tuple(conditions)
    domains = {name: StreetScenes(name, split, scenes, seed, size) for name in dict.fromkeys(chosen)}
    segments = [Segment(name, domains[name], np.arange(scenes)) for name in chosen]
    name = f"streets {split} {'+'.join(chosen)} scenes={scenes} seed={seed} size={size} batch={batch_size}"
    # One batch ahead: drawing needs one core, and the model leaves gaps.
    return Stream(name, segments, batch_size=batch_size, read_ahead=1)

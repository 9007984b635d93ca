"""Image files: found in folders, put in an order, and decoded when read, in several threads, with or without labels."""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.core.validation import check_choice, check_integer
from ctta.data.datasets.base import Rows
from ctta.errors import ConfigError, DataError, InputError
from ctta.io.images import (
    IMAGE_SUFFIXES,
    decoding_errors,
    import_pillow,
    is_hidden_folder,
    is_image_file,
    to_unit_floats,
    to_upright_rgb,
)

Order = Literal["shuffle", "name", "time"]
ORDERS: tuple[Order, ...] = get_args(Order)

#: Folders that cameras and phones name by date: 2026, 2026-11, 20261117, 2026_11_17_08.
_DATE = re.compile(r"(19|20)\d\d([-_.]?\d\d){0,5}")


def check_order(order: str | None) -> None:
    """Raise unless an order is one of :data:`ORDERS`, or None for the default."""
    if order is not None:
        check_choice("order", order, ORDERS)


def is_class_tree(names: Sequence[str]) -> bool:
    """Return whether images lie in a folder per class, so that their names put one class after the other.

    That is: no image is at the root, there are at least two folders of images, and not all of them are below folders
    that are named by date, as a camera names them.

    >>> is_class_tree(["cat/1.png", "dog/1.png"]), is_class_tree(["1.png", "2.png", "later/3.png"])
    (True, False)
    >>> is_class_tree(["2026-11-16/0815.png", "2026-11-17/0815.png"])
    False
    """
    folders = {name.rpartition("/")[0] for name in names}
    is_dated = all(_DATE.fullmatch(folder.partition("/")[0]) for folder in folders)
    return len(folders) > 1 and "" not in folders and not is_dated


def sort_images(root: Path, names: Sequence[str], order: Order, *, seed: int = 0) -> list[int]:
    """Return the positions of images, whose names are relative to the root, in an order.

    A shuffled image is sorted by a hash of its own name, so that its place relative to the others does not depend on
    which others there are: if images are added or removed, the rest keep their order. Images of the same time are in
    the order of their names.
    """
    check_order(order)
    if order == "shuffle":
        check_integer("seed", seed)
        paths = [f"{seed}/".encode() + os.fsencode(name) for name in names]
        keys = [(hashlib.blake2b(path, digest_size=8).digest(), path) for path in paths]
        return sorted(range(len(names)), key=keys.__getitem__)
    by_path = [Path(name) for name in names]
    if order == "name":
        return sorted(range(len(names)), key=by_path.__getitem__)
    times = [_modification_time(root / name) for name in names]
    return sorted(range(len(names)), key=lambda row: (times[row], by_path[row]))


def _modification_time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # deleted meanwhile; whoever reads it reports that
        return 0


NUM_DECODERS = 4  # threads; Pillow releases the interpreter lock while it decodes
READ_AHEAD = 2  # batches that a stream of image files decodes in the background
SIZE_HINT = "give size=(height, width), or use batch_size=1"

#: Takes a PIL image and returns one, or a uint8 array of shape (H, W, 3).
Transform = Callable[[Any], Any]


@dataclass(frozen=True)
class ImageFiles:
    """The images of one domain in files, which have one size after the transform.

    Attributes:
        name: Identifies the images, see :func:`describe_files`.
        paths: The files.
        labels: One integer per file, or None.
        transform: Applied to each PIL image.
        class_names: Names of the classes, in the order of the labels; empty without labels.
    """

    name: str
    paths: tuple[Path, ...]
    labels: NDArray[np.integer[Any]] | None
    transform: Transform | None = None
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Decode some of the images.

        Args:
            rows: Indices of the images.

        Returns:
            Images of shape (N, 3, H, W) as floats in [0, 1], and their labels.

        Raises:
            DataError: A file is missing or damaged, or the sizes differ.
        """
        images = read_images([self.paths[row] for row in rows], self.transform)
        labels = None if self.labels is None else torch.from_numpy(self.labels[rows].astype(np.int64))
        return images, labels


def read_images(paths: Sequence[Path], transform: Transform | None) -> Tensor:
    """Decode files into one batch of floats in [0, 1]; raise a DataError that names files of different sizes."""
    arrays = decode_files(paths, transform, hint=SIZE_HINT)
    return to_unit_floats(np.stack(arrays))


def decode_files(paths: Sequence[Path], transform: Transform | None, *, hint: str) -> list[NDArray[np.uint8]]:
    """Decode files in several threads into uint8 arrays (H, W, 3) of one shape; ``hint`` is what to do about others."""
    with ThreadPoolExecutor(NUM_DECODERS) as pool:
        arrays = list(pool.map(lambda path: decode_file(path, transform), paths))
    check_same_size(paths, arrays, hint=hint)
    return arrays


def check_same_size(paths: Sequence[Path], arrays: Sequence[NDArray[np.uint8]], *, hint: str = SIZE_HINT) -> None:
    """Raise a DataError that names two decoded files of different sizes, if there are any."""
    for path, array in zip(paths, arrays, strict=True):
        if array.shape != arrays[0].shape:
            raise DataError(
                f"images must have the same size, but {path} has {array.shape[:2]} pixels and {paths[0]} "
                f"{arrays[0].shape[:2]}: {hint}"
            )


def decode_file(path: Path, transform: Transform | None) -> NDArray[np.uint8]:
    """Decode one file into a uint8 array of shape (H, W, 3); raise a DataError if it is missing or damaged."""
    try:
        with import_pillow().open(path) as file:
            image = to_upright_rgb(file, str(path))
    except InputError as error:  # the file is intact, but its format is not supported
        raise DataError(str(error)) from error
    except decoding_errors() as error:
        raise DataError(f"{path} is missing, truncated or not an image ({error}): replace or remove it") from error
    if transform is None:
        return np.asarray(image)
    pixels: NDArray[Any] = np.asarray(transform(image))
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise InputError(
            f"the transform must return an RGB PIL image or uint8 (H, W, 3), but returned {pixels.dtype} "
            f"{pixels.shape} for {path}: leave scaling to [0, 1] to the stream, and normalization to the model"
        )
    return pixels


def check_folder(folder: Path, hint: str) -> None:
    """Raise a DataError unless a folder exists; ``hint`` says what to do."""
    if not folder.is_dir():
        problem = "is a file; expected a folder of images" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {problem}: {hint}")


def find_images(folder: Path, hint: str = "check the path, or extract the archive") -> list[Path]:
    """Return every image in a folder and below, sorted by path, without hidden files; raise if there is none."""
    check_folder(folder, hint)
    found = sorted(path for path in folder.rglob("*") if is_image_file(path, folder) and path.is_file())
    if not found:
        raise DataError(f"{folder} contains no images ({', '.join(sorted(IMAGE_SUFFIXES))}): {hint}")
    return found


def find_labeled_images(
    root: Path,
    transform: Transform | None,
    transform_name: str,
    *,
    num_per_class: int | None,
    images: Sequence[str] | None,
    order: Order = "name",
    seed: int = 0,
    hint: str = "extract the archive again",
) -> ImageFiles:
    """Return the images of a tree ``<class>/<image>``; a class is labeled by its place among the sorted class folders.

    Args:
        root: Root of the tree.
        transform: Applied to each PIL image.
        transform_name: What the transform does; enters the name of the images.
        num_per_class: Number of images to take from each class, the first ones by name.
        images: Instead, the images to take, as ``<class>/<image>``, in this order.
        order: Order of the images, unless ``images`` lists them.
        seed: Seed of the shuffle.
        hint: What to do if something is missing.
    """
    check_selection(num_per_class, images)
    check_folder(root, hint)
    classes = list_folders(root)
    if not classes:
        raise DataError(f"{root} contains no class folders; expected <class>/<image>: {hint}")
    if images is not None:
        chosen = [root / entry for entry in images]
        if missing := [file for file in chosen if not file.is_file()]:
            more = f", and {len(missing) - 1} more of the list of images" if len(missing) > 1 else ""
            raise DataError(f"{missing[0]} is missing{more}: correct the list, or {hint}")
    else:
        chosen = [file for folder in classes for file in find_images(root / folder, hint)[:num_per_class]]
        if order != "name":
            names = [file.relative_to(root).as_posix() for file in chosen]
            chosen = [chosen[row] for row in sort_images(root, names, order, seed=seed)]
    label_of = {folder: label for label, folder in enumerate(classes)}
    labels = np.array([label_of[file.relative_to(root).parts[0]] for file in chosen])
    name = describe_files(root, chosen, f"{transform_name} {classes}")
    return ImageFiles(name, tuple(chosen), labels, transform, tuple(classes))


def check_selection(num_per_class: int | None, images: Sequence[str] | None) -> None:
    """Raise unless at most one of ``num_per_class`` and ``images`` is given, with valid values."""
    if num_per_class is not None and images is not None:
        raise ConfigError(
            f"give num_per_class or images, not both: num_per_class={num_per_class} does not apply to a list"
        )
    if num_per_class is not None:
        check_integer("num_per_class (None for all images)", num_per_class, 1)
    if images is not None:
        if isinstance(images, str) or not images:
            raise InputError(f"images must be a list of '<class>/<image>' with at least one entry, got {images!r}")
        for entry in images:
            parts = PurePosixPath(entry).parts
            if len(parts) < 2 or ".." in parts or entry.startswith(("/", ".", "__")):
                raise InputError(f"images must be of the form '<class>/<image>' below the root, got {entry!r}")


def list_folders(root: Path) -> list[str]:
    """Return the sorted names of the folders in a folder, without hidden ones and those of an interrupted unpacking."""
    children = [child.name for child in root.iterdir() if child.is_dir()] if root.is_dir() else []
    return sorted(name for name in children if not is_hidden_folder(name))


def describe_files(folder: Path, paths: Sequence[Path], extra: str = "") -> str:
    """Return a name that identifies files by relative path and size, and by the bytes of the first.

    It does not depend on where the folder is, and enters the hash of a stream.
    """
    listing = "\n".join(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}" for path in paths)
    digest = hashlib.sha256(f"{extra}\n{listing}\n".encode())
    digest.update(paths[0].read_bytes())
    return f"{len(paths)} pictures[{digest.hexdigest()[:8]}]"

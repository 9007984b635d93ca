"""Clean images as people have them: CIFAR's batches, an array in a file, a tree of pictures."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ctta.datasets.cifar import clean_cifar
from ctta.datasets.image_files import DECODERS, Resize, decode_file, find_images
from ctta.errors import DataError

ARRAY_FILES = {".npy", ".npz"}
IMAGE_KEYS, LABEL_KEYS = ("images", "x"), ("labels", "y")
#: Folders that extracting the archives of CIFAR-10 and CIFAR-100 gives.
CIFAR_FOLDERS = ("cifar-10-batches-py", "cifar-100-python")


@dataclass(frozen=True)
class CleanImages:
    """Images (N, H, W, 3) as bytes; the label of each, or None; and the number of class folders they came from."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    num_folders: int | None = None


def read_clean_images(
    path: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> CleanImages:
    """Images and, where there are any, labels, from whatever the path is.

    A folder with CIFAR's python batches gives the test images; an ``.npz`` its ``images`` (or ``x``) and ``labels``
    (or ``y``); an ``.npy`` its images, with the labels of a ``labels.npy`` beside it. Of a tree ``<class>/<picture>``
    the label of a class is its place among the sorted names; pictures that lie flat have none.

    Args:
        path: a folder or a file.
        size: (height, width) to resize pictures to; arrays are taken as they are.
        limit: only so many, drawn at random, so that all classes are there.
        seed: of that draw, which also is the order; without a limit the order is that of the names.
    """
    root = _existing(path)
    if root.is_file():
        return _chosen(_from_file(root), limit, seed)
    if folder := cifar_folder(root):
        return _chosen(CleanImages(*clean_cifar(folder)), limit, seed)
    return _from_pictures(root, size, limit, seed)


def cifar_folder(path: Path) -> Path | None:
    """Where in a folder CIFAR's python batches lie, if they do."""
    for folder in (path, *(path / name for name in CIFAR_FOLDERS)):
        if (folder / "test_batch").is_file() or ((folder / "test").is_file() and (folder / "meta").is_file()):
            return folder
    return None


def corruption_kind(path: str | os.PathLike[str]) -> Literal["cifar-c", "imagenet-c"]:
    """The benchmark's layout that corrupted versions of these images go into: arrays into arrays, files into files."""
    root = _existing(path)
    return "cifar-c" if root.is_file() or cifar_folder(root) else "imagenet-c"


def _existing(path: str | os.PathLike[str]) -> Path:
    root = Path(path).expanduser()
    if not root.is_dir() and not (root.is_file() and root.suffix in ARRAY_FILES):
        problem = "is no file of arrays" if root.exists() else "does not exist"
        raise DataError(f"{root} {problem}; expected a folder of pictures or of CIFAR's batches, or an .npz or .npy")
    return root


def _from_file(path: Path) -> CleanImages:
    try:
        with path.open("rb") as file:  # not by name: numpy would leave a damaged one open
            content = np.load(file)  # which by itself refuses pickles
            beside = path.with_name("labels.npy")
            if path.suffix == ".npz":
                images, labels = (_first_of(content, keys) for keys in (IMAGE_KEYS, LABEL_KEYS))
            else:
                images, labels = content, np.load(beside) if beside.is_file() and beside != path else None
    except (OSError, ValueError, EOFError, KeyError, BadZipFile) as error:
        raise DataError(f"{path} is truncated or no file of plain arrays ({error})") from error
    if images is None:
        raise DataError(f"{path} holds {', '.join(content) or 'nothing'}; expected 'images' and, if known, 'labels'")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise DataError(f"{path} holds {images.dtype} {images.shape}; expected images as uint8 (N, height, width, 3)")
    if labels is not None and (labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer)):
        raise DataError(
            f"the labels of {path} are {labels.dtype} {labels.shape} for {len(images)} images; "
            "expected a whole number for each"
        )
    return CleanImages(images, None if labels is None else labels.astype(np.int64))


def _first_of(content: Any, keys: Sequence[str]) -> NDArray[Any] | None:
    found: NDArray[Any] | None = next((content[key] for key in keys if key in content), None)
    return found


def _from_pictures(root: Path, size: tuple[int, int] | None, limit: int | None, seed: int) -> CleanImages:
    paths = find_images(root)
    folders = [path.relative_to(root).parts[0] for path in paths]
    is_tree = all(len(path.relative_to(root).parts) > 1 for path in paths)
    classes = sorted(set(folders)) if is_tree else []
    rows = _rows(len(paths), limit, seed)
    with ThreadPoolExecutor(DECODERS) as pool:
        pixels = list(pool.map(lambda row: decode_file(paths[row], Resize(size) if size else None), rows.tolist()))
    for row, array in zip(rows.tolist(), pixels, strict=True):
        if array.shape != pixels[0].shape:
            raise DataError(
                f"{paths[row]} has {array.shape[:2]} pixels and {paths[rows[0]]} {pixels[0].shape[:2]}: "
                "give a size (height, width) to bring them to"
            )
    places = {name: place for place, name in enumerate(classes)}
    labels = np.array([places[folders[row]] for row in rows], np.int64) if is_tree else None
    return CleanImages(np.stack(pixels), labels, len(classes) if is_tree else None)


def _chosen(found: CleanImages, limit: int | None, seed: int) -> CleanImages:
    if len(found.images) == 0:
        raise DataError("there are no images")
    if limit is None:
        return found
    rows = _rows(len(found.images), limit, seed)
    return CleanImages(found.images[rows], None if found.labels is None else found.labels[rows])


def _rows(count: int, limit: int | None, seed: int) -> NDArray[np.int64]:
    if limit is None:
        return np.arange(count)
    return np.random.default_rng(seed).permutation(count)[:limit]

"""Clean images in the formats that people have: batches of CIFAR, arrays in a file, folders of images."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ctta.data.datasets.benchmarks import clean_cifar
from ctta.data.datasets.image_files import decode_files, find_images, sort_images
from ctta.errors import DataError
from ctta.io.images import Resize

ARRAY_SUFFIXES = {".npy", ".npz"}
IMAGE_KEYS, LABEL_KEYS = ("images", "x"), ("labels", "y")
#: Folders in the archives of CIFAR-10 and CIFAR-100.
CIFAR_FOLDERS = ("cifar-10-batches-py", "cifar-100-python")


@dataclass(frozen=True)
class CleanImages:
    """Images in memory, with labels where they are known.

    Attributes:
        images: uint8 array of shape (N, H, W, 3).
        labels: N integers, or None.
        num_folders: Number of class folders that the images come from, or None.
    """

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
    """Read images and, where there are any, labels.

    Of a folder with CIFAR's Python batches, these are the test images; of an ``.npz``, its ``images`` (or ``x``) and
    ``labels`` (or ``y``); of an ``.npy``, its images with the labels of a ``labels.npy`` next to it. In a tree
    ``<class>/<image>`` a class is labeled by its place among the sorted names; images directly in the folder have no
    labels.

    Args:
        path: A folder or a file.
        size: (height, width) to resize image files to; arrays are not resized.
        limit: Largest number of images, drawn at random, so that every class is likely to be among them.
        seed: Seed of that draw, which also decides the order. Without a limit, the images of a tree are shuffled by
            their names, since they would come class by class; others are in the order of the file or of their names.

    Returns:
        The images.

    Raises:
        DataError: The path does not exist, or a file is damaged or in another format.
    """
    root = _check_path(path)
    if root.is_file():
        return _select(_read_arrays(root), limit, seed)
    if folder := _find_cifar_folder(root):
        return _select(CleanImages(*clean_cifar(folder)), limit, seed)
    return _read_image_files(root, size, limit, seed)


def infer_benchmark_layout(path: str | os.PathLike[str]) -> Literal["cifar-c", "imagenet-c"]:
    """Return the layout for corrupted versions of these images: arrays for arrays, files for files.

    Args:
        path: A folder or a file, as for :func:`read_clean_images`.

    Returns:
        The name of the benchmark that has this layout.
    """
    root = _check_path(path)
    return "cifar-c" if root.is_file() or _find_cifar_folder(root) else "imagenet-c"


def _find_cifar_folder(path: Path) -> Path | None:
    """Return the folder with CIFAR's Python batches, which may be one below, or None."""
    for folder in (path, *(path / name for name in CIFAR_FOLDERS)):
        if (folder / "test_batch").is_file() or ((folder / "test").is_file() and (folder / "meta").is_file()):
            return folder
    return None


def _check_path(path: str | os.PathLike[str]) -> Path:
    root = Path(path).expanduser()
    if not root.is_dir() and not (root.is_file() and root.suffix in ARRAY_SUFFIXES):
        problem = "is not a file of arrays" if root.exists() else "does not exist"
        raise DataError(f"{root} {problem}; expected a folder of images or of CIFAR's batches, or an .npz or .npy file")
    return root


def _read_arrays(path: Path) -> CleanImages:
    try:
        with path.open("rb") as file:  # not by path: numpy would leave a damaged file open
            content = np.load(file)  # refuses pickles by default
            label_file = path.with_name("labels.npy")
            if path.suffix == ".npz":
                images, labels = (_get_first(content, keys) for keys in (IMAGE_KEYS, LABEL_KEYS))
            else:
                images, labels = content, np.load(label_file) if label_file.is_file() and label_file != path else None
    except (OSError, ValueError, EOFError, KeyError, BadZipFile) as error:
        raise DataError(f"{path} is truncated or not a file of plain arrays ({error})") from error
    if images is None:
        raise DataError(f"{path} contains {', '.join(content) or 'nothing'}; expected 'images' and, if known, 'labels'")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise DataError(f"{path} contains {images.dtype} {images.shape}; expected images as uint8 (N, H, W, 3)")
    if labels is not None and (labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer)):
        raise DataError(
            f"the labels of {path} are {labels.dtype} {labels.shape} for {len(images)} images; "
            "expected one integer per image"
        )
    return CleanImages(images, None if labels is None else labels.astype(np.int64))


def _get_first(content: Any, keys: Sequence[str]) -> NDArray[Any] | None:
    found: NDArray[Any] | None = next((content[key] for key in keys if key in content), None)
    return found


def _read_image_files(root: Path, size: tuple[int, int] | None, limit: int | None, seed: int) -> CleanImages:
    paths = find_images(root)
    folders = [path.relative_to(root).parts[0] for path in paths]
    is_tree = all(len(path.relative_to(root).parts) > 1 for path in paths)
    classes = sorted(set(folders)) if is_tree else []
    if is_tree and limit is None:
        rows = np.array(sort_images(root, [path.relative_to(root).as_posix() for path in paths], "shuffle", seed=seed))
    else:
        rows = _draw_rows(len(paths), limit, seed)
    pixels = decode_files(
        [paths[row] for row in rows],
        Resize(size) if size else None,
        hint="give a size (height, width) to resize them to",
    )
    label_of = {name: label for label, name in enumerate(classes)}
    labels = np.array([label_of[folders[row]] for row in rows], np.int64) if is_tree else None
    return CleanImages(np.stack(pixels), labels, len(classes) if is_tree else None)


def _select(found: CleanImages, limit: int | None, seed: int) -> CleanImages:
    if len(found.images) == 0:
        raise DataError("there are no images in the file")
    if limit is None:
        return found
    rows = _draw_rows(len(found.images), limit, seed)
    return CleanImages(found.images[rows], None if found.labels is None else found.labels[rows])


def _draw_rows(num_images: int, limit: int | None, seed: int) -> NDArray[np.int64]:
    if limit is None:
        return np.arange(num_images)
    return np.random.default_rng(seed).permutation(num_images)[:limit]

"""Picture files: decoded when read, in several threads, with or without labels."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.datasets.arrays import to_unit_floats
from ctta.datasets.base import Rows
from ctta.errors import DataError
from ctta.io.images import IMAGE_SUFFIXES, decoding_errors, import_pillow, is_hidden_folder, is_image_file
from ctta.validation import check_integer

DECODERS = 4  # threads; Pillow lets go of the interpreter lock while it decodes

READ_AHEAD = 2  # batches

Transform = Callable[[Any], Any]  # of a PIL image


@dataclass(frozen=True)
class ImageFiles:
    """Pictures of one size after ``transform``, and a whole-number label for each, or none."""

    name: str
    paths: tuple[Path, ...]
    labels: NDArray[np.integer[Any]] | None
    transform: Transform | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        pictures = read_images([self.paths[row] for row in rows], self.transform)
        labels = None if self.labels is None else torch.from_numpy(self.labels[rows].astype(np.int64))
        return pictures, labels


def read_images(paths: Sequence[Path], transform: Transform | None) -> Tensor:
    """Pictures as one batch of floats; an error names those that differ in size."""
    with ThreadPoolExecutor(DECODERS) as pool:
        arrays = list(pool.map(lambda path: decode_file(path, transform), paths))
    for path, array in zip(paths, arrays, strict=True):
        if array.shape != arrays[0].shape:
            raise DataError(
                f"{path} has {array.shape[:2]} pixels and {paths[0]} {arrays[0].shape[:2]}, which makes no batch: "
                "give size=(height, width), or batch_size=1"
            )
    return to_unit_floats(np.stack(arrays))


def decode_file(path: Path, transform: Transform | None) -> NDArray[np.uint8]:
    """The picture in a file as bytes (H, W, 3)."""
    try:
        with import_pillow().open(path) as file:
            picture = to_upright_rgb(file, str(path))
    except DataError:
        raise
    except decoding_errors() as error:
        raise DataError(f"{path} is missing, truncated or no picture ({error}): replace or remove it") from error
    if transform is None:
        return np.asarray(picture)
    pixels: NDArray[Any] = np.asarray(transform(picture))
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"the transform must return an RGB PIL image, or uint8 (H, W, 3), and made {pixels.dtype} {pixels.shape} "
            f"of {path}: leave scaling to [0, 1] to the stream, and normalising to the model"
        )
    return pixels


def to_upright_rgb(picture: Any, what: str) -> Any:
    """A PIL image as a person sees it, in RGB: upright, alpha dropped, grey repeated, 16 bits brought to 8.

    Phones store the sensor's rows and a tag that says how to turn them. One rule for all pictures: ImageNet-C is not
    expected to have such tags, and torchvision's loaders, which ignore them, would differ only where there are some.
    """
    from PIL import ImageOps

    if picture.mode in ("I", "F"):
        raise DataError(f"{what} has 32 bits per value, of which nobody knows the range: store it with 8 or 16")
    picture.load()
    with suppress(SyntaxError):  # a tag that cannot be read is no reason to refuse the picture
        picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I;16"):  # Pillow would clip these rather than scale them
        picture = import_pillow().fromarray((np.asarray(picture).astype(np.uint32) >> 8).astype(np.uint8))
    if picture.mode == "P" and "transparency" in picture.info:  # or Pillow warns
        picture = picture.convert("RGBA")
    return picture.convert("RGB")


@dataclass(frozen=True)
class Resize:
    """A bilinear resize of a PIL image to (height, width); a class, so that streams can be pickled."""

    size: tuple[int, int]

    def __call__(self, image: Any) -> Any:
        height, width = self.size
        return image.resize((width, height), import_pillow().Resampling.BILINEAR)


def find_images(folder: Path, remedy: str = "check the path, extract the archive") -> list[Path]:
    """Every picture in the folder and below, sorted by path, but no hidden ones; DataError if there are none."""
    found = sorted(path for path in folder.rglob("*") if is_image_file(path, folder) and path.is_file())
    if not found:
        raise DataError(f"{folder} holds no pictures ({', '.join(sorted(IMAGE_SUFFIXES))}): {remedy}")
    return found


def describe_files(folder: Path, paths: Sequence[Path], extra: str = "") -> str:
    """A name by what a folder holds, wherever it lies: names and sizes of all files, and the first one's bytes."""
    listing = "\n".join(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}" for path in paths)
    digest = hashlib.sha256(f"{extra}\n{listing}\n".encode())
    digest.update(paths[0].read_bytes())
    return f"{len(paths)} pictures[{digest.hexdigest()[:8]}]"


def list_folders(root: Path) -> list[str]:
    """The folders in a folder by name, without .cache, __MACOSX and what a killed unpacking left."""
    children = [child.name for child in root.iterdir() if child.is_dir()] if root.is_dir() else []
    return sorted(name for name in children if not is_hidden_folder(name))


def find_labeled_images(
    root: Path,
    transform: Transform | None,
    name: str,
    *,
    per_class: int | None,
    images: Sequence[str] | None,
    remedy: str = "extract the archive again",
) -> ImageFiles:
    """What :func:`image_folder` gives, before it is a stream; `name` says what the transform does."""
    check_image_choice(per_class, images)
    classes = list_folders(root)
    if not classes:
        raise DataError(f"{root} holds no class folders; expected <class>/<picture>: {remedy}")
    if images is not None:
        chosen = [root / entry for entry in images]
        if missing := [file for file in chosen if not file.is_file()]:
            more = f", and {len(missing) - 1} more of the list of images" if len(missing) > 1 else ""
            raise DataError(f"{missing[0]} is missing{more}: correct the list, or {remedy}")
    else:
        chosen = [file for folder in classes for file in find_images(root / folder, remedy)[:per_class]]
    places = {folder: place for place, folder in enumerate(classes)}
    labels = np.array([places[file.relative_to(root).parts[0]] for file in chosen])
    return ImageFiles(describe_files(root, chosen, f"{name} {classes}"), tuple(chosen), labels, transform)


def check_image_choice(per_class: int | None, images: Sequence[str] | None) -> None:
    """Whether it is clear which pictures are meant."""
    if per_class is not None and images is not None:
        raise ValueError(f"give per_class or images, not both: per_class={per_class} would not apply to the list")
    if per_class is not None:
        check_integer("per_class (None for all pictures)", per_class, 1)
    if images is not None:
        if isinstance(images, str) or not images:
            raise ValueError(f"images must be a list of '<class>/<picture>' with at least one entry, got {images!r}")
        for entry in images:
            parts = PurePosixPath(entry).parts
            if len(parts) < 2 or ".." in parts or entry.startswith(("/", ".", "__")):
                raise ValueError(f"images must be of the form '<class>/<picture>' below the tree's root, got {entry!r}")


def read_image_list(path: Path) -> list[str]:
    """The lines of a text file with a picture on each."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the list of images {path} cannot be read ({error}); expected a text file with one "
            "<class>/<picture>.JPEG per line: check the path, or use per_class= instead"
        ) from error
    if not any(lines):
        raise DataError(f"{path} lists no pictures; expected one <class>/<picture>.JPEG per line")
    return [line for line in lines if line]

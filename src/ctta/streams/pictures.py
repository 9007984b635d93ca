"""Picture files: decoded when read, in several threads, with or without labels."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.errors import DataError
from ctta.io.images import IMAGE_SUFFIXES, decoding_errors, import_pillow, is_image_file
from ctta.streams.arrays import unit_floats
from ctta.streams.stream import Rows

DECODERS = 4  # threads; Pillow lets go of the interpreter lock while it decodes

Transform = Callable[[Any], Any]  # of a PIL image


@dataclass(frozen=True)
class PictureFiles:
    """Pictures of one size after ``transform``, and a whole-number label for each, or none."""

    name: str
    paths: tuple[Path, ...]
    labels: NDArray[np.integer[Any]] | None
    transform: Transform | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        pictures = read_pictures([self.paths[row] for row in rows], self.transform)
        labels = None if self.labels is None else torch.from_numpy(self.labels[rows].astype(np.int64))
        return pictures, labels


def read_pictures(paths: Sequence[Path], transform: Transform | None) -> Tensor:
    """Pictures as one batch of floats; an error names those that differ in size."""
    with ThreadPoolExecutor(DECODERS) as pool:
        arrays = list(pool.map(lambda path: decoded(path, transform), paths))
    for path, array in zip(paths, arrays, strict=True):
        if array.shape != arrays[0].shape:
            raise DataError(
                f"{path} has {array.shape[:2]} pixels and {paths[0]} {arrays[0].shape[:2]}, which makes no batch: "
                "give size=(height, width), or batch_size=1"
            )
    return unit_floats(np.stack(arrays))


def decoded(path: Path, transform: Transform | None) -> NDArray[np.uint8]:
    """The picture in a file as bytes (H, W, 3)."""
    try:
        with import_pillow().open(path) as file:
            picture = as_seen(file, str(path))
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


def as_seen(picture: Any, what: str) -> Any:
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


def resized(size: tuple[int, int]) -> Transform:
    """A transform to (height, width), bilinear."""
    height, width = size
    return partial(_resize, width=width, height=height)  # a lambda would keep streams from being pickled


def _resize(picture: Any, *, width: int, height: int) -> Any:
    return picture.resize((width, height), import_pillow().Resampling.BILINEAR)


def pictures_below(folder: Path, remedy: str = "check the path, extract the archive") -> list[Path]:
    """Every picture in the folder and below, sorted by path, but no hidden ones; DataError if there are none."""
    found = sorted(path for path in folder.rglob("*") if is_image_file(path, folder) and path.is_file())
    if not found:
        raise DataError(f"{folder} holds no pictures ({', '.join(sorted(IMAGE_SUFFIXES))}): {remedy}")
    return found


def listing_name(folder: Path, paths: Sequence[Path], extra: str = "") -> str:
    """A name by what a folder holds, wherever it lies: names and sizes of all files, and the first one's bytes."""
    listing = "\n".join(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}" for path in paths)
    digest = hashlib.sha256(f"{extra}\n{listing}\n".encode())
    digest.update(paths[0].read_bytes())
    return f"{len(paths)} pictures[{digest.hexdigest()[:8]}]"

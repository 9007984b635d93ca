"""Images in an array, in memory or mapped from a file, as they are."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ctta.streams.stream import Rows, Segment, Stream


@dataclass(frozen=True)
class PixelArray:
    """Bytes (N, H, W, 3) and a whole-number label for each, or none."""

    name: str
    pixels: NDArray[np.uint8]
    labels: NDArray[np.integer[Any]] | None

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        first, count = int(rows[0]), len(rows)
        in_a_row = count == 1 or (rows[-1] - first == count - 1 and bool(np.all(np.diff(rows) == 1)))
        # A slice of a mapped file is read in one go; scattered rows have to be picked.
        pixels = np.array(self.pixels[first : first + count]) if in_a_row else self.pixels[rows]
        labels = None if self.labels is None else torch.from_numpy(self.labels[rows].astype(np.int64))
        return unit_floats(pixels), labels


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
    pixels = PixelArray(content_name(name, images, label_array), images, label_array)
    segment = Segment(name, pixels, np.arange(len(images)))
    return Stream(f"in_memory {pixels.name}", [segment], batch_size=batch_size)


def content_name(name: str, images: NDArray[np.uint8], labels: NDArray[Any] | None) -> str:
    """Which images and labels these are, by name and content; ValueError if they are none."""
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        given = f"{images.dtype} {tuple(images.shape)}" if hasattr(images, "dtype") else type(images).__name__
        raise ValueError(f"images must be a numpy array of uint8 (N, H, W, 3), got {given}")
    if labels is None:
        return f"{name}[{content_digest(images)}]"
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"labels has shape {labels.shape} and dtype {labels.dtype} for {len(images)} images; "
            "expected one whole number per image"
        )
    return f"{name}[{content_digest(images)} {content_digest(labels.astype('<i8'))}]"


def unit_floats(pixels: NDArray[np.uint8]) -> Tensor:
    """Bytes (N, H, W, 3) as floats (N, 3, H, W) in [0, 1]; the memory stays in the order of the bytes."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).div(255)


def content_digest(values: NDArray[Any]) -> str:
    """A short hash of an array's shape and values."""
    digest = hashlib.sha256(f"{values.shape}".encode())
    digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:8]

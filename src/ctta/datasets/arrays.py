"""Images in an array, in memory or mapped from a file, as they are."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.datasets.base import Rows


@dataclass(frozen=True)
class PixelArray:
    """UInt8Array (N, H, W, 3) and a whole-number label for each, or none."""

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
        return to_unit_floats(pixels), labels


def describe_arrays(name: str, images: NDArray[np.uint8], labels: NDArray[Any] | None) -> str:
    """Which images and labels these are, by name and content; ValueError if they are none."""
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        given = f"{images.dtype} {tuple(images.shape)}" if hasattr(images, "dtype") else type(images).__name__
        raise ValueError(f"images must be a numpy array of uint8 (N, H, W, 3), got {given}")
    if labels is None:
        return f"{name}[{hash_array(images)}]"
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"labels has shape {labels.shape} and dtype {labels.dtype} for {len(images)} images; "
            "expected one whole number per image"
        )
    return f"{name}[{hash_array(images)} {hash_array(labels.astype('<i8'))}]"


def to_unit_floats(pixels: NDArray[np.uint8]) -> Tensor:
    """UInt8Array (N, H, W, 3) as floats (N, 3, H, W) in [0, 1]; the memory stays in the order of the bytes."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).div(255)


def hash_array(values: NDArray[Any]) -> str:
    """A short hash of an array's shape and values."""
    digest = hashlib.sha256(f"{values.shape}".encode())
    digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:8]

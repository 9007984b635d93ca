"""Images in an array, in memory or memory-mapped from a file."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.data.datasets.base import Rows
from ctta.errors import InputError
from ctta.io.images import to_unit_floats


@dataclass(frozen=True)
class PixelArray:
    """The images of one domain in an array.

    Attributes:
        name: Identifies the images, see :func:`describe_arrays`.
        pixels: uint8 array of shape (N, H, W, 3), possibly memory-mapped.
        labels: N integers, or None.
        label_maps: Instead, integers (N, H, W), one label per pixel, or None.
    """

    name: str
    pixels: NDArray[np.uint8]
    labels: NDArray[np.integer[Any]] | None
    label_maps: NDArray[np.integer[Any]] | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Read some of the images.

        Args:
            rows: Indices of the images.

        Returns:
            Images of shape (N, 3, H, W) as floats in [0, 1], and their labels or label maps.
        """
        first, count = int(rows[0]), len(rows)
        is_contiguous = count == 1 or (rows[-1] - first == count - 1 and bool(np.all(np.diff(rows) == 1)))
        # A slice of a mapped file is one sequential read; scattered rows have to be gathered.
        pixels = np.array(self.pixels[first : first + count]) if is_contiguous else self.pixels[rows]
        targets = self.label_maps if self.labels is None else self.labels
        return to_unit_floats(pixels), None if targets is None else torch.from_numpy(targets[rows].astype(np.int64))


def describe_arrays(name: str, images: NDArray[np.uint8], labels: NDArray[Any] | None) -> str:
    """Return a name that identifies images and labels by their content; it enters the hash of a stream.

    Args:
        name: What the images are called.
        images: uint8 array of shape (N, H, W, 3).
        labels: N integers, or one per pixel (N, H, W), or None.

    Returns:
        The name with a hash of each array.

    Raises:
        InputError: An array has another shape or data type.
    """
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        given = f"{images.dtype} {tuple(images.shape)}" if hasattr(images, "dtype") else type(images).__name__
        raise InputError(f"images must be a numpy array of uint8 (N, H, W, 3), got {given}")
    if labels is None:
        return f"{name}[{hash_array(images)}]"
    if labels.shape not in ((len(images),), images.shape[:3]) or not np.issubdtype(labels.dtype, np.integer):
        raise InputError(
            f"labels must be one integer per image, or per pixel as (N, H, W), got {labels.dtype} {labels.shape} for "
            f"images {images.shape}"
        )
    return f"{name}[{hash_array(images)} {hash_array(labels.astype('<i8'))}]"


def hash_array(values: NDArray[Any]) -> str:
    """Return a short hash of an array's shape and values."""
    digest = hashlib.sha256(f"{values.shape}".encode())
    digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:8]

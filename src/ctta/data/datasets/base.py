"""What a domain of images is: protocols that readers implement, and images in an array."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.errors import DataError, InputError
from ctta.io.images import to_unit_floats

#: Indices of images within a domain.
Rows = NDArray[np.int64]
#: Label of pixels that are not scored, as in Cityscapes and ACDC.
IGNORE_INDEX = 255
#: Label of images that are not scored; a class cannot have it, and torch's cross-entropy ignores it too.
IGNORE_LABEL = -100


#: The "corruption" that leaves images as they are, at any severity.
CLEAN = "none"


class ImageDomain(Protocol):
    """The images of one domain: what a segment of a stream reads from."""

    @property
    def name(self) -> str:
        """Name that identifies the images by content, the same on every machine; enters the hash of a stream."""

    @property
    def labels(self) -> NDArray[np.integer[Any]] | None:
        """Label of each image, known without reading the images; None if there are none, or one per pixel."""

    def __len__(self) -> int: ...

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Read some of the images.

        Args:
            rows: Indices of the images.

        Returns:
            Images of shape (N, C, H, W) as floats in [0, 1], and their labels, if there are any.
        """


class CorruptionDataset(Protocol):
    """A dataset with an :class:`ImageDomain` for each corruption and severity, such as CIFAR-10-C."""

    @property
    def name(self) -> str:
        """Name of the dataset, part of the name of every stream over it."""

    @property
    def read_ahead(self) -> int:
        """Number of batches worth reading in the background."""

    def domain(self, corruption: str, severity: float) -> ImageDomain:
        """Return the images under one corruption.

        Args:
            corruption: Name of the corruption.
            severity: 1 (weak) to 5 (strong); datasets that corrupt their images take any number from 0 to 5.

        Returns:
            The images of that domain.
        """


def no_clean_images(folder: Path, stream: str) -> DataError:
    """Return the error for a dataset of corrupted images that is asked for the images as they are.

    ``stream`` is the call that opens clean images.
    """
    return DataError(f"{folder} holds corrupted images only: give a stream of the clean ones, such as {stream}")


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
    """Return a name with hashes of images (N, H, W, 3) and labels (N,) or (N, H, W); it enters the hash of a stream."""
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

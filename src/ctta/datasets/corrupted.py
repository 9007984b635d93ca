"""Clean images in memory that are corrupted when they are read, and the sample that comes with the library."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ctta.corruptions import VERSION, corrupt
from ctta.corruptions.frost import PhotoPaths, hash_photos
from ctta.corruptions.registry import check_corruption
from ctta.datasets.arrays import describe_arrays
from ctta.datasets.base import Rows
from ctta.io.images import to_unit_floats
from ctta.models import CIFAR10_CLASSES
from ctta.validation import check_integer


class Corrupted:
    """Clean images in memory under any corruption of :mod:`ctta.corruptions`.

    Args:
        images: uint8 array of shape (N, H, W, 3).
        labels: N integers.
        name: Name of the images, part of the name of every stream over them.
        seed: Seed of the corruptions.
        frost_photos: A folder with, or a list of, photographs for "frost", instead of the textures that come with the
            library.
        class_names: Names of the classes, in the order of the labels, for reports.

    Raises:
        InputError: An array has another shape or data type.
    """

    read_ahead = 0

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: ArrayLike,
        *,
        name: str,
        seed: int = 0,
        frost_photos: PhotoPaths | None = None,
        class_names: Sequence[str] = (),
    ) -> None:
        check_integer("seed", seed)
        self.class_names = tuple(class_names)
        self.images, self.labels, self.seed, self.frost_photos = images, np.asarray(labels), seed, frost_photos
        frost = "" if frost_photos is None else f" frost_photos=[{hash_photos(frost_photos)}]"
        # With the version of the generator: another version may draw other pixels, whose results are not comparable.
        self.name = f"{describe_arrays(name, images, self.labels)} corruptions={VERSION} seed={seed}{frost}"

    def domain(self, corruption: str, severity: int) -> "CorruptedDomain":
        """Return the images under one corruption.

        Args:
            corruption: Name of the corruption, a key of ``ctta.corruptions.CORRUPTIONS`` or ``HOLD_OUT``.
            severity: 1 (weak) to 5 (strong).

        Returns:
            The images, which are corrupted when they are read.
        """
        check_corruption(corruption, severity)
        return CorruptedDomain(self, corruption, severity)


@dataclass(frozen=True)
class CorruptedDomain:
    """The images of :class:`Corrupted` under one corruption; each is the same whenever it is read.

    Attributes:
        data: The clean images.
        corruption: Name of the corruption.
        severity: 1 (weak) to 5 (strong).
    """

    data: Corrupted
    corruption: str
    severity: int

    @property
    def name(self) -> str:
        """Name that identifies the images, the same on every machine."""
        return f"{self.data.name} {self.corruption} {self.severity}"

    @property
    def labels(self) -> NDArray[np.integer[Any]]:
        """Label of each image."""
        return self.data.labels

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class, in the order of the labels; empty if they are not known."""
        return self.data.class_names

    def __len__(self) -> int:
        return len(self.data.images)

    def read(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Corrupt some of the images and return them as floats in [0, 1], with their labels."""
        pixels = corrupt(
            self.data.images[rows],
            self.corruption,
            self.severity,
            seed=self.data.seed,
            index=rows,
            frost_photos=self.data.frost_photos,
        )
        return to_unit_floats(pixels), torch.from_numpy(self.data.labels[rows].astype(np.int64))


def sample(*, seed: int = 0, frost_photos: PhotoPaths | None = None) -> Corrupted:
    """Return the images that come with the library: the first 2,000 test images of CIFAR-10, to be corrupted.

    Args:
        seed: Seed of the corruptions.
        frost_photos: As for :class:`Corrupted`.

    Returns:
        A dataset for the protocols of :mod:`ctta.streams`.

    >>> from ctta.streams import continual
    >>> len(continual(sample(), limit=500, batch_size=50))
    150
    """
    with as_file(files("ctta.datasets") / "sample.npz") as path, np.load(path) as arrays:
        images, labels = arrays["images"], arrays["labels"].astype(np.int64)
    names = CIFAR10_CLASSES
    return Corrupted(images, labels, name="cifar10-sample", seed=seed, frost_photos=frost_photos, class_names=names)

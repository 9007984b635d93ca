"""Clean images in memory, corrupted on the way by our own generator."""

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
from ctta.datasets.arrays import describe_arrays, to_unit_floats
from ctta.datasets.base import Rows
from ctta.validation import check_integer


class Corrupted:
    """A reader that makes its corruptions itself.

    Args:
        images: uint8 (N, H, W, 3).
        labels: N integers.
        name: which images these are; part of the name of every stream over them.
        seed: of the corruptions.
        frost_photos: a folder with, or a list of, photographs for "frost", instead of those shipped.
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
    ) -> None:
        check_integer("seed", seed)
        self.images, self.labels, self.seed, self.frost_photos = images, np.asarray(labels), seed, frost_photos
        frost = "" if frost_photos is None else f" frost_photos=[{hash_photos(frost_photos)}]"
        # With the generator's version: a later one may draw other pixels, and results would not compare.
        self.name = f"{describe_arrays(name, images, self.labels)} corruptions={VERSION} seed={seed}{frost}"

    def domain(self, corruption: str, severity: int) -> "CorruptedDomain":
        check_corruption(corruption, severity)
        return CorruptedDomain(self, corruption, severity)


@dataclass(frozen=True)
class CorruptedDomain:
    """The images under one corruption; drawn when read, the same each time."""

    data: Corrupted
    corruption: str
    severity: int

    @property
    def name(self) -> str:
        return f"{self.data.name} {self.corruption} {self.severity}"

    @property
    def labels(self) -> NDArray[np.integer[Any]]:
        return self.data.labels

    def __len__(self) -> int:
        return len(self.data.images)

    def read(self, rows: Rows) -> tuple[Tensor, Tensor]:
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
    """2,000 CIFAR-10 test images to be corrupted, as a data set for the protocols.

    >>> from ctta.streams import continual
    >>> len(continual(sample(), limit=500, batch_size=50))
    150

    Args:
        seed: of the corruptions' draws.
        frost_photos: as for :class:`Corrupted`.
    """
    with as_file(files("ctta.datasets") / "sample.npz") as path, np.load(path) as arrays:
        images, labels = arrays["images"], arrays["labels"].astype(np.int64)
    return Corrupted(images, labels, name="cifar10-sample", seed=seed, frost_photos=frost_photos)

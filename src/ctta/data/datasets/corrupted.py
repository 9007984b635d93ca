"""Clean images in memory that are corrupted when they are read, and the sample that comes with the library."""

from collections.abc import Sequence
from importlib.resources import as_file, files
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ctta.core.validation import check_integer
from ctta.data.corruptions import VERSION
from ctta.data.corruptions.frost import PhotoPaths, hash_photos
from ctta.data.datasets.arrays import describe_arrays
from ctta.data.datasets.base import Rows
from ctta.data.datasets.corruptible import CorruptibleDataset
from ctta.models import CIFAR10_CLASSES


class Corrupted(CorruptibleDataset):
    """Clean images in memory under any corruption of :mod:`ctta.data.corruptions`.

    Args:
        images: uint8 array of shape (N, H, W, 3).
        labels: N integers, or one per pixel (N, H, W) with 255 where a pixel is not scored. Label maps stay as they
            are under every corruption, also where ``elastic_transform`` moves pixels a little.
        name: Name of the images, part of the name of every stream over them.
        seed: Seed of the corruptions.
        frost_photos: A folder with, or a list of, photographs for "frost", instead of the textures that come with the
            library.
        class_names: Names of the classes, in the order of the labels, for reports.

    Raises:
        InputError: An array has another shape or data type.
    """

    labels: NDArray[np.integer[Any]]

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

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {len(self):,} images)"

    def read_clean(self, rows: Rows) -> tuple[NDArray[np.uint8], Tensor]:
        """Return some of the images as they are, and their labels or label maps."""
        return self.images[rows], torch.from_numpy(self.labels[rows].astype(np.int64))


def sample(*, seed: int = 0, frost_photos: PhotoPaths | None = None) -> Corrupted:
    """Return the images that come with the library: the first 2,000 test images of CIFAR-10, to be corrupted.

    Args:
        seed: Seed of the corruptions.
        frost_photos: As for :class:`Corrupted`.

    Returns:
        A dataset for the protocols of :mod:`ctta.data.streams`.

    >>> sample()
    Corrupted(cifar10-sample[1095f631 6aff0335] corruptions=1 seed=0, 2,000 images)
    >>> from ctta.data.streams import continual
    >>> len(continual(sample(), limit=500, batch_size=50))
    150
    """
    with as_file(files("ctta.data.datasets") / "sample.npz") as path, np.load(path) as arrays:
        images, labels = arrays["images"], arrays["labels"].astype(np.int64)
    names = CIFAR10_CLASSES
    return Corrupted(images, labels, name="cifar10-sample", seed=seed, frost_photos=frost_photos, class_names=names)

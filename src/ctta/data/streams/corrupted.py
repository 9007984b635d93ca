"""Clean images of any stream under corruptions, so that a protocol can order them."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ctta.data.corruptions import VERSION
from ctta.data.corruptions.arrays import images_to_uint8
from ctta.data.datasets.base import CorruptionDataset, Rows
from ctta.data.datasets.corruptible import CorruptibleDataset
from ctta.data.streams.mixture import Mixture
from ctta.data.streams.stream import Stream


class CorruptedStream(CorruptibleDataset):
    """The images of a stream as a dataset for :func:`.continual` and :func:`.gradual`.

    Args:
        stream: A stream of clean images in [0, 1], of any size from 8 pixels a side.
        seed: Seed of the corruptions.
    """

    def __init__(self, stream: Stream, *, seed: int = 0) -> None:
        self.images, self.seed = Mixture(stream.segments), seed
        self.labels, self.class_names = self.images.labels, self.images.class_names
        self.name, self.read_ahead = f"{stream.name} corruptions={VERSION} seed={seed}", stream.read_ahead

    def __len__(self) -> int:
        return len(self.images)

    def read_clean(self, rows: Rows) -> tuple[NDArray[np.uint8], Tensor | None]:
        """Return some of the images, rounded to 8 bits, and their labels."""
        x, y = self.images.read(rows)
        return images_to_uint8(x), y

    def draw_index(self, rows: Rows) -> Rows:
        """Return the index of images within their domain, so that a shuffle does not change their draws."""
        _domains, index = self.images.origins(rows)
        return index

    @property
    def content(self) -> str:
        """Name that identifies images and seed on every machine; enters the hash of a stream."""
        return f"{self.images.name} corruptions={VERSION} seed={self.seed}"


def as_corruption_dataset(data: CorruptionDataset | Stream, protocol: str) -> CorruptionDataset:
    """Return a dataset as it is, and a stream of clean images as a dataset.

    Args:
        data: What a protocol was given.
        protocol: Name of the protocol, for the error.

    Returns:
        A dataset with a domain for every corruption.

    Raises:
        TypeError: The data is neither; the message says how to read it.
    """
    if isinstance(data, Stream):
        return CorruptedStream(data)
    if not hasattr(data, "domain"):
        raise TypeError(
            f"{protocol} needs a dataset of ctta.data.datasets, or a stream of clean images such as image_folder(path, "
            f"size=(224, 224)) or in_memory(images, labels, name='mine'), got {type(data).__name__}: wrap your images "
            "in one of these"
        )
    return data


def as_clean_images(data: object, protocol: str) -> CorruptibleDataset:
    """Return a dataset that corrupts its images as it is, and a stream of clean images as such a dataset.

    Args:
        data: What a protocol was given.
        protocol: Name of the protocol, for the error.

    Returns:
        The dataset.

    Raises:
        TypeError: The data is neither, such as CIFAR-10-C, whose images are corrupted already.
    """
    if isinstance(data, Stream):
        return CorruptedStream(data)
    if not isinstance(data, CorruptibleDataset):
        raise TypeError(
            f"{protocol} corrupts clean images and got {type(data).__name__}: give ctta.data.datasets.Corrupted("
            "images, labels, name='mine'), ctta.data.datasets.CorruptedFolder(path), or a stream of clean images"
        )
    return data

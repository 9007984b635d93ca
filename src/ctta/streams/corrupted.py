"""Clean images of any stream under the corruptions of :mod:`ctta.corruptions`, so that a protocol can order them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ctta.corruptions import VERSION, corrupt
from ctta.corruptions.registry import check_corruption
from ctta.datasets.base import CorruptionDataset, Rows
from ctta.streams.mixture import Mixture
from ctta.streams.stream import Stream


class CorruptedStream:
    """The images of a stream as a dataset for :func:`ctta.streams.continual` and :func:`ctta.streams.gradual`.

    Args:
        stream: A stream of clean images in [0, 1], of any size from 8 pixels a side.
        seed: Seed of the corruptions.
    """

    def __init__(self, stream: Stream, *, seed: int = 0) -> None:
        self.images, self.seed = Mixture(stream.segments), seed
        self.name, self.read_ahead = f"{stream.name} corruptions={VERSION} seed={seed}", stream.read_ahead

    def domain(self, corruption: str, severity: int) -> "CorruptedStreamDomain":
        """Return the images under one corruption.

        Args:
            corruption: Name of the corruption, a key of ``ctta.corruptions.CORRUPTIONS`` or ``HOLD_OUT``.
            severity: 1 (weak) to 5 (strong).

        Returns:
            The images in the order of the stream; they are corrupted when they are read.
        """
        check_corruption(corruption, severity)
        return CorruptedStreamDomain(self, corruption, severity)


@dataclass(frozen=True)
class CorruptedStreamDomain:
    """The images of a :class:`CorruptedStream` under one corruption; each is the same whenever it is read.

    Attributes:
        data: The clean images.
        corruption: Name of the corruption.
        severity: 1 (weak) to 5 (strong).
    """

    data: CorruptedStream
    corruption: str
    severity: int

    @property
    def name(self) -> str:
        """Name that identifies the images, the same on every machine."""
        settings = f"corruptions={VERSION} seed={self.data.seed}"
        return f"{self.data.images.name} {settings} {self.corruption} {self.severity}"

    @property
    def labels(self) -> NDArray[np.integer[Any]] | None:
        """Label of each image; None if there are none, or one per pixel."""
        return self.data.images.labels

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""
        return self.data.images.class_names

    def __len__(self) -> int:
        return len(self.data.images)

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Read and corrupt some of the images, and return them with their labels."""
        x, y = self.data.images.read(rows)
        # An image gets the same draws wherever a shuffle puts it.
        _domains, index = self.data.images.origins(rows)
        return corrupt(x, self.corruption, self.severity, seed=self.data.seed, index=index), y


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
            f"{protocol} needs a dataset of ctta.datasets, or a stream of clean images such as image_folder(path, "
            f"size=(224, 224)) or in_memory(images, labels, name='mine'), got {type(data).__name__}: wrap your images "
            "in one of these"
        )
    return data

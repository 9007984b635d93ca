"""Clean images that are corrupted when they are read: by one corruption, or by several in turn."""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ctta.data.corruptions import corrupt
from ctta.data.corruptions.frost import PhotoPaths
from ctta.data.corruptions.registry import check_corruption
from ctta.data.datasets.base import Rows
from ctta.errors import ConfigError
from ctta.io.images import to_unit_floats

#: The "corruption" that leaves images as they are, at any severity.
CLEAN = "none"
#: A corruption and its severity, 0 to 5.
Step = tuple[str, float]


class CorruptibleDataset(ABC):
    """Base of the datasets whose images are corrupted when they are read.

    Attributes:
        name: Name of the dataset, part of the name of every stream over it.
        seed: Seed of the corruptions.
        class_names: Names of the classes, in the order of the labels; empty if they are not known.
        labels: Label of each image, or of each pixel (N, H, W); None if there are none.
        frost_photos: Photographs for "frost"; None for those that come with the library.
        read_ahead: Number of batches worth reading in the background.
    """

    name: str
    seed: int
    class_names: tuple[str, ...]
    labels: NDArray[np.integer[Any]] | None
    frost_photos: PhotoPaths | None = None
    read_ahead: int = 0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read_clean(self, rows: Rows) -> tuple[NDArray[np.uint8], Tensor | None]:
        """Return some of the images before any corruption, uint8 (N, H, W, 3), and their labels."""

    def draw_index(self, rows: Rows) -> Rows:
        """Return the numbers that the draws of images depend on."""
        return rows

    @property
    def content(self) -> str:
        """Name that identifies images and seed on every machine; enters the hash of a stream."""
        return self.name

    def domain(self, corruption: str, severity: float) -> "CorruptedDomain":
        """Return the images under one corruption.

        Args:
            corruption: Name of the corruption, a key of ``corruptions.CORRUPTIONS`` or ``HOLD_OUT``; ``"none"``
                for the images as they are.
            severity: 1 (weak) to 5 (strong), or any number between 0, the images as they are, and 5.

        Returns:
            The images, which are corrupted when they are read.
        """
        return self.combine((corruption, severity))

    def combine(self, *steps: Step, visit: int | None = None) -> "CorruptedDomain":
        """Return the images under several corruptions, one after the other.

        Args:
            steps: Corruptions with their severities, such as ``("fog", 2.25), ("snow", 1.5)``; none for clean images.
            visit: A number that gives the images draws of their own, for streams that show them again and again.

        Returns:
            The images, which are corrupted when they are read.

        Raises:
            ConfigError: There is no such corruption or severity, or a corruption comes twice.
        """
        names = [name for name, _severity in steps]
        if len(set(names)) < len(names):
            raise ConfigError(f"expected different corruptions, as one would repeat its draws; got {', '.join(names)}")
        checked = ((name, severity if name == CLEAN else check_corruption(name, severity)) for name, severity in steps)
        return CorruptedDomain(self, tuple(checked), visit)

    def select(self, start: int, stop: int) -> "SelectedImages":
        """Return the images in a range, which keep their draws, such as those to calibrate on.

        Args:
            start: Index of the first image.
            stop: Index after the last one.

        Returns:
            A dataset of these images.

        Raises:
            ConfigError: There are no such images.
        """
        if not 0 <= start < stop <= len(self):
            raise ConfigError(f"expected a range of the {len(self)} images, got {start} to {stop}")
        return SelectedImages(self, start, stop)

    def corrupt(
        self, pixels: NDArray[np.uint8], rows: Rows, *steps: Step, visit: int | None = None
    ) -> NDArray[np.uint8]:
        """Corrupt images that :meth:`read_clean` has returned, or that have been corrupted by other steps.

        Args:
            pixels: The images.
            rows: Their indices.
            steps: As for :meth:`combine`.
            visit: As for :meth:`combine`.

        Returns:
            The corrupted images.
        """
        seed = self.seed if visit is None else _hash_visit(self.seed, visit)
        index = self.draw_index(rows)
        for name, severity in steps:
            if name != CLEAN and severity:
                pixels = corrupt(pixels, name, severity, seed=seed, index=index, frost_photos=self.frost_photos)
        return pixels


class SelectedImages(CorruptibleDataset):
    """A range of the images of a dataset; created by :meth:`CorruptibleDataset.select`.

    Args:
        data: The dataset.
        start: Index of the first image.
        stop: Index after the last one.
    """

    def __init__(self, data: CorruptibleDataset, start: int, stop: int) -> None:
        self.data, self.start, self.stop = data, start, stop
        self.name, self.seed, self.frost_photos = f"{data.name} [{start}:{stop}]", data.seed, data.frost_photos
        self.class_names, self.read_ahead = data.class_names, data.read_ahead
        self.labels = None if data.labels is None else data.labels[start:stop]

    def __len__(self) -> int:
        return self.stop - self.start

    def read_clean(self, rows: Rows) -> tuple[NDArray[np.uint8], Tensor | None]:
        """Return some of the images as they are, and their labels."""
        return self.data.read_clean(self.start + rows)

    def draw_index(self, rows: Rows) -> Rows:
        """Return the numbers that the draws of images depend on, which are those of the whole dataset."""
        return self.data.draw_index(self.start + rows)

    @property
    def content(self) -> str:
        """Name that identifies images and seed on every machine; enters the hash of a stream."""
        return f"{self.data.content} [{self.start}:{self.stop}]"


@dataclass(frozen=True)
class CorruptedDomain:
    """The images of a :class:`CorruptibleDataset` under corruptions; each is the same whenever it is read.

    Attributes:
        data: The clean images.
        steps: The corruptions with their severities, in order.
        visit: As for :meth:`CorruptibleDataset.combine`.
    """

    data: CorruptibleDataset
    steps: tuple[Step, ...]
    visit: int | None = None

    @property
    def name(self) -> str:
        """Name that identifies the images, the same on every machine."""
        visit = "" if self.visit is None else f" visit={self.visit}"
        return f"{self.data.content} {format_steps(self.steps)}{visit}"

    @property
    def labels(self) -> NDArray[np.integer[Any]] | None:
        """Label of each image; None if there are none, or one per pixel."""
        labels = self.data.labels
        return labels if labels is None or labels.ndim == 1 else None

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class, in the order of the labels; empty if they are not known."""
        return self.data.class_names

    def __len__(self) -> int:
        return len(self.data)

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Corrupt some of the images and return them as floats in [0, 1], with their labels."""
        pixels, labels = self.data.read_clean(rows)
        return to_unit_floats(self.data.corrupt(pixels, rows, *self.steps, visit=self.visit)), labels


def format_steps(steps: tuple[Step, ...]) -> str:
    """Return the name of a domain under corruptions.

    Args:
        steps: The corruptions with their severities, in order.

    Returns:
        The name.

    >>> format_steps((("fog", 2.25), ("snow", 5))), format_steps(())
    ('fog 2.25 + snow 5', 'clean')
    """
    return " + ".join(f"{name} {severity!r}" for name, severity in steps) or "clean"


def _hash_visit(seed: int, visit: int) -> int:
    """Return a seed for the draws of one visit."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/visit {visit}".encode(), digest_size=8).digest(), "little")

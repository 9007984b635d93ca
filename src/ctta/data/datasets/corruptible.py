"""Clean images that are corrupted when they are read: in memory, or in a tree of labeled files."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ctta.core.validation import check_integer
from ctta.data.corruptions import VERSION, corrupt
from ctta.data.corruptions.registry import check_corruption
from ctta.data.corruptions.weather import PhotoPaths, hash_photos
from ctta.data.datasets.base import Rows, describe_arrays
from ctta.data.datasets.image_files import (
    READ_AHEAD,
    decode_files,
    describe_files,
    find_labeled_images,
    list_folders,
    sort_images,
)
from ctta.errors import ConfigError, DataError, did_you_mean
from ctta.io.images import Resize, resize_and_center_crop, to_unit_floats
from ctta.models import CIFAR10_CLASSES

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


class CorruptedFolder(CorruptibleDataset):
    """The images of a tree ``<class>/<image>`` under any corruption of :mod:`ctta.data.corruptions`.

    The images are shuffled, because class by class they would be a stream of sorted labels. They are decoded when they
    are read, so the tree may be larger than memory.

    Args:
        root: Root of the tree.
        size: (height, width) to resize to, before the corruption; without it all images must have one size.
        crop: Instead, resize the shorter side to 256 and crop the central 224x224, as ImageNet is preprocessed.
        classes: Names of the classes in the order of the network's outputs, among them every class folder. By default
            a class is labeled by its place among the sorted folders.
        seed: Seed of the shuffle and of the corruptions.

    Raises:
        ConfigError: Both ``size`` and ``crop`` are given.
        DataError: There are no class folders, one has no images, or one is not among the classes.

    >>> import ctta
    >>> data = CorruptedFolder("photos/val", size=(64, 64))                       # doctest: +SKIP
    >>> stream = ctta.data.streams.continual(data, names=("fog", "snow"), severity=3)  # doctest: +SKIP
    """

    labels: NDArray[np.int64]
    read_ahead = READ_AHEAD

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        size: tuple[int, int] | None = None,
        crop: bool = False,
        classes: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        folder = Path(root).expanduser()
        check_integer("seed", seed)
        if size and crop:
            raise ConfigError(f"give size or crop, not both: a crop has 224x224 pixels, not {size}")
        described_size = "crop 224" if crop else str(size)
        hint = "check the path; a class is a folder of images"
        files = find_labeled_images(folder, None, described_size, num_per_class=None, images=None, hint=hint)
        folders = list_folders(folder)
        self.class_names, self.seed = tuple(classes or folders), seed
        self.transform = resize_and_center_crop if crop else Resize(size) if size else None
        if unknown := [name for name in folders if name not in self.class_names]:
            raise DataError(
                f"the folder {folder / unknown[0]} is not among the {len(self.class_names)} given classes"
                f"{did_you_mean(unknown[0], self.class_names)}: rename it, or add it to the classes"
            )
        assert files.labels is not None
        label_of = np.array([self.class_names.index(name) for name in folders])
        order = sort_images(folder, [path.relative_to(folder).as_posix() for path in files.paths], "shuffle", seed=seed)
        self.paths = tuple(files.paths[row] for row in order)
        self.labels = label_of[files.labels[order]]
        described = describe_files(folder, self.paths, f"{described_size} {self.class_names}")
        self.name = f"folder {described} corruptions={VERSION} seed={seed}"

    def __len__(self) -> int:
        return len(self.paths)

    def read_clean(self, rows: Rows) -> tuple[NDArray[np.uint8], Tensor]:
        """Decode some of the images, and return them with their labels."""
        paths = [self.paths[row] for row in rows]
        pixels = np.stack(decode_files(paths, self.transform, hint="give a size (height, width) to resize to"))
        return pixels, torch.from_numpy(self.labels[rows])

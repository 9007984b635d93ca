"""Clean images: read from the formats that people have, and as datasets that corrupt them when they are read."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ctta.core.validation import check_integer
from ctta.data.corruptions import VERSION, corrupt
from ctta.data.corruptions.registry import check_corruption
from ctta.data.corruptions.weather import PhotoPaths, hash_photos
from ctta.data.datasets.base import CLEAN, Rows, describe_arrays
from ctta.data.datasets.benchmarks import clean_cifar
from ctta.data.datasets.image_files import (
    READ_AHEAD,
    check_folder,
    decode_files,
    describe_files,
    find_images,
    find_labeled_images,
    list_folders,
    sort_images,
)
from ctta.errors import ConfigError, DataError, did_you_mean
from ctta.io.images import Resize, resize_and_center_crop, to_unit_floats
from ctta.models import CIFAR10_CLASSES

#: A corruption and its severity, 0 to 5.
CorruptionLevel = tuple[str, float]
ARRAY_SUFFIXES = {".npy", ".npz"}
IMAGE_KEYS, LABEL_KEYS = ("images", "x"), ("labels", "y")
#: Folders in the archives of CIFAR-10 and CIFAR-100.
CIFAR_FOLDERS = ("cifar-10-batches-py", "cifar-100-python", "cifar-10-batches-bin", "cifar-100-binary")


class CleanDataset(ABC):
    """Base of the datasets that hold clean images and corrupt them when they are read.

    Subclasses differ in where the clean images are: :class:`ArrayDataset`, :class:`FolderDataset`,
    :class:`SubsetDataset` and, for a stream of clean images, ``StreamDataset``.
    """

    name: str  # part of the name of every stream over the dataset
    seed: int  # of the corruptions
    class_names: tuple[str, ...]  # in the order of the labels; empty if they are not known
    labels: NDArray[np.integer[Any]] | None  # of each image, or of each pixel (N, H, W)
    frost_photos: PhotoPaths | None = None  # None for those that come with the library
    read_ahead: int = 0  # number of batches worth reading in the background

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
        """Return the images under one corruption, which is applied when they are read.

        Args:
            corruption: A key of ``corruptions.CORRUPTIONS`` or ``HOLD_OUT``; ``"none"`` for the images as they are.
            severity: 1 (weak) to 5 (strong), or any number between 0, the images as they are, and 5.
        """
        return self.combine((corruption, severity))

    def combine(self, *corruptions: CorruptionLevel, visit: int | None = None) -> "CorruptedDomain":
        """Return the images under several corruptions, one after the other, which are applied when they are read.

        Args:
            corruptions: Each with its severity, such as ``("fog", 2.25), ("snow", 1.5)``; none for clean images.
            visit: A number that gives the images draws of their own, for streams that show them again and again.

        Raises:
            ConfigError: There is no such corruption or severity, or a corruption comes twice.
        """
        names = [name for name, _severity in corruptions]
        if len(set(names)) < len(names):
            raise ConfigError(f"expected different corruptions, as one would repeat its draws; got {', '.join(names)}")
        checked = (
            (name, severity if name == CLEAN else check_corruption(name, severity)) for name, severity in corruptions
        )
        return CorruptedDomain(self, tuple(checked), visit)

    def select(self, start: int, stop: int) -> "SubsetDataset":
        """Return the images from ``start`` to before ``stop`` as a dataset, in which they keep their draws."""
        if not 0 <= start < stop <= len(self):
            raise ConfigError(f"expected a range of the {len(self)} images, got {start} to {stop}")
        return SubsetDataset(self, start, stop)

    def corrupt(
        self, pixels: NDArray[np.uint8], rows: Rows, *corruptions: CorruptionLevel, visit: int | None = None
    ) -> NDArray[np.uint8]:
        """Corrupt images that :meth:`read_clean` has returned for ``rows``, or that have been corrupted by others."""
        seed, index = self.seed, self.draw_index(rows)
        if visit is not None:
            seed = int.from_bytes(hashlib.blake2b(f"{seed}/visit {visit}".encode(), digest_size=8).digest(), "little")
        for name, severity in corruptions:
            if name != CLEAN and severity:
                pixels = corrupt(pixels, name, severity, seed=seed, index=index, frost_photos=self.frost_photos)
        return pixels


class SubsetDataset(CleanDataset):
    """A range of the images of a dataset; created by :meth:`CleanDataset.select`."""

    def __init__(self, data: CleanDataset, start: int, stop: int) -> None:
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
    """The :class:`ImageDomain` of a :class:`CleanDataset` under corruptions; each image is the same in every read."""

    data: CleanDataset  # the clean images
    corruptions: tuple[CorruptionLevel, ...]  # the corruptions with their severities, in order
    visit: int | None = None  # as for :meth:`CleanDataset.combine`

    @property
    def name(self) -> str:
        """Name that identifies the images, the same on every machine."""
        visit = "" if self.visit is None else f" visit={self.visit}"
        return f"{self.data.content} {format_corruptions(self.corruptions)}{visit}"

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
        return to_unit_floats(self.data.corrupt(pixels, rows, *self.corruptions, visit=self.visit)), labels


def format_corruptions(corruptions: tuple[CorruptionLevel, ...]) -> str:
    """Return the name of a domain under corruptions.

    >>> format_corruptions((("fog", 2.25), ("snow", 5))), format_corruptions(())
    ('fog 2.25 + snow 5', 'clean')
    """
    return " + ".join(f"{name} {severity!r}" for name, severity in corruptions) or "clean"


class ArrayDataset(CleanDataset):
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


def sample(*, seed: int = 0, frost_photos: PhotoPaths | None = None) -> ArrayDataset:
    """Return the images that come with the library: the first 2,000 test images of CIFAR-10, to be corrupted.

    Args:
        seed: Seed of the corruptions.
        frost_photos: As for :class:`ArrayDataset`.

    Returns:
        A dataset for the protocols of :mod:`ctta.data.streams`.

    >>> sample()
    ArrayDataset(cifar10-sample[1095f631 6aff0335] corruptions=1 seed=0, 2,000 images)
    >>> from ctta.data.streams import continual
    >>> len(continual(sample(), limit=500, batch_size=50))
    150
    """
    with as_file(files("ctta.data.datasets") / "sample.npz") as path, np.load(path) as arrays:
        images, labels = arrays["images"], arrays["labels"].astype(np.int64)
    names = CIFAR10_CLASSES
    return ArrayDataset(images, labels, name="cifar10-sample", seed=seed, frost_photos=frost_photos, class_names=names)


class FolderDataset(CleanDataset):
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
    >>> data = FolderDataset("photos/val", size=(64, 64))                       # doctest: +SKIP
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
        files = find_labeled_images(
            folder, None, described_size, num_per_class=None, images=None, order="shuffle", seed=seed, hint=hint
        )
        folders = files.class_names
        self.class_names, self.seed = tuple(classes or folders), seed
        self.transform = resize_and_center_crop if crop else Resize(size) if size else None
        if unknown := [name for name in folders if name not in self.class_names]:
            raise DataError(
                f"the folder {folder / unknown[0]} is not among the {len(self.class_names)} given classes"
                f"{did_you_mean(unknown[0], self.class_names)}: rename it, or add it to the classes"
            )
        assert files.labels is not None
        self.paths = files.paths
        self.labels = np.array([self.class_names.index(name) for name in folders])[files.labels]
        described = describe_files(folder, self.paths, f"{described_size} {self.class_names}")
        self.name = f"folder {described} corruptions={VERSION} seed={seed}"

    def __len__(self) -> int:
        return len(self.paths)

    def read_clean(self, rows: Rows) -> tuple[NDArray[np.uint8], Tensor]:
        """Decode some of the images, and return them with their labels."""
        paths = [self.paths[row] for row in rows]
        pixels = np.stack(decode_files(paths, self.transform, hint="give a size (height, width) to resize to"))
        return pixels, torch.from_numpy(self.labels[rows])


class DomainFolders:
    """A tree ``<domain>/<class>/<image>``, such as PACS: domains that differ by nature, without corruptions.

    The protocols of :mod:`ctta.data.streams` show the domains where they show corruptions otherwise.

    Args:
        root: Root of the tree.
        source: The domain that the network was trained on: what the protocol ``clean`` shows, and no shift.
        size: As for :class:`FolderDataset`.
        crop: As for :class:`FolderDataset`.
        classes: As for :class:`FolderDataset`; by default the class folders of all domains, sorted.
        seed: Seed of the shuffle.

    Raises:
        DataError: There is no such folder or source; and what :class:`FolderDataset` raises.

    >>> import tempfile, ctta
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as root:
    ...     for domain in ("photo", "cartoon", "sketch"):
    ...         (Path(root) / domain / "dog").mkdir(parents=True)
    ...         Image.new("RGB", (8, 8)).save(Path(root) / domain / "dog" / "1.png")
    ...     data = DomainFolders(root, source="photo", size=(8, 8))
    ...     stream = ctta.data.streams.continual(data, batch_size=1)
    >>> [segment.domain for segment in stream.segments]
    ['cartoon', 'sketch']
    """

    read_ahead = READ_AHEAD

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        source: str,
        size: tuple[int, int] | None = None,
        crop: bool = False,
        classes: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        self.root, self.source, self.size, self.crop, self.seed = Path(root).expanduser(), source, size, crop, seed
        check_folder(self.root, "check the path; it holds a folder per domain, each with a folder per class")
        self.domains = tuple(list_folders(self.root))
        found = {name for domain in self.domains for name in list_folders(self.root / domain)}
        self.class_names = tuple(classes or sorted(found))
        self.name = f"domains of {len(self.class_names)} classes"
        self._check_domain(source)

    @property
    def shifts(self) -> tuple[str, ...]:
        """The domains other than the source, in the order of their names."""
        return tuple(name for name in self.domains if name != self.source)

    def open(self, domain: str) -> FolderDataset:
        """Return the images of a domain.

        Args:
            domain: Name of its folder.

        Returns:
            The images, shuffled.
        """
        self._check_domain(domain)
        folder = self.root / domain
        return FolderDataset(folder, size=self.size, crop=self.crop, classes=self.class_names, seed=self.seed)

    def domain(self, corruption: str, severity: float) -> CorruptedDomain:
        """Return the images of a domain as they are; those of the source for ``"none"``.

        Args:
            corruption: Name of the domain.
            severity: Ignored.

        Returns:
            The images.
        """
        return self.open(self.source if corruption == CLEAN else corruption).domain(CLEAN, 1)

    def _check_domain(self, domain: str) -> None:
        if domain not in self.domains:
            raise DataError(
                f"{self.root} has no domain {domain!r}{did_you_mean(domain, self.domains)}; it has "
                f"{', '.join(self.domains) or 'no folders'}"
            )


@dataclass(frozen=True)
class CleanImages:
    """Images in memory, with labels where they are known.

    Attributes:
        images: uint8 array of shape (N, H, W, 3).
        labels: N integers, or None.
        num_folders: Number of class folders that the images come from, or None.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    num_folders: int | None = None


def read_clean_images(
    path: str | os.PathLike[str], *, size: tuple[int, int] | None = None, limit: int | None = None, seed: int = 0
) -> CleanImages:
    """Read images and, where there are any, labels.

    Of a folder with CIFAR's batches, these are the test images; of an ``.npz``, its ``images`` (or ``x``) and
    ``labels`` (or ``y``); of an ``.npy``, its images with the labels of a ``labels.npy`` next to it. In a tree
    ``<class>/<image>`` a class is labeled by its place among the sorted names; images directly in the folder have no
    labels.

    Args:
        path: A folder or a file.
        size: (height, width) to resize image files to; arrays are not resized.
        limit: Largest number of images, drawn at random, so that every class is likely to be among them.
        seed: Seed of that draw, which also decides the order. Without a limit, the images of a tree are shuffled by
            their names, since they would come class by class; others are in the order of the file or of their names.

    Returns:
        The images.

    Raises:
        DataError: The path does not exist, or a file is damaged or in another format.
    """
    root = _check_path(path)
    if root.is_file():
        found = _read_arrays(root)
    elif folder := _find_cifar_folder(root):
        found = CleanImages(*clean_cifar(folder))
    else:
        return _read_image_files(root, size, limit, seed)
    if len(found.images) == 0:
        raise DataError("there are no images in the file")
    if limit is None:
        return found
    rows = np.random.default_rng(seed).permutation(len(found.images))[:limit]
    return CleanImages(found.images[rows], None if found.labels is None else found.labels[rows])


def infer_benchmark_layout(path: str | os.PathLike[str]) -> Literal["cifar-c", "imagenet-c"]:
    """Return the benchmark whose layout fits corrupted versions of these images: arrays for arrays, files for files."""
    root = _check_path(path)
    return "cifar-c" if root.is_file() or _find_cifar_folder(root) else "imagenet-c"


def _find_cifar_folder(path: Path) -> Path | None:
    """Return the folder with CIFAR's batches, which may be one below, or None."""
    for folder in (path, *(path / name for name in CIFAR_FOLDERS)):
        names = ("test_batch", "test_batch.bin", "test.bin", *(("test",) if (folder / "meta").is_file() else ()))
        if any((folder / name).is_file() for name in names):
            return folder
    return None


def _check_path(path: str | os.PathLike[str]) -> Path:
    root = Path(path).expanduser()
    if not root.is_dir() and not (root.is_file() and root.suffix in ARRAY_SUFFIXES):
        problem = "is not a file of arrays" if root.exists() else "does not exist"
        raise DataError(f"{root} {problem}; expected a folder of images or of CIFAR's batches, or an .npz or .npy file")
    return root


def _read_arrays(path: Path) -> CleanImages:
    try:
        with path.open("rb") as file:  # not by path: numpy would leave a damaged file open
            content = np.load(file)  # refuses pickles by default
            label_file = path.with_name("labels.npy")
            if path.suffix == ".npz":
                images, labels = (
                    next((content[key] for key in keys if key in content), None) for keys in (IMAGE_KEYS, LABEL_KEYS)
                )
            else:
                images, labels = content, np.load(label_file) if label_file.is_file() and label_file != path else None
    except (OSError, ValueError, EOFError, KeyError, BadZipFile) as error:
        raise DataError(f"{path} is truncated or not a file of plain arrays ({error})") from error
    if images is None:
        raise DataError(f"{path} contains {', '.join(content) or 'nothing'}; expected 'images' and, if known, 'labels'")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise DataError(f"{path} contains {images.dtype} {images.shape}; expected images as uint8 (N, H, W, 3)")
    if labels is not None and (labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer)):
        raise DataError(
            f"the labels of {path} are {labels.dtype} {labels.shape} for {len(images)} images; "
            "expected one integer per image"
        )
    return CleanImages(images, None if labels is None else labels.astype(np.int64))


def _read_image_files(root: Path, size: tuple[int, int] | None, limit: int | None, seed: int) -> CleanImages:
    paths = find_images(root)
    folders = [path.relative_to(root).parts[0] for path in paths]
    is_tree = all(len(path.relative_to(root).parts) > 1 for path in paths)
    classes = sorted(set(folders)) if is_tree else []
    rows = list(range(len(paths)))
    if limit is not None:
        rows = np.random.default_rng(seed).permutation(len(paths))[:limit].tolist()
    elif is_tree:
        rows = sort_images(root, [path.relative_to(root).as_posix() for path in paths], "shuffle", seed=seed)
    hint = "give a size (height, width) to resize them to"
    pixels = decode_files([paths[row] for row in rows], Resize(size) if size else None, hint=hint)
    label_of = {name: label for label, name in enumerate(classes)}
    labels = np.array([label_of[folders[row]] for row in rows], np.int64) if is_tree else None
    return CleanImages(np.stack(pixels), labels, len(classes) if is_tree else None)

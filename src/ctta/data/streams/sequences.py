"""Sequences of corruptions, one after the other: what the other protocols repeat, reorder and mix."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ctta.core.validation import check_choice, check_integer
from ctta.data.corruptions import VERSION
from ctta.data.corruptions.arrays import images_to_uint8
from ctta.data.corruptions.registry import CORRUPTIONS, KIND_OF, check_severity
from ctta.data.datasets.base import CLEAN, CorruptionDataset, Rows
from ctta.data.datasets.clean import CleanDataset, CorruptionLevel
from ctta.data.streams.stream import Mixture, Segment, Stream
from ctta.errors import ConfigError, did_you_mean

#: The ten random orders of the authors' code, for gradual CIFAR10-C and ImageNet-C.
RANDOM_ORDERS = (
    "brightness pixelate gaussian_noise motion_blur zoom_blur glass_blur impulse_noise jpeg_compression "
    "defocus_blur elastic_transform shot_noise frost snow fog contrast",
    "jpeg_compression shot_noise zoom_blur frost contrast fog defocus_blur elastic_transform gaussian_noise "
    "brightness glass_blur impulse_noise pixelate snow motion_blur",
    "contrast defocus_blur gaussian_noise shot_noise snow frost glass_blur zoom_blur elastic_transform "
    "jpeg_compression pixelate brightness impulse_noise motion_blur fog",
    "shot_noise fog glass_blur pixelate snow elastic_transform brightness impulse_noise defocus_blur frost "
    "contrast gaussian_noise motion_blur jpeg_compression zoom_blur",
    "pixelate glass_blur zoom_blur snow fog impulse_noise brightness motion_blur frost jpeg_compression "
    "gaussian_noise shot_noise contrast defocus_blur elastic_transform",
    "motion_blur snow fog shot_noise defocus_blur contrast zoom_blur brightness frost elastic_transform "
    "glass_blur gaussian_noise pixelate jpeg_compression impulse_noise",
    "frost impulse_noise jpeg_compression contrast zoom_blur glass_blur pixelate snow defocus_blur "
    "motion_blur brightness elastic_transform shot_noise fog gaussian_noise",
    "glass_blur zoom_blur impulse_noise fog snow jpeg_compression gaussian_noise frost shot_noise brightness "
    "contrast motion_blur pixelate defocus_blur elastic_transform",
    "defocus_blur motion_blur zoom_blur shot_noise gaussian_noise glass_blur jpeg_compression fog contrast "
    "pixelate frost snow brightness elastic_transform impulse_noise",
    "contrast gaussian_noise defocus_blur zoom_blur frost glass_blur jpeg_compression fog pixelate "
    "elastic_transform shot_noise impulse_noise snow motion_blur brightness",
)


def corruption_order(order: int | None = None) -> tuple[str, ...]:
    """Return the corruptions in the standard order, or in one of the ten random orders of the authors' code.

    Args:
        order: None for the standard order, or 0 to 9.

    Returns:
        The names of the fifteen corruptions.

    Raises:
        ConfigError: There is no such order.

    >>> corruption_order()[:2], corruption_order(9)[0]
    (('gaussian_noise', 'shot_noise'), 'contrast')
    """
    if order is not None and order not in range(len(RANDOM_ORDERS)):
        raise ConfigError(f"order must be None (standard) or 0 to {len(RANDOM_ORDERS) - 1}, got {order!r}")
    return tuple(CORRUPTIONS) if order is None else tuple(RANDOM_ORDERS[order].split())


def group_by_kind(names: Sequence[str]) -> dict[str, list[str]]:
    """Return corruptions by kind, the kinds in the order of their first corruption; raise if one has no known kind.

    >>> group_by_kind(["fog", "contrast", "snow"])
    {'weather': ['fog', 'snow'], 'digital': ['contrast']}
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        if name not in KIND_OF:
            raise ConfigError(f"{name!r} is of no known kind{did_you_mean(name, KIND_OF)}: leave it out")
        kinds.setdefault(KIND_OF[name], []).append(name)
    return kinds


class StreamDataset(CleanDataset):
    """The images of a stream of clean images in [0, 1], of any size from 8 pixels a side, as a dataset."""

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


def as_clean_dataset(data: object, protocol: str) -> CleanDataset:
    """Return the clean images that a protocol was given, or those of a stream; CIFAR-10-C, for example, has none."""
    if isinstance(data, Stream):
        return StreamDataset(data)
    if not isinstance(data, CleanDataset):
        raise TypeError(
            f"{protocol} corrupts clean images and got {type(data).__name__}: give ctta.data.datasets.ArrayDataset("
            "images, labels, name='mine'), ctta.data.datasets.FolderDataset(path), or a stream of clean images"
        )
    return data


BATCH_SIZE = 200  # of the CIFAR-C benchmarks


class CorruptionChoice(TypedDict, total=False):
    """The keywords of :func:`continual`, which the protocols that repeat the corruptions take too."""

    severity: float
    order: int | None
    names: Sequence[str] | None
    limit: int | None
    batch_size: int | None


def continual(
    data: CorruptionDataset | Stream,
    *,
    severity: float = 5,
    order: int | None = None,
    names: Sequence[str] | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
) -> Stream:
    """Return one corruption after the other at one severity: the protocol of the paper's tables.

    Args:
        data: The dataset, or a stream of clean images, such as :func:`image_folder`'s, to corrupt as they are read.
        severity: 1 (weak) to 5 (strong); a fraction such as 2.25 where images are corrupted as they are read.
        order: None for the standard order, or 0 to 9 for a random order of the authors' code.
        names: Instead of an order, the corruptions to use, in this order; by default all domains of
            :class:`~ctta.data.datasets.DomainFolders` but its source.
        limit: Largest number of images per corruption, the first ones; None for all.
        batch_size: Images per batch; by default 200, or that of the given stream.

    Returns:
        The stream.

    Raises:
        ConfigError: Both ``order`` and ``names`` are given, or one has no such value.
        DataError: A file of the dataset is missing or damaged.
        TypeError: ``data`` is neither a dataset with corruptions nor a stream.
    """
    if order is None and names is None:
        names = getattr(data, "shifts", None)
    chosen, description = choose_corruptions(order, names)
    severity = check_severity(severity)
    levels = [(corruption, severity) for corruption in chosen]
    return _build(data, f"continual severity={severity} {description}", levels, limit, batch_size)


def gradual(
    data: CorruptionDataset | Stream,
    *,
    variant: Literal["paper", "authors"] = "paper",
    order: int | None = None,
    names: Sequence[str] | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
) -> Stream:
    """Return one corruption after the other, each with the severities 1, 2, 3, 4, 5, 4, 3, 2, 1.

    In the authors' code the first corruption starts at its strongest, 5, 4, 3, 2, 1, which makes 131 segments for
    fifteen corruptions instead of 135.

    Args:
        data: As for :func:`continual`.
        variant: "paper" (135 segments) or "authors" (131 segments).
        order: As for :func:`continual`.
        names: As for :func:`continual`.
        limit: Largest number of images per segment, the first ones; None for all.
        batch_size: Images per batch; by default 200, or that of the given stream.

    Returns:
        The stream.

    Raises:
        ConfigError: A setting has no such value; and what :func:`continual` raises.
    """
    check_choice("variant", variant, ("paper", "authors"))
    if hasattr(data, "shifts"):
        raise ConfigError(f"gradual needs corruptions with severities; the domains of {type(data).__name__} have none")
    chosen, description = choose_corruptions(order, names)
    severities = (1, 2, 3, 4, 5, 4, 3, 2, 1)
    levels = [(corruption, severity) for corruption in chosen for severity in severities]
    if variant == "authors":
        levels = levels[4:]
    return _build(data, f"gradual {variant} {description}", levels, limit, batch_size)


def clean(data: CorruptionDataset | Stream, *, limit: int | None = None, batch_size: int | None = None) -> Stream:
    """Return the images as they are: a method should do no harm where nothing has changed.

    Args:
        data: A dataset that has its clean images, or a stream of clean images.
        limit: Largest number of images per segment, the first ones; None for all.
        batch_size: Images per batch; by default 200, or that of the given stream.

    Returns:
        A stream of one segment, "clean", or those of the given stream.

    Raises:
        DataError: The dataset has corrupted images only, such as CIFAR-10-C as it is published.
        TypeError: ``data`` is neither a dataset with corruptions nor a stream.
    """
    if not isinstance(data, Stream):
        return _build(data, "clean", [(CLEAN, 1)], limit, batch_size)
    return _limit(data, "clean", data.segments, limit, data.batch_size if batch_size is None else batch_size)


def single(stream: Stream) -> Stream:
    """Split a stream into batches of one image.

    Args:
        stream: The stream to split.

    Returns:
        A stream of the same images in the same order.
    """
    return Stream(f"{stream.name} single", stream.segments, batch_size=1, read_ahead=stream.read_ahead)


def choose_corruptions(order: int | None, names: Sequence[str] | None) -> tuple[tuple[str, ...], str]:
    """Return the corruptions that :func:`continual` is asked for, and a description for the name of the stream."""
    if isinstance(names, str):
        raise ConfigError(f"names must be a sequence of corruptions, got {names!r}: give ({names!r},)")
    if names is not None:
        if order is not None:
            raise ConfigError(f"give order or names, not both: order={order} does not apply to names={tuple(names)}")
        return tuple(names), f"names={'+'.join(names)}"
    return corruption_order(order), f"order={'standard' if order is None else order}"


def _build(
    data: CorruptionDataset | Stream,
    description: str,
    levels: Sequence[CorruptionLevel],
    limit: int | None,
    batch_size: int | None,
) -> Stream:
    """Return a stream with one segment per corruption and severity; the description begins with the protocol."""
    if batch_size is None:
        batch_size = data.batch_size if isinstance(data, Stream) else BATCH_SIZE
    if isinstance(data, Stream):
        data = StreamDataset(data)
    elif not hasattr(data, "domain"):
        raise TypeError(
            f"{description.split()[0]} needs a dataset of ctta.data.datasets, or a stream of clean images such as "
            "image_folder(path, size=(224, 224)) or in_memory(images, labels, name='mine'), got "
            f"{type(data).__name__}: wrap your images in one of these"
        )
    domains = {level: data.domain(*level) for level in dict.fromkeys(levels)}  # each opened once
    segments = []
    for corruption, severity in levels:
        images = domains[corruption, severity]
        level = corruption if hasattr(data, "shifts") else f"{corruption} {severity}"
        name = "clean" if corruption == CLEAN else level
        segments.append(Segment(name, images, np.arange(len(images))))
    return _limit(data, description, segments, limit, batch_size)


def _limit(
    data: CorruptionDataset | Stream, description: str, segments: Sequence[Segment], limit: int | None, batch_size: int
) -> Stream:
    """Return a stream of the first images of each segment."""
    described = "" if limit is None else f" limit={check_integer('limit', limit, 1)}"
    first = [replace(segment, rows=segment.rows[:limit]) for segment in segments]
    name = f"{data.name} {description}{described} batch={batch_size}"
    return Stream(name, first, batch_size=batch_size, read_ahead=data.read_ahead)

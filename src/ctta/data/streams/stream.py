"""Streams of batches: domain after domain, in a fixed order, with a position that can be saved and restored."""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.core.validation import check_integer
from ctta.data.datasets.base import ImageDomain, Rows
from ctta.errors import DataError, InputError


@dataclass(frozen=True)
class Composition:
    """What the batches of a stream are made of, on average.

    Attributes:
        batch_size: Images per batch.
        domains_per_batch: Mean number of distinct domains in a batch.
        num_domains: Number of domains in the stream.
        classes_per_batch: Mean number of distinct classes in a batch; None without one label per image.
        num_classes: Number of classes in the stream; None without one label per image.
        foreign: Fraction of images that are not scored, see :func:`ctta.data.streams.foreign`.
    """

    batch_size: int
    domains_per_batch: float
    num_domains: int
    classes_per_batch: float | None = None
    num_classes: int | None = None
    foreign: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the figures for ``about.json``."""
        return asdict(self)

    def describe(self) -> str:
        """Return the figures as a line of text.

        >>> Composition(64, 1.0, 15, 2.13, 10).describe()
        'batches of 64: 2.1 of 10 classes and 1.0 of 15 domains on average'
        """
        domains = f"{self.domains_per_batch:.1f} of {_count(self.num_domains, 'domain')}"
        classes = ""
        if self.classes_per_batch is not None and self.num_classes is not None:
            classes = f"{self.classes_per_batch:.1f} of {_count(self.num_classes, 'class', 'classes')} and "
        foreign = f", and {100 * self.foreign:.0f} % foreign images" if self.foreign else ""
        return f"batches of {self.batch_size}: {classes}{domains} on average{foreign}"


def measure_composition(segments: Sequence["Segment"], batch_size: int) -> Composition:
    """Count distinct classes and domains in every batch of a stream; foreign images count as neither."""
    num_batches = num_images = num_foreign = num_class_pairs = num_domain_pairs = 0
    classes: set[int] = set()
    domains: set[str] = set()
    is_labeled = all(segment.images.labels is not None for segment in segments)
    for segment in segments:
        rows, batches = segment.rows, np.arange(len(segment.rows)) // batch_size
        num_batches, num_images = num_batches + segment.num_batches(batch_size), num_images + len(rows)
        if is_labeled and segment.images.labels is not None:
            labels = segment.images.labels[rows]
            is_scored = labels >= 0
            rows, batches, labels = rows[is_scored], batches[is_scored], labels[is_scored]
            num_foreign += int((~is_scored).sum())
            classes.update(np.unique(labels).tolist())
            num_class_pairs += _count_pairs(batches, labels)
        names, numbers = _number_domains(segment, rows)
        domains.update(names)
        num_domain_pairs += _count_pairs(batches, numbers)
    return Composition(
        batch_size,
        num_domain_pairs / num_batches,
        len(domains),
        num_class_pairs / num_batches if is_labeled else None,
        len(classes) if is_labeled else None,
        num_foreign / num_images,
    )


def _number_domains(segment: "Segment", rows: Rows) -> tuple[list[str], Rows]:
    """Return the domains of a segment, and the number of that of each image."""
    if not isinstance(segment.images, Mixture):
        return [segment.domain], np.zeros(len(rows), np.int64)
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(domain, len(numbers)) for domain in segment.origins(rows)[0]]
    return list(numbers), np.array(found, np.int64)


def _count_pairs(batches: Rows, values: NDArray[np.integer[Any]]) -> int:
    """Return the number of distinct values of each batch, added up over the batches."""
    if len(values) == 0:
        return 0
    return len(np.unique(batches * (int(values.max()) + 1) + values))


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


@dataclass(frozen=True)
class Batch:
    """A batch of a stream: images for the model, and the rest for the score. A method never sees a label.

    Attributes:
        x: Images of shape (N, C, H, W), floats in [0, 1].
        y: Labels of shape (N,), or label maps of shape (N, H, W); None if unknown.
        domain: Domain of the segment that the batch belongs to.
        index: Index of each image within the domain that it comes from.
        domains: Domain that each image comes from, which differ in a mixed batch; ``domain`` for all by default.
    """

    x: Tensor
    y: Tensor | None
    domain: str
    index: Tensor
    domains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.domains:
            object.__setattr__(self, "domains", (self.domain,) * len(self.x))


@dataclass(frozen=True)
class Segment:
    """A part of a stream within one domain: some of its images, in some order.

    Attributes:
        domain: Name of the domain.
        images: The images of the domain.
        rows: Indices of the images to take, in order.
        visit: How often the domains of the stream have come before, see :attr:`Stream.visits`.
    """

    domain: str
    images: ImageDomain
    rows: Rows
    visit: int = 0

    def num_batches(self, batch_size: int) -> int:
        """Return the number of batches, of which the last may be smaller.

        Args:
            batch_size: Images per batch.

        Returns:
            The number of batches.
        """
        return -(-len(self.rows) // batch_size)

    def origins(self, rows: Rows) -> tuple[tuple[str, ...], Rows]:
        """Return where images come from, which differs between the images of a mixture.

        Args:
            rows: Indices of images of this segment's domain.

        Returns:
            The domain of each image, and its index within that domain.
        """
        if isinstance(self.images, Mixture):
            return self.images.origins(rows)
        return (self.domain,) * len(rows), rows

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of the labels; empty if the dataset does not name them."""
        return getattr(self.images, "class_names", ())

    @property
    def digest(self) -> str:
        """Hash of everything that decides which images this segment yields."""
        digest = hashlib.sha256(f"{self.domain}\n{self.images.name}\n".encode())
        digest.update(np.ascontiguousarray(self.rows, dtype="<i8").data)
        return digest.hexdigest()[:16]


class Stream:
    """Batches of one segment after another; a batch never spans two segments.

    Iterating continues from ``position``, the number of batches yielded so far, also after a ``break``; after the last
    batch it starts over. To resume a stream, set ``position`` to its earlier value. ``name`` describes the protocol,
    and ``hash`` differs between streams that yield other batches: results with the same hash are comparable.

    Args:
        name: The protocol and its settings.
        segments: The segments, in order.
        batch_size: Images per batch; the last batch of a segment may be smaller.
        read_ahead: Number of batches that background threads read while the model works, for images to be decoded.

    Raises:
        InputError: There are no segments, or one has no images.
    """

    def __init__(self, name: str, segments: Sequence[Segment], *, batch_size: int = 200, read_ahead: int = 0) -> None:
        batch_size = check_integer("batch_size", batch_size, 1)
        if not segments or any(len(segment.rows) == 0 for segment in segments):
            raise InputError(f"the stream {name!r} has no images, or a domain without images: give at least one each")
        self.name, self.segments, self.batch_size, self.read_ahead = name, tuple(segments), batch_size, read_ahead
        # Number of batches before each segment, and in total.
        self._starts = np.cumsum([0, *(segment.num_batches(batch_size) for segment in self.segments)])
        self._position = 0
        self._is_exhausted = False

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def domains(self) -> list[str]:
        """Domain of each segment, in order."""
        return [segment.domain for segment in self.segments]

    @property
    def visits(self) -> list[int]:
        """Visit of each segment, in order: 0 where the domains come for the first time, 1 where they come back, ..."""
        return [segment.visit for segment in self.segments]

    @cached_property
    def composition(self) -> Composition:
        """How sorted and how mixed the stream is: mean distinct classes and domains per batch; reads no image."""
        return measure_composition(self.segments, self.batch_size)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of the labels; empty if the dataset does not name them."""
        return self.segments[0].class_names

    @property
    def position(self) -> int:
        """Number of batches yielded since the start; set it to resume."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        self._position, self._is_exhausted = check_integer("position", value, 0, len(self)), False

    def __iter__(self) -> Iterator[Batch]:
        if self._is_exhausted:
            self.position = 0
        indices = range(self._position, len(self))
        batches = self._read_ahead(indices) if self.read_ahead else map(self.read_batch, indices)
        for index, batch in zip(indices, batches, strict=True):
            self._position, self._is_exhausted = index + 1, index + 1 == len(self)
            yield batch

    def _read_ahead(self, indices: range) -> Iterator[Batch]:
        """Yield batches that background threads have read."""
        with ThreadPoolExecutor(self.read_ahead) as pool:
            pending = deque(pool.submit(self.read_batch, index) for index in indices[: self.read_ahead])
            for index in indices:
                batch = pending.popleft().result()
                if index + self.read_ahead in indices:
                    pending.append(pool.submit(self.read_batch, index + self.read_ahead))
                yield batch

    def segment_index(self, batch_index: int) -> int:
        """Return which segment a batch belongs to.

        Args:
            batch_index: Index of the batch in the stream.

        Returns:
            Index of its segment.

        Raises:
            IndexError: There is no such batch.
        """
        if not 0 <= batch_index < len(self):
            raise IndexError(f"batch index must be from 0 to {len(self) - 1}, got {batch_index}")
        return int(np.searchsorted(self._starts, batch_index, side="right")) - 1

    def read_batch(self, batch_index: int) -> Batch:
        """Read one batch, independently of the position.

        Args:
            batch_index: Index of the batch in the stream.

        Returns:
            The batch.

        Raises:
            IndexError: There is no such batch.
        """
        number = self.segment_index(batch_index)
        segment, first = self.segments[number], (batch_index - int(self._starts[number])) * self.batch_size
        rows = segment.rows[first : first + self.batch_size]
        x, y = segment.images.read(rows)
        domains, index = segment.origins(rows)
        return Batch(x, y, segment.domain, torch.from_numpy(index.copy()), domains)

    @property
    def hash(self) -> str:
        """Hash of everything that decides which batches are yielded: images, their order, and the batch size."""
        parts = [str(self.batch_size), *(segment.digest for segment in self.segments)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def with_segments(self, suffix: str, segments: Sequence[Segment]) -> "Stream":
        """Return a stream of other segments with the same batch size.

        Args:
            suffix: What distinguishes the new stream, appended to the name.
            segments: The segments, in order.

        Returns:
            The new stream, at its start.
        """
        return Stream(f"{self.name} {suffix}", segments, batch_size=self.batch_size, read_ahead=self.read_ahead)

    def __repr__(self) -> str:
        return f"Stream({self.name!r}, {len(self.segments)} segments, {len(self)} batches of {self.batch_size})"


class Mixture:
    """The :class:`ctta.data.datasets.ImageDomain` of the images of several segments, one segment after the other."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.starts = np.cumsum([0, *(len(segment.rows) for segment in self.segments)])

    @property
    def name(self) -> str:
        """Name that identifies the images, the same on every machine."""
        return "mixture of " + " ".join(segment.digest for segment in self.segments)

    @property
    def labels(self) -> NDArray[np.integer[Any]] | None:
        """Label of each image; None if a segment has none."""
        parts = [segment.images.labels for segment in self.segments]
        if any(part is None for part in parts):
            return None
        pairs = zip(parts, self.segments, strict=True)
        return np.concatenate([part[segment.rows] for part, segment in pairs if part is not None])

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""
        return self.segments[0].class_names

    def __len__(self) -> int:
        return int(self.starts[-1])

    def origins(self, rows: Rows) -> tuple[tuple[str, ...], Rows]:
        """Return the domain of each image and its index within that domain."""
        domains, index = np.empty(len(rows), dtype=object), np.empty(len(rows), dtype=np.int64)
        for segment, inner_rows, places in self._group_by_segment(rows):
            domains[places], index[places] = segment.origins(inner_rows)  # the segment may itself be a mixture
        return tuple(domains), index

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Read some of the images, which must have the same size in all domains."""
        parts: list[tuple[Tensor, Tensor | None]] = []
        all_places, domains = [], []
        for segment, inner_rows, places in self._group_by_segment(rows):
            parts.append(segment.images.read(inner_rows))
            all_places.append(places)
            domains.append(segment.domain)
            for first, other in zip(parts[0], parts[-1], strict=True):
                if first is not None and other is not None and first.shape[1:] != other.shape[1:]:
                    sizes = [tuple(part.shape[-2:]) for part in (first, other)]
                    raise DataError(
                        f"images in a batch must have the same size, but {domains[0]} has {sizes[0]} pixels and "
                        f"{segment.domain} {sizes[1]}: resize the domains to one size, or use single(mixed(...))"
                    )
        order = torch.from_numpy(np.argsort(np.concatenate(all_places)))
        labels = [y for _, y in parts if y is not None]
        return torch.cat([x for x, _ in parts])[order], torch.cat(labels)[order] if len(labels) == len(parts) else None

    def _group_by_segment(self, rows: Rows) -> Iterator[tuple[Segment, Rows, Rows]]:
        """Yield each segment that rows refer to, the indices within its domain, and their places in ``rows``."""
        numbers = np.searchsorted(self.starts, rows, side="right") - 1
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            segment = self.segments[number]
            yield segment, segment.rows[rows[places] - self.starts[number]], places


def mixed(stream: Stream, *, seed: int = 0) -> Stream:
    """Shuffle all images of a stream together, so that a batch contains several domains.

    Args:
        stream: The stream to shuffle.
        seed: Seed of the order.

    Returns:
        A stream of one segment, "mixed"; ``batch.domains`` names the domain of each image.
    """
    mixture, seed = Mixture(stream.segments), check_integer("seed", seed, 0)
    rows = np.random.default_rng(seed).permutation(len(mixture))
    return stream.with_segments(f"mixed seed={seed}", [Segment("mixed", mixture, rows)])

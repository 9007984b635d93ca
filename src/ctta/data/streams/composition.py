"""How sorted and how mixed a stream is: distinct classes and domains per batch, from labels and rows alone."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctta.data.datasets.base import HasOrigins, Rows

if TYPE_CHECKING:
    from ctta.data.streams.stream import Segment


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
    """Count distinct classes and domains in every batch of a stream.

    Args:
        segments: The segments of the stream.
        batch_size: Images per batch.

    Returns:
        The figures; foreign images count as neither a class nor a domain.
    """
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
    if not isinstance(segment.images, HasOrigins):
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

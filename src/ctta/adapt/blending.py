"""How much of a batch's own statistics ``ctta adapt`` normalizes with, by how sure the source is of the batch."""

from collections import Counter
from dataclasses import dataclass

from ctta.nn import automatic_fraction

#: Mean confidence of the source above which a batch counts as one of those that it was trained for.
SURE_CONFIDENCE = 0.9
#: The largest fraction of the batch in the statistics for such a batch.
SURE_FRACTION = 0.1


def choose_fraction(num_images: int, confidence: float) -> float:
    """Return the fraction of the batch in the statistics where a method has ``batch_stats="blend"``.

    Batch statistics bring most where the source is unsure, and on images like those of its training they only cost
    right answers. A network that is sure of wrong answers keeps a part of the gain. Both limits were chosen by
    ``benchmarks/choose/blend.py``.

    Args:
        num_images: Size of the batch.
        confidence: Mean confidence of the source, with its own statistics.

    >>> choose_fraction(32, 0.7), choose_fraction(32, 0.95), choose_fraction(2, 0.95)
    (0.4, 0.1, 0.04)
    """
    fraction = automatic_fraction(num_images, "blend")
    return min(fraction, SURE_FRACTION) if confidence > SURE_CONFIDENCE else fraction


@dataclass(frozen=True)
class NormalizedBatches:
    """How batches of one size were normalized.

    Attributes:
        batch_size: Images per batch.
        num_batches: Number of such batches.
        batch_stats: Fraction of the batch in BatchNorm's statistics; the rest are the source's.
    """

    batch_size: int
    num_batches: int
    batch_stats: float


class NormalizationCounter:
    """Count the batches that were normalized alike."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, float]] = Counter()

    def add(self, num_images: int, fraction: float) -> None:
        """Count a batch."""
        self.counts[num_images, fraction] += 1

    def list_batches(self) -> list[NormalizedBatches]:
        """Return how the batches were normalized, the largest first; none if no layer uses batch statistics."""
        found = [NormalizedBatches(size, count, fraction) for (size, fraction), count in self.counts.items()]
        used = [batches for batches in found if batches.batch_stats > 0]
        return sorted(used, key=lambda batches: (-batches.batch_size, -batches.batch_stats))

"""What every score can do, whether of images or of pixels: add up, and say how far confidence can be trusted."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import nan
from typing import ClassVar, Self, TypeVar

from torch import Tensor

from ctta.evaluation.metrics.measure import Measure

NUM_BINS = 15  # of confidence, equally wide: the usual choice for the calibration error

#: Per bin of confidence: predictions, the sum of their confidence, right ones.
Bins = tuple[tuple[int, float, int], ...]

Kind = TypeVar("Kind", bound="Score")


class Score(ABC):
    """Some predictions, counted; scores of several batches add up to that of all."""

    measure: ClassVar[Measure]  # what tables show of it
    count: int  # images
    bins: Bins  # one prediction per image, or one per labelled pixel

    @property
    @abstractmethod
    def value(self) -> float:
        """The measure's figure."""

    @property
    @abstractmethod
    def error(self) -> float:
        """Share of wrong predictions."""

    @abstractmethod
    def __add__(self, other: Self) -> Self: ...

    @property
    def confidence(self) -> float:
        """Mean probability of the predicted class; nan without predictions."""
        return sum(total for _count, total, _right in self.bins) / (self._num_predictions or nan)

    @property
    def calibration_error(self) -> float:
        """ECE: how far confidence and accuracy lie apart, bin by bin, weighted by predictions."""
        return sum(abs(total - right) for _count, total, right in self.bins) / (self._num_predictions or nan)

    @property
    def _num_predictions(self) -> int:
        return sum(count for count, _total, _right in self.bins)

    @staticmethod
    def sum(scores: Iterable[Kind]) -> Kind:
        """All of them together."""
        first, *others = scores
        for other in others:
            first += other
        return first


def bins_of(confidence: Tensor, right: Tensor) -> Bins:
    """Predictions by their confidence, (N,) in double precision on the CPU; bins are closed above, as usual."""
    # A confidence of exactly 1/15 is in the first bin.
    places = (confidence * NUM_BINS).ceil().long().sub(1).clamp(0, NUM_BINS - 1)
    counts = places.bincount(minlength=NUM_BINS).tolist()
    totals = places.bincount(weights=confidence, minlength=NUM_BINS).tolist()
    rights = places[right].bincount(minlength=NUM_BINS).tolist()
    return tuple(zip(counts, totals, rights, strict=True))


def added(bins: Bins, others: Bins) -> Bins:
    """Bin by bin."""
    return tuple(
        (count + more, total + further, right + also)
        for (count, total, right), (more, further, also) in zip(bins, others, strict=True)
    )


def bins_from_json(bins: list[list[float]]) -> Bins:
    """What bins were written as."""
    return tuple((int(count), total, int(right)) for count, total, right in bins)

"""What scores of images and of pixels share: the metric of a table, sums over batches, and calibration."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import nan
from typing import Any, ClassVar, Literal, Self, TypeVar

from torch import Tensor

NUM_BINS = 15  # of equal width over the confidence: the usual choice for the calibration error

#: Per bin of confidence: number of predictions, sum of their confidence, number of correct ones.
Bins = tuple[tuple[int, float, int], ...]

AnyScore = TypeVar("AnyScore", bound="Score")


@dataclass(frozen=True)
class Metric:
    """A metric between 0 and 1 that a table compares methods by.

    Attributes:
        key: Name in files.
        name: Name in a sentence.
        title: Name in a heading.
        best: Which end of the range is better.
    """

    key: str
    name: str
    title: str
    best: Literal["lowest", "highest"]


ERROR = Metric("error", "error", "Error", best="lowest")
MIOU = Metric("miou", "mIoU", "mIoU", best="highest")
CONFIDENCE = Metric("confidence", "confidence", "Confidence", best="highest")  # of predictions without labels


class Score(ABC):
    """Counts of predictions; the scores of several batches add up to that of all.

    Attributes:
        metric: The metric that tables show.
        num_images: Number of images.
        bins: Predictions by confidence: one prediction per image, or one per labeled pixel.
    """

    metric: ClassVar[Metric]
    num_images: int
    bins: Bins

    @property
    def num_processed(self) -> int:
        """The number of images that the model has seen, also those that are not scored."""
        return self.num_images

    @property
    @abstractmethod
    def value(self) -> float:
        """The value of the metric."""

    @property
    @abstractmethod
    def error(self) -> float:
        """The fraction of wrong predictions."""

    @abstractmethod
    def __add__(self, other: Self) -> Self: ...

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the score as a JSON object, see :func:`ctta.evaluation.metrics.score_from_json`."""

    @property
    def confidence(self) -> float:
        """The mean probability of the predicted class; nan without predictions."""
        return sum(total for _count, total, _correct in self.bins) / (self._num_predictions or nan)

    @property
    def calibration_error(self) -> float:
        """The expected calibration error: the gap of confidence and accuracy per bin, weighted by predictions."""
        return sum(abs(total - correct) for _count, total, correct in self.bins) / (self._num_predictions or nan)

    @property
    def _num_predictions(self) -> int:
        return sum(count for count, _total, _correct in self.bins)

    @staticmethod
    def sum(scores: Iterable[AnyScore]) -> AnyScore:
        """Add up scores of the same kind.

        Args:
            scores: At least one score.

        Returns:
            The score of all predictions together.
        """
        first, *others = scores
        for other in others:
            first += other
        return first


def bin_confidences(confidence: Tensor, correct: Tensor) -> Bins:
    """Sort predictions into bins of confidence, which are closed above, as usual.

    Args:
        confidence: (N,) in double precision on the CPU.
        correct: (N,) booleans.

    Returns:
        The bins.
    """
    # A confidence of exactly 1/15 belongs to the first bin.
    indices = (confidence * NUM_BINS).ceil().long().sub(1).clamp(0, NUM_BINS - 1)
    counts = indices.bincount(minlength=NUM_BINS).tolist()
    totals = indices.bincount(weights=confidence, minlength=NUM_BINS).tolist()
    num_correct = indices[correct].bincount(minlength=NUM_BINS).tolist()
    return tuple(zip(counts, totals, num_correct, strict=True))


def add_bins(bins: Bins, others: Bins) -> Bins:
    """Return the sums, bin by bin."""
    return tuple(
        (count + other_count, total + other_total, correct + other_correct)
        for (count, total, correct), (other_count, other_total, other_correct) in zip(bins, others, strict=True)
    )


def bins_from_json(bins: list[list[float]]) -> Bins:
    """Return bins from the lists that JSON makes of them."""
    return tuple((int(count), total, int(correct)) for count, total, correct in bins)

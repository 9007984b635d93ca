"""Scores of one class per image and of predictions without labels: counts that add up over batches, and calibration."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import nan
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from ctta.data.datasets.base import IGNORE_LABEL
from ctta.errors import InputError

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


#: Classes are counted one by one up to this number; a line of the journal would become long.
MAX_COUNTED_CLASSES = 100


@dataclass(frozen=True)
class ImageScore(Score):
    """Counts of the predictions of some images.

    Attributes:
        num_images: Number of images.
        num_wrong: Number of wrong predictions.
        bins: Predictions by confidence.
        classes: Per class: number of images with this label, and number of correct predictions among them. Empty with
            more than 100 classes, and in files of earlier versions.
        num_ignored: Number of further images that are not scored, such as foreign ones; they count nowhere else.

    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
    >>> first, second = score_images(logits, torch.tensor([0, 1, 1])), score_images(logits[:1], torch.tensor([0]))
    >>> (first + second).error
    0.25
    """

    metric = ERROR
    num_images: int
    num_wrong: int
    bins: Bins
    classes: tuple[tuple[int, int], ...] = ()
    num_ignored: int = 0

    @property
    @override
    def value(self) -> float:
        return self.error

    @property
    @override
    def error(self) -> float:
        return self.num_wrong / self.num_images if self.num_images else nan

    @property
    @override
    def num_processed(self) -> int:
        return self.num_images + self.num_ignored

    @property
    def class_error(self) -> tuple[float | None, ...]:
        """The fraction of wrong predictions of each class; None for one without images, and nothing if not counted."""
        return tuple(1 - num_correct / number if number else None for number, num_correct in self.classes)

    @override
    def __add__(self, other: Self) -> Self:
        # Counts of a part of the images would be misleading: a run may have been started by an earlier version.
        is_counted = len(self.classes) == len(other.classes)
        pairs = zip(self.classes, other.classes, strict=True) if is_counted else ()
        return type(self)(
            self.num_images + other.num_images,
            self.num_wrong + other.num_wrong,
            add_bins(self.bins, other.bins),
            tuple((one[0] + another[0], one[1] + another[1]) for one, another in pairs),
            self.num_ignored + other.num_ignored,
        )

    @override
    def to_json(self) -> dict[str, Any]:
        counts = {"count": self.num_images, "wrong": self.num_wrong, "bins": self.bins}
        counts |= {"classes": self.classes} if self.classes else {}
        return counts | ({"ignored": self.num_ignored} if self.num_ignored else {})

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Return the score that :meth:`to_json` has described.

        Args:
            record: The parsed JSON object.

        Returns:
            An equal score.
        """
        classes = tuple((int(number), int(num_correct)) for number, num_correct in record.get("classes", ()))
        bins, num_ignored = bins_from_json(record["bins"]), record.get("ignored", 0)
        return cls(record["count"], record["wrong"], bins, classes, num_ignored)


@torch.no_grad()
def score_images(logits: Tensor, labels: Tensor) -> ImageScore:
    """Count correct and wrong predictions of a batch, by confidence.

    A prediction that is not finite counts as wrong, with confidence 0.

    Args:
        logits: (N, C).
        labels: (N,) integers in [0, C); images with the label :data:`ctta.data.datasets.IGNORE_LABEL` are not scored.

    Returns:
        The score of the batch.

    Raises:
        InputError: The shapes do not fit, or a label is out of range.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise InputError(
            "expected predictions (N, C) and labels (N,), or predictions (N, C, h, w) and label maps (N, H, W), "
            f"got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    is_scored = labels != IGNORE_LABEL
    num_ignored = int((~is_scored).sum())
    if num_ignored:
        logits, labels = logits[is_scored.to(logits.device)], labels[is_scored]
    num_classes = logits.shape[1]
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise InputError(
            f"labels range from {int(labels.min())} to {int(labels.max())}, but the model has {num_classes} classes: "
            "use the model for this dataset"
        )
    logits, labels = logits.cpu(), labels.cpu()  # sums on the CPU are deterministic
    finite = logits.isfinite().all(1)
    # In double precision, so that sums do not depend on how images were batched.
    probabilities = logits.double().softmax(1).where(finite[:, None], 0)
    confidence, predicted = probabilities.max(1)
    correct = (predicted == labels) & finite
    classes: tuple[tuple[int, int], ...] = ()
    if num_classes <= MAX_COUNTED_CLASSES:
        counts = (rows.bincount(minlength=num_classes).tolist() for rows in (labels, labels[correct]))
        classes = tuple(zip(*counts, strict=True))
    num_wrong = len(labels) - int(correct.sum())
    return ImageScore(len(labels), num_wrong, bin_confidences(confidence, correct), classes, num_ignored)


@dataclass(frozen=True)
class UnlabeledScore(Score):
    """Counts of the predictions of images without labels; there is no error and no calibration error.

    Attributes:
        num_images: Number of images.
        num_predicted: Number of images, or of pixels, that each class is predicted for.
        bins: Predictions by confidence, none of them counted as correct.

    >>> score = score_unlabeled(torch.tensor([[9.0, 0.0], [9.0, 0.0], [0.0, 9.0]]))
    >>> score.num_predicted, round(score.confidence, 3)
    ((2, 1), 1.0)
    """

    metric = CONFIDENCE
    num_images: int
    num_predicted: tuple[int, ...]
    bins: Bins

    @property
    @override
    def value(self) -> float:
        _raise_unlabeled("error")

    @property
    @override
    def error(self) -> float:
        _raise_unlabeled("error")

    @property
    @override
    def calibration_error(self) -> float:
        _raise_unlabeled("calibration error")

    @override
    def __add__(self, other: Self) -> Self:
        predicted = zip(self.num_predicted, other.num_predicted, strict=True)
        return type(self)(
            self.num_images + other.num_images,
            tuple(one + another for one, another in predicted),
            add_bins(self.bins, other.bins),
        )

    @override
    def to_json(self) -> dict[str, Any]:
        return {"count": self.num_images, "predicted": self.num_predicted, "bins": self.bins}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Return the score that :meth:`to_json` has described.

        Args:
            record: The parsed JSON object.

        Returns:
            An equal score.
        """
        return cls(record["count"], tuple(record["predicted"]), bins_from_json(record["bins"]))


@torch.no_grad()
def score_unlabeled(logits: Tensor) -> UnlabeledScore:
    """Count the predicted classes of a batch, by confidence.

    A prediction that is not finite has confidence 0 and counts for no class.

    Args:
        logits: (N, C) or (N, C, h, w).

    Returns:
        The score of the batch.
    """
    num_classes = logits.shape[1]
    counts, confidences = torch.zeros(num_classes, dtype=torch.long), []
    for row in logits.cpu():  # one by one: the logits of a street scene alone fill 160 MB
        values = row.double().reshape(num_classes, -1)
        finite = values.isfinite().all(0)
        confidence, predicted = values.softmax(0).max(0)
        counts += predicted[finite].bincount(minlength=num_classes)
        confidences.append(confidence.where(finite, 0))
    confidence = torch.cat(confidences)
    bins = bin_confidences(confidence, torch.zeros(len(confidence), dtype=torch.bool))
    return UnlabeledScore(len(logits), tuple(counts.tolist()), bins)


def _raise_unlabeled(what: str) -> NoReturn:
    raise InputError(
        f"there is no {what} without labels: evaluate batches of (x, y), or use confidence and num_predicted"
    )

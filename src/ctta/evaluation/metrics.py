"""Scores of images, of pixels, and of predictions without labels: counts that add up over batches; calibration."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import nan
from statistics import fmean
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from ctta.data.datasets import IGNORE_INDEX
from ctta.data.datasets.base import IGNORE_LABEL
from ctta.errors import InputError
from ctta.nn.surgery import resize

NUM_BINS = 15  # of equal width over the confidence: the usual choice for the calibration error

#: Per bin of confidence: number of predictions, sum of their confidence, number of correct ones.
Bins = tuple[tuple[int, float, int], ...]

#: The names of fields in files; those of ``_OPTIONAL`` are left out where they are empty.
_KEYS = {
    "num_images": "count",
    "num_wrong": "wrong",
    "num_ignored": "ignored",
    "num_labeled": "labelled",
    "num_predicted": "predicted",
    "num_correct": "right",
    "bins": "bins",
    "classes": "classes",
}
_OPTIONAL = ("classes", "num_ignored")

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
    def error(self) -> float:
        """The fraction of wrong predictions."""

    @property
    def value(self) -> float:
        """The value of the metric."""
        return self.error

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(_add, vars(self).values(), vars(other).values()))

    def to_json(self) -> dict[str, Any]:
        """Return the score as a JSON object, see :func:`score_from_json`."""
        return {_KEYS[name]: value for name, value in vars(self).items() if value or name not in _OPTIONAL}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Return the score that :meth:`to_json` has described."""
        return cls(**{name: _to_tuple(record[key]) for name, key in _KEYS.items() if key in record})

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
        """Add up scores of the same kind, at least one."""
        first, *others = scores
        for other in others:
            first += other
        return first


def bin_confidences(confidence: Tensor, correct: Tensor) -> Bins:
    """Sort predictions into bins of confidence, in double precision on the CPU; bins are closed above, as usual."""
    # A confidence of exactly 1/15 belongs to the first bin.
    indices = (confidence * NUM_BINS).ceil().long().sub(1).clamp(0, NUM_BINS - 1)
    counts = indices.bincount(minlength=NUM_BINS).tolist()
    totals = indices.bincount(weights=confidence, minlength=NUM_BINS).tolist()
    num_correct = indices[correct].bincount(minlength=NUM_BINS).tolist()
    return tuple(zip(counts, totals, num_correct, strict=True))


def _add(one: Any, other: Any) -> Any:
    """Add two counts, or all counts of two nested tuples."""
    return tuple(map(_add, one, other)) if isinstance(one, tuple) else one + other


def _to_tuple(value: Any) -> Any:
    """Return a number as it is, and the lists that JSON makes of nested tuples as tuples."""
    return tuple(map(_to_tuple, value)) if isinstance(value, list) else value


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
        if len(self.classes) == len(other.classes):
            return super().__add__(other)
        # Counts of a part of the images would be misleading: a run may have been started by an earlier version.
        return replace(self, classes=()) + replace(other, classes=())


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
    def error(self) -> float:
        _raise_unlabeled("error")

    @property
    @override
    def calibration_error(self) -> float:
        _raise_unlabeled("calibration error")


@torch.no_grad()
def score_unlabeled(logits: Tensor) -> UnlabeledScore:
    """Count the predicted classes of a batch (N, C) or (N, C, h, w), by confidence.

    A prediction that is not finite has confidence 0 and counts for no class.
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


@dataclass(frozen=True)
class PixelScore(Score):
    """Counts of the predicted label maps of some images, by class.

    These are the margins and the diagonal of the confusion matrix, which is all that IoU needs. The whole matrix would
    make a batch's line in a file grow with the square of the number of classes.

    Attributes:
        num_images: Number of images.
        num_labeled: Number of pixels labeled with each class.
        num_predicted: Number of labeled pixels that each class is predicted for.
        num_correct: Number of labeled pixels of each class that are predicted correctly.
        bins: Predictions of labeled pixels by confidence.

    >>> labels = torch.tensor([[[0, 0, 1, 255]]])
    >>> logits = torch.tensor([[[[1.0, 0.0, 0.0, 1.0]], [[0.0, 1.0, 1.0, 0.0]], [[-1.0, -1.0, -1.0, -1.0]]]])
    >>> score = score_pixels(logits, labels)
    >>> score.class_iou, score.miou    # the third class is neither labeled nor predicted, so it has no IoU
    ((0.5, 0.5, None), 0.5)
    """

    metric = MIOU
    num_images: int
    num_labeled: tuple[int, ...]
    num_predicted: tuple[int, ...]
    num_correct: tuple[int, ...]
    bins: Bins

    @property
    @override
    def value(self) -> float:
        return self.miou

    @property
    def class_iou(self) -> tuple[float | None, ...]:
        """The intersection over union of each class; None for a class that is neither labeled nor predicted."""
        counts = zip(self.num_correct, self.num_labeled, self.num_predicted, strict=True)
        unions = ((correct, labeled + predicted - correct) for correct, labeled, predicted in counts)
        return tuple(correct / union if union else None for correct, union in unions)

    @property
    def miou(self) -> float:
        """The mean IoU of all classes that are labeled or predicted; nan where no pixel is labeled.

        A class with neither has no IoU and does not count; one that is only predicted counts as 0, as in the script of
        Cityscapes and in mmsegmentation.
        """
        present = [iou for iou in self.class_iou if iou is not None]
        return fmean(present) if present else nan

    @property
    def num_pixels(self) -> int:
        """The number of labeled pixels; ignored ones count nowhere."""
        return sum(self.num_labeled)

    @property
    def pixel_accuracy(self) -> float:
        """The fraction of labeled pixels that are predicted correctly; nan where there are none."""
        return sum(self.num_correct) / self.num_pixels if self.num_pixels else nan

    @property
    @override
    def error(self) -> float:
        return 1 - self.pixel_accuracy


@torch.no_grad()
def score_pixels(logits: Tensor, labels: Tensor, *, ignore_index: int = IGNORE_INDEX) -> PixelScore:
    """Count the predictions of label maps, class by class, at the resolution of the labels.

    Logits of another size are resized first (bilinear), and the argmax is taken afterwards: resizing the argmax would
    give ragged edges. A pixel whose logits are not finite counts as wrong, with confidence 0 and for no class.

    Args:
        logits: (N, C, h, w).
        labels: (N, H, W) integers in [0, C), and ``ignore_index`` for pixels to ignore.
        ignore_index: The label of pixels to ignore.

    Returns:
        The score of the batch.

    Raises:
        InputError: The shapes do not fit, or a label is out of range.
        TypeError: The labels are not integers.
    """
    _check(logits, labels, ignore_index)
    num_classes = logits.shape[1]
    margins = torch.zeros(3, num_classes, dtype=torch.long)
    confidences, corrects = [], []
    # Image by image: the logits of one full-size street scene alone fill 160 MB.
    for image, truth in zip(logits, labels, strict=True):
        predicted, confidence = (values.cpu() for values in _predict(image, truth.shape))
        truth = truth.cpu().long()  # sums on the CPU are deterministic
        known = truth != ignore_index
        truth, predicted, confidence = truth[known], predicted[known], confidence[known]
        correct = predicted == truth
        for row, classes in enumerate((truth, predicted[predicted < num_classes], truth[correct])):
            margins[row] += classes.bincount(minlength=num_classes)
        confidences.append(confidence.double())
        corrects.append(correct)
    num_labeled, num_predicted, num_correct = (tuple(row) for row in margins.tolist())
    bins = bin_confidences(torch.cat(confidences), torch.cat(corrects))
    return PixelScore(len(labels), num_labeled, num_predicted, num_correct, bins)


def predict_label_map(logits: Tensor, size: torch.Size) -> Tensor:
    """Return the class of each pixel of an image (C, h, w) at the size of its labels, as it is scored."""
    return _predict(logits, size)[0]


def _predict(logits: Tensor, size: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the class and the confidence of each pixel of one image; class C where logits are not finite."""
    # In half precision, different logits could become equal.
    resized = logits[None].to(torch.promote_types(logits.dtype, torch.float32))
    if resized.shape[2:] != size:
        resized = resize(resized, size)
    highest, predicted = resized.max(1)
    confidence = (highest - resized.logsumexp(1)).exp()
    finite = resized.sum(1).isfinite()  # as isfinite().all(1), without a mask of all classes
    return predicted.where(finite, logits.shape[0])[0], confidence.where(finite, 0)[0]


def _check(logits: Tensor, labels: Tensor, ignore_index: int) -> None:
    given = f"{tuple(logits.shape)} and {tuple(labels.shape)}"
    if logits.ndim != 4 or labels.ndim != 3 or len(logits) != len(labels) or 0 in (*logits.shape, *labels.shape):
        raise InputError(f"expected predictions (N, C, h, w) and label maps (N, H, W) of the same images, got {given}")
    (height, width), (rows, columns) = logits.shape[2:], labels.shape[1:]
    if height != width and height * rows == width * columns:
        raise InputError(
            f"predictions and label maps have swapped height and width, got {given}: check for a transposed tensor or "
            "a size given as (width, height)"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"label maps must hold integers, got {labels.dtype}: convert class ids, such as with .long()")
    num_classes = logits.shape[1]
    known = labels[labels != ignore_index].long()  # not every 16-bit type has a minimum
    if len(known) and not 0 <= int(known.min()) <= int(known.max()) < num_classes:
        raise InputError(
            f"labels range from {int(known.min())} to {int(known.max())}, but the model has {num_classes} classes: "
            f"use the model for this dataset, and label pixels to ignore with {ignore_index}, or give their label as "
            "ignore_index="
        )


#: The score of a batch of any kind.
BatchScore = ImageScore | PixelScore | UnlabeledScore


def score_batch(logits: Tensor, labels: Tensor | None, *, ignore_index: int = IGNORE_INDEX) -> BatchScore:
    """Score the predictions of a batch: pixels where labels are maps, else images; their confidence without labels."""
    if labels is None:
        return score_unlabeled(logits)
    if labels.ndim == 3:
        return score_pixels(logits, labels, ignore_index=ignore_index)
    return score_images(logits, labels)


def score_from_json(record: dict[str, Any]) -> BatchScore:
    """Return the score that its ``to_json`` has described, of the class that was written."""
    if "labelled" in record:
        return PixelScore.from_json(record)
    return ImageScore.from_json(record) if "wrong" in record else UnlabeledScore.from_json(record)

"""Scores of one class per image: error and calibration."""

from dataclasses import dataclass
from math import nan
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from ctta.data.datasets.base import IGNORE_LABEL
from ctta.errors import InputError
from ctta.evaluation.metrics.scores import ERROR, Bins, Score, add_bins, bin_confidences, bins_from_json

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

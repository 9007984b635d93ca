"""Scores of label maps: IoU of every class, mIoU, pixel accuracy and calibration."""

from dataclasses import dataclass
from math import nan
from statistics import fmean
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from ctta.data.datasets import IGNORE_INDEX
from ctta.errors import InputError
from ctta.evaluation.metrics.scores import MIOU, Bins, Score, add_bins, bin_confidences, bins_from_json
from ctta.nn.surgery import resize

Counts = tuple[int, ...]  # number of pixels of each class


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
    num_labeled: Counts
    num_predicted: Counts
    num_correct: Counts
    bins: Bins

    @property
    @override
    def value(self) -> float:
        return self.miou

    @property
    def class_iou(self) -> tuple[float | None, ...]:
        """The intersection over union of each class; None for a class that is neither labeled nor predicted."""
        unions = [
            labeled + predicted - correct
            for labeled, predicted, correct in zip(self.num_labeled, self.num_predicted, self.num_correct, strict=True)
        ]
        return tuple(
            correct / union if union else None for correct, union in zip(self.num_correct, unions, strict=True)
        )

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

    @override
    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.num_images + other.num_images,
            _add_counts(self.num_labeled, other.num_labeled),
            _add_counts(self.num_predicted, other.num_predicted),
            _add_counts(self.num_correct, other.num_correct),
            add_bins(self.bins, other.bins),
        )

    @override
    def to_json(self) -> dict[str, Any]:
        return {
            "count": self.num_images,
            "labelled": self.num_labeled,
            "predicted": self.num_predicted,
            "right": self.num_correct,
            "bins": self.bins,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Return the score that :meth:`to_json` has described.

        Args:
            record: The parsed JSON object.

        Returns:
            An equal score.
        """
        labeled, predicted, correct = (tuple(record[name]) for name in ("labelled", "predicted", "right"))
        return cls(record["count"], labeled, predicted, correct, bins_from_json(record["bins"]))


def _add_counts(counts: Counts, others: Counts) -> Counts:
    return tuple(one + other for one, other in zip(counts, others, strict=True))


@torch.no_grad()
def score_pixels(logits: Tensor, labels: Tensor) -> PixelScore:
    """Count the predictions of label maps, class by class, at the resolution of the labels.

    Logits of another size are resized first (bilinear), and the argmax is taken afterwards: resizing the argmax would
    give ragged edges. A pixel whose logits are not finite counts as wrong, with confidence 0 and for no class.

    Args:
        logits: (N, C, h, w).
        labels: (N, H, W) integers in [0, C), and 255 for pixels to ignore.

    Returns:
        The score of the batch.

    Raises:
        InputError: The shapes do not fit, or a label is out of range.
        TypeError: The labels are not integers.
    """
    _check(logits, labels)
    num_classes = logits.shape[1]
    margins = torch.zeros(3, num_classes, dtype=torch.long)
    confidences, corrects = [], []
    # Image by image: the logits of one full-size street scene alone fill 160 MB.
    for image, truth in zip(logits, labels, strict=True):
        predicted, confidence = (values.cpu() for values in _predict(image, truth.shape))
        truth = truth.cpu().long()  # sums on the CPU are deterministic
        known = truth != IGNORE_INDEX
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
    """Return the predicted class of each pixel of one image, as it is scored.

    Args:
        logits: (C, h, w).
        size: (H, W) of the labels.

    Returns:
        (H, W) classes; C, which is no class, where logits are not finite.
    """
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


def _check(logits: Tensor, labels: Tensor) -> None:
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
    known = labels[labels != IGNORE_INDEX].long()  # not every 16-bit type has a minimum
    if len(known) and not 0 <= int(known.min()) <= int(known.max()) < num_classes:
        raise InputError(
            f"labels range from {int(known.min())} to {int(known.max())}, but the model has {num_classes} classes: "
            f"use the model for this dataset, and label pixels to ignore with {IGNORE_INDEX}"
        )

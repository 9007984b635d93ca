"""How good label maps are: IoU of every class, mIoU and pixel accuracy, as counts that add up over batches."""

from dataclasses import dataclass
from math import nan
from statistics import fmean
from typing import Any, Self

import torch
from torch import Tensor

from ctta.datasets.base import IGNORE_INDEX
from ctta.evaluation.metrics.measure import MIOU
from ctta.evaluation.metrics.score import Bins, Score, added, bins_from_json, bins_of
from ctta.surgery import resize

Counts = tuple[int, ...]  # of pixels, one for each class


@dataclass(frozen=True)
class PixelScore(Score):
    """The predicted label maps of some images, counted by class.

    Kept are the margins and the diagonal of the confusion matrix, which is all that IoU needs: the whole matrix would
    make a batch's line in a file grow with the square of the number of classes.

    >>> labels = torch.tensor([[[0, 0, 1, 255]]])
    >>> logits = torch.tensor([[[[1.0, 0.0, 0.0, 1.0]], [[0.0, 1.0, 1.0, 0.0]], [[-1.0, -1.0, -1.0, -1.0]]]])
    >>> counted = score_pixels(logits, labels)
    >>> counted.class_iou, counted.miou    # the third class is nowhere, and in no mean
    ((0.5, 0.5, None), 0.5)
    """

    measure = MIOU
    count: int
    labelled: Counts  # pixels of this class
    predicted: Counts  # labelled pixels taken for this class
    right: Counts  # both
    bins: Bins

    @property
    def value(self) -> float:
        return self.miou

    @property
    def class_iou(self) -> tuple[float | None, ...]:
        """Of each class, intersection over union of labels and predictions; None where there are neither."""
        unions = [
            labelled + predicted - right
            for labelled, predicted, right in zip(self.labelled, self.predicted, self.right, strict=True)
        ]
        return tuple(right / union if union else None for right, union in zip(self.right, unions, strict=True))

    @property
    def miou(self) -> float:
        """The mean of the IoU of all classes that labels or predictions have; nan where no pixel is labelled.

        A class with neither has no IoU, and does not count; one that is only predicted counts as 0. So do Cityscapes'
        own script and mmsegmentation.
        """
        present = [iou for iou in self.class_iou if iou is not None]
        return fmean(present) if present else nan

    @property
    def num_pixels(self) -> int:
        """Labelled ones; the ignored are in no figure."""
        return sum(self.labelled)

    @property
    def pixel_accuracy(self) -> float:
        """Share of labelled pixels that are right; nan where there are none."""
        return sum(self.right) / self.num_pixels if self.num_pixels else nan

    @property
    def error(self) -> float:
        return 1 - self.pixel_accuracy

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.count + other.count,
            _sums(self.labelled, other.labelled),
            _sums(self.predicted, other.predicted),
            _sums(self.right, other.right),
            added(self.bins, other.bins),
        )

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """What ``vars(score)`` was written as."""
        labelled, predicted, right = (tuple(record[name]) for name in ("labelled", "predicted", "right"))
        return cls(record["count"], labelled, predicted, right, bins_from_json(record["bins"]))


def _sums(counts: Counts, others: Counts) -> Counts:
    return tuple(one + other for one, other in zip(counts, others, strict=True))


@torch.no_grad()
def score_pixels(logits: Tensor, labels: Tensor) -> PixelScore:
    """Count the predictions of label maps, class by class, at the labels' own resolution.

    Logits of another size are resized to it (bilinear), and only then does the highest win: resizing the winners would
    give ragged edges. A pixel whose logits are not finite counts as wrong, with confidence 0 and for no class.

    Args:
        logits: (N, C, h, w).
        labels: (N, H, W) whole numbers in [0, C), and 255 for pixels to leave out.
    """
    _check(logits, labels)
    num_classes = logits.shape[1]
    margins = torch.zeros(3, num_classes, dtype=torch.long)
    confidences, rights = [], []
    # One by one: the logits of one full-size street scene alone fill 160 MB.
    for image, truth in zip(logits, labels, strict=True):
        predicted, confidence = (values.cpu() for values in _answers(image, truth.shape))
        truth = truth.cpu().long()  # sums are the same each time on the CPU
        known = truth != IGNORE_INDEX
        truth, predicted, confidence = truth[known], predicted[known], confidence[known]
        right = predicted == truth
        for row, classes in enumerate((truth, predicted[predicted < num_classes], truth[right])):
            margins[row] += classes.bincount(minlength=num_classes)
        confidences.append(confidence.double())
        rights.append(right)
    labelled, predicted_of, right_of = (tuple(row) for row in margins.tolist())
    bins = bins_of(torch.cat(confidences), torch.cat(rights))
    return PixelScore(len(labels), labelled, predicted_of, right_of, bins)


def label_map(logits: Tensor, size: torch.Size) -> Tensor:
    """The class of each pixel of one image (C, h, w) at the size of its labels, as it is scored.

    Where logits are not finite it is C, a class that there is not.
    """
    return _answers(logits, size)[0]


def _answers(logits: Tensor, size: torch.Size) -> tuple[Tensor, Tensor]:
    """The class of each pixel of one image and its confidence; a class that there is not, where nothing is finite."""
    # Half precision would make ties of what is none.
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
        raise ValueError(f"expected predictions (N, C, h, w) and label maps (N, H, W) of the same images, got {given}")
    (height, width), (rows, columns) = logits.shape[2:], labels.shape[1:]
    if height != width and height * rows == width * columns:
        raise ValueError(
            f"predictions and label maps lie across each other, got {given}: is one of them transposed, or a size "
            "given as (width, height)?"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"label maps must hold whole numbers, got {labels.dtype}: give class ids, such as .long()")
    num_classes, known = (
        logits.shape[1],
        labels[labels != IGNORE_INDEX].long(),
    )  # not all types of 16 bits have a minimum
    if len(known) and not 0 <= int(known.min()) <= int(known.max()) < num_classes:
        raise ValueError(
            f"label ids run from {int(known.min())} to {int(known.max())}, and the model knows {num_classes} classes: "
            f"is this the model for these data? Pixels to leave out have the label {IGNORE_INDEX}"
        )

"""Scores of predictions without labels: how confident they are, and which classes they name."""

from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from typing_extensions import override

from ctta.errors import InputError
from ctta.evaluation.metrics.scores import CONFIDENCE, Bins, Score, add_bins, bin_confidences, bins_from_json


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

"""How good predictions of one class per image are: error and calibration, as counts that add up over batches."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ctta.evaluation.metrics.measure import ERROR
from ctta.evaluation.metrics.score import Bins, Score, added, bins_from_json, bins_of


@dataclass(frozen=True)
class ImageScore(Score):
    """The predictions of some images, counted.

    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
    >>> first, second = score_images(logits, torch.tensor([0, 1, 1])), score_images(logits[:1], torch.tensor([0]))
    >>> (first + second).error
    0.25
    """

    measure = ERROR
    count: int
    wrong: int
    bins: Bins

    @property
    def value(self) -> float:
        return self.error

    @property
    def error(self) -> float:
        return self.wrong / self.count

    def __add__(self, other: Self) -> Self:
        return type(self)(self.count + other.count, self.wrong + other.wrong, added(self.bins, other.bins))

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """What ``vars(score)`` was written as."""
        return cls(record["count"], record["wrong"], bins_from_json(record["bins"]))


@torch.no_grad()
def score_images(logits: Tensor, labels: Tensor) -> ImageScore:
    """Count right and wrong predictions of a batch, by confidence.

    A prediction that is not finite counts as wrong, with confidence 0.

    Args:
        logits: (N, C).
        labels: (N,) whole numbers in [0, C).
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            "expected predictions (N, C) and labels (N,), or predictions (N, C, h, w) and label maps (N, H, W), "
            f"got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    num_classes = logits.shape[1]
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, and the model knows {num_classes} classes: "
            "is this the model for these data?"
        )
    logits, labels = logits.cpu(), labels.cpu()  # where sums are the same each time
    finite = logits.isfinite().all(1)
    # In double precision, so that sums do not depend on how images were batched.
    probabilities = logits.double().softmax(1).where(finite[:, None], 0)
    confidence, predicted = probabilities.max(1)
    right = (predicted == labels) & finite
    return ImageScore(len(labels), len(labels) - int(right.sum()), bins_of(confidence, right))

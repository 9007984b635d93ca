"""How good predictions are: error and calibration, as counts that add up over batches."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

NUM_BINS = 15  # of confidence, equally wide: the usual choice for the calibration error


@dataclass(frozen=True)
class Score:
    """The predictions of some images, counted; scores of several batches add up to that of all.

    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
    >>> first, second = score(logits, torch.tensor([0, 1, 1])), score(logits[:1], torch.tensor([0]))
    >>> (first + second).error
    0.25
    """

    count: int
    wrong: int
    bins: tuple[tuple[int, float, int], ...]  # per bin of confidence: images, the sum of their confidence, right ones

    @property
    def error(self) -> float:
        """Share of wrong predictions."""
        return self.wrong / self.count

    @property
    def confidence(self) -> float:
        """Mean probability of the predicted class."""
        return sum(total for _count, total, _right in self.bins) / self.count

    @property
    def calibration_error(self) -> float:
        """ECE: how far confidence and accuracy lie apart, bin by bin, weighted by images."""
        return sum(abs(total - right) for _count, total, right in self.bins) / self.count

    def __add__(self, other: "Score") -> "Score":
        bins = tuple(
            (count + more, total + further, right + also)
            for (count, total, right), (more, further, also) in zip(self.bins, other.bins, strict=True)
        )
        return Score(self.count + other.count, self.wrong + other.wrong, bins)

    @classmethod
    def sum(cls, scores: Iterable["Score"]) -> "Score":
        """All of them together."""
        first, *others = scores
        for other in others:
            first += other
        return first

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """What ``vars(score)`` was written as."""
        bins = tuple((count, total, right) for count, total, right in record["bins"])
        return cls(record["count"], record["wrong"], bins)


@torch.no_grad()
def score(logits: Tensor, labels: Tensor) -> Score:
    """Count right and wrong predictions of a batch, by confidence.

    A prediction that is not finite counts as wrong, with confidence 0.

    Args:
        logits: (N, C).
        labels: (N,) whole numbers in [0, C).
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"expected predictions (N, C) and labels (N,), got {tuple(logits.shape)} and {tuple(labels.shape)}"
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
    # Bins are closed above, as in the literature: a confidence of exactly 1/15 is in the first.
    places = (confidence * NUM_BINS).ceil().long().sub(1).clamp(0, NUM_BINS - 1)
    counts = places.bincount(minlength=NUM_BINS).tolist()
    totals = places.bincount(weights=confidence, minlength=NUM_BINS).tolist()
    rights = places[right].bincount(minlength=NUM_BINS).tolist()
    bins = tuple(zip(counts, totals, rights, strict=True))
    return Score(len(labels), len(labels) - int(right.sum()), bins)

"""Whether the answers of a run look worse than the source's, judged without labels at the end."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

COMPARE_EVERY = 4  # batches
MIN_IMAGES = 30  # that a warning needs, since few differences may be chance


class Predictions(NamedTuple):
    """Answers to a batch.

    Attributes:
        classes: Class of each image; that of most pixels if the network answers per pixel.
        confidences: Its probability; the mean over the pixels.
        label_maps: Class of each pixel (N, H, W), if the network answers per pixel.
    """

    classes: list[int]
    confidences: list[float]
    label_maps: Tensor | None = None


@dataclass(frozen=True)
class HarmLimits:
    """Limits of the signals; a signal divided by its limit is a score, and a warning is given at a score of 1.

    The defaults were chosen by ``benchmarks/choose/warning_limits.py``, on images and corruptions other than those of
    the published results. A corrupted domain changes many answers too, but there the source is unsure of them.

    Attributes:
        margin: Fraction of answers that may differ from the source's in addition to what its doubt explains.
        doubt: How often an answer may differ per unit of the source's doubt, one minus its confidence.
        confidence_loss: How much lower the mean confidence may be than the source's, if more answers differ than its
            doubt explains.
        class_loss: How much lower the entropy of the answered classes may be than the source's, relative to it.
    """

    margin: float = 0.05
    doubt: float = 4.0
    confidence_loss: float = 0.1
    class_loss: float = 0.5


DEFAULT_LIMITS = HarmLimits()


class AnswerComparison:
    """Answers of the adapted model beside the source's, for a sample of batches.

    Args:
        limits: When answers look worse.

    >>> comparison = AnswerComparison()
    >>> comparison.add(Predictions([0] * 40, [0.99] * 40), Predictions([0, 1] * 20, [0.95] * 40))
    >>> round(comparison.lost_classes, 2), comparison.score >= 1
    (1.0, True)
    """

    def __init__(self, limits: HarmLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self.num_images = self.num_changed = 0
        self.confidence_sum = self.source_confidence_sum = 0.0
        self.classes: Counter[int] = Counter()
        self.source_classes: Counter[int] = Counter()

    def should_compare(self, step: int) -> bool:
        """Return whether to ask the source about the batch of this step."""
        return step % COMPARE_EVERY == 0

    def add(self, adapted: Predictions, source: Predictions) -> None:
        """Add the answers to a batch."""
        self.num_images += len(adapted.classes)
        self.num_changed += sum(one != other for one, other in zip(adapted.classes, source.classes, strict=True))
        self.confidence_sum += sum(adapted.confidences)
        self.source_confidence_sum += sum(source.confidences)
        self.classes.update(adapted.classes)
        self.source_classes.update(source.classes)

    @property
    def changed(self) -> float:
        """Fraction of answers that differ from the source's."""
        return self.num_changed / max(self.num_images, 1)

    @property
    def confidence(self) -> float:
        """Mean confidence of the answers."""
        return self.confidence_sum / max(self.num_images, 1)

    @property
    def source_confidence(self) -> float:
        """Mean confidence of the source's answers."""
        return self.source_confidence_sum / max(self.num_images, 1)

    @property
    def lost_classes(self) -> float:
        """Decrease of the entropy of the answered classes, relative to the source's."""
        entropy = _entropy(self.source_classes)
        return 1 - _entropy(self.classes) / entropy if entropy > 0.1 else 0.0

    @property
    def score(self) -> float:
        """How much the answers look worse than the source's; from 1 on, a warning is due."""
        if self.num_images < MIN_IMAGES:
            return 0.0
        limits, doubt = self.limits, 1 - self.source_confidence
        loss = (self.source_confidence - self.confidence) / limits.confidence_loss
        return max(
            0.0,
            self.changed / (limits.margin + limits.doubt * doubt),
            self.lost_classes / limits.class_loss,
            min(loss, self.changed / max(doubt, 1e-9)),
        )

    def describe_harm(self) -> str | None:
        """Return a sentence if the answers look worse than the source's, else None."""
        if self.score < 1:
            return None
        signs = [
            f"{100 * self.changed:.0f} % of {self.num_images} compared ones differ",
            f"the mean confidence is {self.confidence:.2f} instead of {self.source_confidence:.2f}",
        ]
        if self.lost_classes >= self.limits.class_loss:
            share, before = (100 * _largest_share(counts) for counts in (self.classes, self.source_classes))
            signs.append(f"{share:.0f} % are of one class instead of {before:.0f} %")
        return f"the predictions look worse than those without adaptation. {', '.join(signs)}."


def _largest_share(counts: Counter[int]) -> float:
    return max(counts.values()) / counts.total()


def _entropy(counts: Counter[int]) -> float:
    total = counts.total()
    return -sum(count / total * math.log(count / total) for count in counts.values())

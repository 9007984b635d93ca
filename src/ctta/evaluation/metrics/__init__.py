"""Metrics of images and of pixels, as counts that add up over batches."""

from typing import Any

from torch import Tensor

from ctta.evaluation.metrics.pixels import PixelScore, predict_label_map, score_pixels
from ctta.evaluation.metrics.scores import (
    CONFIDENCE,
    ERROR,
    MIOU,
    NUM_BINS,
    ImageScore,
    Metric,
    Score,
    UnlabeledScore,
    score_images,
    score_unlabeled,
)

__all__ = [
    "CONFIDENCE",
    "ERROR",
    "MIOU",
    "NUM_BINS",
    "BatchScore",
    "ImageScore",
    "Metric",
    "PixelScore",
    "Score",
    "UnlabeledScore",
    "predict_label_map",
    "score_batch",
    "score_from_json",
    "score_images",
    "score_pixels",
    "score_unlabeled",
]

#: The score of a batch of any kind.
BatchScore = ImageScore | PixelScore | UnlabeledScore


def score_batch(logits: Tensor, labels: Tensor | None) -> BatchScore:
    """Score the predictions of a batch: pixels where labels are maps, else images; their confidence without labels.

    Args:
        logits: (N, C) or (N, C, h, w).
        labels: (N,) or (N, H, W) integers, or None.

    Returns:
        The score of the batch.
    """
    if labels is None:
        return score_unlabeled(logits)
    return score_pixels(logits, labels) if labels.ndim == 3 else score_images(logits, labels)


def score_from_json(record: dict[str, Any]) -> BatchScore:
    """Return the score that its ``to_json`` has described.

    Args:
        record: The parsed JSON object.

    Returns:
        An equal score, of the class that was written.
    """
    if "labelled" in record:
        return PixelScore.from_json(record)
    return ImageScore.from_json(record) if "wrong" in record else UnlabeledScore.from_json(record)

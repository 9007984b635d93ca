"""Metrics of images and of pixels, as counts that add up over batches."""

from typing import Any

from torch import Tensor

from ctta.evaluation.metrics.images import ImageScore, score_images
from ctta.evaluation.metrics.pixels import PixelScore, predict_label_map, score_pixels
from ctta.evaluation.metrics.scores import ERROR, MIOU, NUM_BINS, Metric, Score

__all__ = [
    "ERROR",
    "MIOU",
    "NUM_BINS",
    "ImageScore",
    "Metric",
    "PixelScore",
    "Score",
    "predict_label_map",
    "score_batch",
    "score_from_json",
    "score_images",
    "score_pixels",
]


def score_batch(logits: Tensor, labels: Tensor) -> ImageScore | PixelScore:
    """Score the predictions of a batch: pixels where labels are maps, else images.

    Args:
        logits: (N, C) or (N, C, h, w).
        labels: (N,) or (N, H, W) integers.

    Returns:
        The score of the batch.
    """
    return score_pixels(logits, labels) if labels.ndim == 3 else score_images(logits, labels)


def score_from_json(record: dict[str, Any]) -> ImageScore | PixelScore:
    """Return the score that its ``to_json`` has described.

    Args:
        record: The parsed JSON object.

    Returns:
        An equal score, of the class that was written.
    """
    return PixelScore.from_json(record) if "labelled" in record else ImageScore.from_json(record)

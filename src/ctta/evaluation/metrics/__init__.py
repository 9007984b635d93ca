"""How good predictions are, of images and of pixels, as counts that add up over batches."""

from typing import Any

from torch import Tensor

from ctta.evaluation.metrics.images import ImageScore, score_images
from ctta.evaluation.metrics.measure import ERROR, MIOU, Measure
from ctta.evaluation.metrics.pixels import PixelScore, label_map, score_pixels
from ctta.evaluation.metrics.score import NUM_BINS, Score

__all__ = [
    "ERROR",
    "MIOU",
    "NUM_BINS",
    "ImageScore",
    "Measure",
    "PixelScore",
    "Score",
    "label_map",
    "score",
    "score_from_json",
    "score_images",
    "score_pixels",
]


def score(logits: Tensor, labels: Tensor) -> ImageScore | PixelScore:
    """The score of a batch: of pixels where labels are maps (N, H, W), else of images."""
    return score_pixels(logits, labels) if labels.ndim == 3 else score_images(logits, labels)


def score_from_json(record: dict[str, Any]) -> ImageScore | PixelScore:
    """What ``vars(score)`` was written as."""
    return PixelScore.from_json(record) if "labelled" in record else ImageScore.from_json(record)

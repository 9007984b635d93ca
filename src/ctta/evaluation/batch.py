"""One batch of an evaluation: predict, adapt, score, and check that the score fits the others."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ctta.core.model import AdaptiveModel
from ctta.data.streams import Batch
from ctta.errors import ConfigError, DataError
from ctta.evaluation.environment import PeakMemory
from ctta.evaluation.metrics import BatchScore, PixelScore, Score, score_batch, score_from_json
from ctta.evaluation.results import BatchRecord


def evaluate_batch(
    model: AdaptiveModel,
    batch: Batch,
    reference: Tensor,
    segment: int,
    memory: PeakMemory | None,
    *,
    waits: bool = True,
) -> tuple[BatchRecord, Tensor]:
    """Return the record of a batch, and the logits of this rank's rows.

    If the stream does not wait for an update, the batch is answered without one.
    """
    rows = model.coordinator.local_rows(len(batch.x))
    x, labels = batch.x[rows].to(reference), None if batch.y is None else batch.y[rows]
    num_steps_before, started = model.num_steps, time.perf_counter()
    logits = model(x) if waits else model.predict_once(x)
    if reference.is_cuda:
        torch.cuda.synchronize(reference.device)
    seconds = time.perf_counter() - started
    scores = model.coordinator.all_gather_object(lambda: score_batch(logits, labels).to_json() if len(x) else None)
    step = model.last_step if model.num_steps > num_steps_before else None
    record = BatchRecord(
        segment=segment,
        score=Score.sum(score_from_json(part) for part in scores if part is not None),
        seconds=seconds,
        peak_mib=memory.read_mib() if memory else None,
        loss=_to_float(step.loss) if step else None,
        confidence=_to_float(step.confidence) if step else None,
        augmented=_to_float(step.augmented) if step else None,
        skipped=step.skipped if step else False,
    )
    return record, logits


def check_classes(score: BatchScore, names: tuple[str, ...]) -> None:
    """Raise if the model predicts another number of classes than the dataset has."""
    # The range of labels cannot tell: labels of 19 classes are also valid for a network with 150.
    if names and isinstance(score, PixelScore) and len(score.num_labeled) != len(names):
        raise ConfigError(
            f"the model has {len(score.num_labeled)} classes, but the dataset has {len(names)} "
            f"({', '.join(names[:3])}, ...): use the model for this dataset"
        )


def check_same_kind(score: BatchScore, records: Sequence[BatchRecord], domain: str) -> None:
    """Raise if a batch has labels of another kind than those before it, whose scores cannot be added up."""
    if records and type(records[-1].score) is not type(score):
        raise DataError(
            f"batch {len(records)}, of {domain}, has no labels or others than those before it: label all batches in "
            "the same way, or none"
        )


def check_labeled(segment: Sequence[BatchScore], domain: str) -> None:
    """Raise if a whole segment has no labeled pixel, or no labeled image; a single batch may have none."""
    if not any(score.num_pixels if isinstance(score, PixelScore) else score.num_images for score in segment):
        num_images = sum(score.num_processed for score in segment)
        kind = "pixel" if isinstance(segment[0], PixelScore) else "image"
        raise DataError(
            f"{domain} has no labeled {kind} in {num_images} images, so it cannot be scored: the labels of test splits "
            "are often withheld; use a split that has them"
        )


def _to_float(value: Tensor | None) -> float | None:
    """Return a finite value as a float; None for one that is missing or not finite, which JSON cannot hold."""
    number = None if value is None else float(value)
    return number if number is not None and abs(number) < float("inf") else None

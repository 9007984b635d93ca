"""Evaluate one method on one stream: predict, adapt, score; resumable after being killed."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctta.base import AdaptiveModel
from ctta.checkpoint.fingerprint import source_fingerprint
from ctta.errors import ConfigError, DataError
from ctta.evaluation.environment import PeakMemory, describe_environment
from ctta.evaluation.journal import Journal
from ctta.evaluation.label_maps import save_label_maps
from ctta.evaluation.metrics import ImageScore, PixelScore, Score, score_batch, score_from_json
from ctta.evaluation.results import BatchRecord, Result
from ctta.hyperparameters import format_hyperparameters, format_value
from ctta.streams import Batch, Stream


def evaluate(
    model: AdaptiveModel,
    stream: Stream,
    *,
    reset_at_domain: bool = False,
    folder: str | os.PathLike[str] | None = None,
    save_every: float = 20.0,
    name: str | None = None,
    labels: dict[str, Any] | None = None,
    on_batch: Callable[[BatchRecord], None] | None = None,
) -> Result:
    """Send a stream through a model and score its predictions as they come.

    Where labels are maps (N, H, W), pixels are scored at the resolution of the maps (:mod:`ctta.evaluation.metrics`).
    With a model on several ranks (:func:`ctta.distributed.data_parallel`), every rank is given the same stream, takes
    its rows of each batch, and returns the whole result; rank 0 writes the folder.

    Args:
        model: A new model; it adapts unless it is frozen.
        stream: A stream with labels, evaluated from its start; the model sees the images only.
        reset_at_domain: Whether to reset the model at the start of each segment (the starred rows of the paper's
            tables).
        folder: Where to write a record of every batch and, at intervals, the state. If it holds part of the same
            evaluation, that is resumed, and the result equals that of an uninterrupted one (a copy of ``model`` adapts
            then). The predicted label maps of the last segment of each domain are saved too, in ``maps``.
        save_every: Seconds between two saves of the state; 0 saves after every batch.
        name: Name of the method in tables; by default that of the class.
        labels: What distinguishes this result from others, such as the number of an order; plain JSON.
        on_batch: Called with the record of each batch, to show progress; if it raises, the state is saved first.

    Returns:
        The result, with the records of all batches.

    Raises:
        ConfigError: The model has already adapted, or does not fit the stream, or the folder holds another evaluation.
        DataError: The stream has no labels.

    >>> import ctta, numpy as np
    >>> images, labels = np.zeros((20, 32, 32, 3), np.uint8), np.zeros(20, np.int64)
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))
    >>> data = ctta.datasets.Corrupted(images, labels, name="black")
    >>> stream = ctta.streams.continual(data, names=("brightness", "contrast"), batch_size=10)
    >>> result = ctta.evaluate(ctta.Source(net), stream)
    >>> len(result.errors), 0 <= result.error <= 1
    (2, True)
    """
    if model.num_steps:
        raise ConfigError(f"the model has already adapted to {model.num_steps} batches: pass a new model or a fork()")
    reference = next(iter(model.source.parameters()), torch.empty(0))
    about = {
        "method": name or type(model).__name__,
        "settings": _format_settings(model),
        "source": source_fingerprint(model.source),
        "stream": stream.name,
        "stream_hash": stream.hash,
        "domains": stream.domains,
        "num_batches": len(stream),
        "reset_at_domain": reset_at_domain,
        "labels": labels or {},
        "environment": describe_environment(reference.device),
        **({"class_names": stream.class_names} if stream.class_names else {}),
    }
    coordinator, journal = model.coordinator, None

    def resume() -> list[str]:
        nonlocal journal, model
        if folder is None:
            return []
        journal = Journal(Path(folder), about, save_every=save_every)
        model, done = journal.resume(model)
        return [record.to_json() for record in done]

    records = [BatchRecord.from_json(line) for line in coordinator.run_on_rank_zero(resume)]
    if records:
        model = model if coordinator.is_rank_zero else model.fork()
        model.coordinator = coordinator
        coordinator.broadcast_state_(model)
    memory = PeakMemory(reference.device)
    stream.position = len(records)
    last_segments = {domain: segment for segment, domain in enumerate(stream.domains)}
    for index, batch in zip(range(len(records), len(stream)), stream, strict=True):
        segment = stream.segment_index(index)
        if reset_at_domain and records and records[-1].segment != segment:
            model.reset()
        record, logits = _evaluate_batch(model, batch, reference, segment, memory)
        _check_classes(record.score, stream.class_names)
        records.append(record)
        if index + 1 == len(stream) or stream.segment_index(index + 1) != segment:
            _check_labeled([record.score for record in records if record.segment == segment], batch.domain)
        has_maps = batch.y is not None and batch.y.ndim == 3
        if folder is not None and has_maps and segment == last_segments[batch.domain]:
            logits = coordinator.all_gather(logits)
            if journal and batch.y is not None:
                save_label_maps(journal.folder, index, logits, batch.y)
        if journal:
            journal.append(record)
            if journal.schedule.is_due:
                journal.save(model, len(records))
        try:
            if on_batch:
                on_batch(record)
        except BaseException:
            if journal:
                journal.save(model, len(records))
            raise
    if journal:
        journal.finish()
    return Result.from_batches(about, records)


def _format_settings(model: AdaptiveModel) -> dict[str, str]:
    """Format every hyperparameter; for a wrapper also those of the model inside, as ``model``."""
    settings = {name: format_value(value) for name, value in model.hyperparameters.items()}
    if model.wrapped is not None:
        inside = format_hyperparameters(model.unwrapped.hyperparameters)
        settings["model"] = f"{type(model.unwrapped).__name__}({inside})"
    return settings


def _evaluate_batch(
    model: AdaptiveModel, batch: Batch, reference: Tensor, segment: int, memory: PeakMemory
) -> tuple[BatchRecord, Tensor]:
    """Return the record of a batch, and the logits of this rank's rows."""
    if batch.y is None:
        raise DataError(f"{batch.domain} has no labels to score predictions against: use a labeled stream")
    rows = model.coordinator.local_rows(len(batch.x))
    x, labels = batch.x[rows].to(reference), batch.y[rows]
    num_steps_before, started = model.num_steps, time.perf_counter()
    logits = model(x)
    if reference.is_cuda:
        torch.cuda.synchronize(reference.device)
    seconds = time.perf_counter() - started
    scores = model.coordinator.all_gather_object(lambda: score_batch(logits, labels).to_json() if len(labels) else None)
    step = model.last_step if model.num_steps > num_steps_before else None
    record = BatchRecord(
        segment=segment,
        score=Score.sum(score_from_json(part) for part in scores if part is not None),
        seconds=seconds,
        peak_mib=memory.read_mib(),
        loss=_to_float(step.loss) if step else None,
        confidence=_to_float(step.confidence) if step else None,
        augmented=_to_float(step.augmented) if step else None,
        skipped=step.skipped if step else False,
    )
    return record, logits


def _check_classes(score: ImageScore | PixelScore, names: tuple[str, ...]) -> None:
    """Raise if the model predicts another number of classes than the dataset has."""
    # The range of labels cannot tell: labels of 19 classes are also valid for a network with 150.
    if names and isinstance(score, PixelScore) and len(score.num_labeled) != len(names):
        raise ConfigError(
            f"the model has {len(score.num_labeled)} classes, but the dataset has {len(names)} "
            f"({', '.join(names[:3])}, ...): use the model for this dataset"
        )


def _check_labeled(segment: Sequence[ImageScore | PixelScore], domain: str) -> None:
    """Raise if a whole segment has no labeled pixel, and so no mIoU; a single scene may have none."""
    if not any(isinstance(score, ImageScore) or score.num_pixels for score in segment):
        num_images = sum(score.num_images for score in segment)
        raise DataError(
            f"{domain} has no labeled pixel in {num_images} images, so it cannot be scored: the labels of test splits "
            "are often withheld; use a split that has them"
        )


def _to_float(value: Tensor | None) -> float | None:
    """Return a finite value as a float; None for one that is missing or not finite, which JSON cannot hold."""
    number = None if value is None else float(value)
    return number if number is not None and abs(number) < float("inf") else None

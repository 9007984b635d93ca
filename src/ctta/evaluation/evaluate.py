"""One method on one stream: predict, adapt, score; killed at any moment, it goes on where it was."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctta.base import AdaptiveModel
from ctta.checkpoint.fingerprint import source_fingerprint
from ctta.evaluation.environment import PeakMemory, environment
from ctta.evaluation.journal import Journal
from ctta.evaluation.label_maps import keep_label_maps
from ctta.evaluation.metrics import ImageScore, PixelScore, Score, score, score_from_json
from ctta.evaluation.results import BatchRecord, Result, result_of
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
    """Send a stream through a model and score its answers as they come.

    Where labels are maps (N, H, W), pixels are scored, at the maps' own resolution (:mod:`ctta.evaluation.metrics`).
    Of a model on several ranks (:func:`ctta.distributed.data_parallel`), every rank is given the same stream, takes its
    rows of each batch, and gets the whole result; the first keeps the folder.

    Args:
        model: as new; it adapts unless it is frozen.
        stream: labelled, and gone through from its start; the model sees the images only.
        reset_at_domain: tell the model where a segment begins, by a reset (the starred rows of the paper's tables).
        folder: where to keep every batch's record and, from time to time, the state. If it already holds part of this
            very evaluation, that is gone on with, and the result is the same as if it had never been interrupted
            (``model`` then stays as new, and a copy of it goes on). Predicted label maps are kept too, in ``maps``,
            for the last segment of each domain.
        save_every: seconds between two saves of the state; 0 for after every batch.
        name: of the row in a table; by default the class's name.
        labels: what names this result among others, such as the number of an order; plain JSON.
        on_batch: called with each batch's record, to show progress; where it raises, the state is saved first.

    >>> import ctta, numpy as np
    >>> images, answers = np.zeros((20, 32, 32, 3), np.uint8), np.zeros(20, np.int64)
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))
    >>> data = ctta.datasets.Corrupted(images, answers, name="black")
    >>> stream = ctta.streams.continual(data, names=("brightness", "contrast"), batch_size=10)
    >>> result = ctta.evaluate(ctta.Source(net), stream)
    >>> len(result.errors), 0 <= result.error <= 1
    (2, True)
    """
    if model.num_steps:
        raise ValueError(f"the model has already adapted to {model.num_steps} batches: give a new one, or a fork()")
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
        "environment": environment(reference.device),
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
    last_of_domain = {domain: segment for segment, domain in enumerate(stream.domains)}
    for number, batch in zip(range(len(records), len(stream)), stream, strict=True):
        segment = stream.segment_of(number)
        if reset_at_domain and records and records[-1].segment != segment:
            model.reset()
        record, logits = _one_batch(model, batch, reference, segment, memory)
        _check_classes(record.score, stream.class_names)
        records.append(record)
        if number + 1 == len(stream) or stream.segment_of(number + 1) != segment:
            _check_labelled([record.score for record in records if record.segment == segment], batch.domain)
        has_maps = batch.y is not None and batch.y.ndim == 3
        if folder is not None and has_maps and segment == last_of_domain[batch.domain]:
            logits = coordinator.all_gather(logits)
            if journal and batch.y is not None:
                keep_label_maps(journal.folder, number, logits, batch.y)
        if journal:
            journal.append(record)
            if journal.pace.is_due:
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
    return result_of(about, records)


def _format_settings(model: AdaptiveModel) -> dict[str, str]:
    """Format every hyperparameter; for a wrapper also those of the model inside, as ``model``."""
    settings = {name: format_value(value) for name, value in model.hyperparameters.items()}
    if model.wrapped is not None:
        inside = format_hyperparameters(model.unwrapped.hyperparameters)
        settings["model"] = f"{type(model.unwrapped).__name__}({inside})"
    return settings


def _one_batch(
    model: AdaptiveModel, batch: Batch, reference: Tensor, segment: int, memory: PeakMemory
) -> tuple[BatchRecord, Tensor]:
    if batch.y is None:
        raise ValueError(f"{batch.domain} has no labels, and without them nothing can be scored")
    rows = model.coordinator.local_rows(len(batch.x))
    x, labels = batch.x[rows].to(reference), batch.y[rows]
    steps_before, started = model.num_steps, time.perf_counter()
    logits = model(x)
    if reference.is_cuda:
        torch.cuda.synchronize(reference.device)
    seconds = time.perf_counter() - started
    scores = model.coordinator.all_gather_object(lambda: vars(score(logits, labels)) if len(labels) else None)
    step = model.last_step if model.num_steps > steps_before else None
    record = BatchRecord(
        segment=segment,
        score=Score.sum(score_from_json(part) for part in scores if part is not None),
        seconds=seconds,
        peak_mib=memory.mib(),
        loss=_number(step.loss) if step else None,
        confidence=_number(step.confidence) if step else None,
        augmented=_number(step.augmented) if step else None,
        skipped=step.skipped if step else False,
    )
    return record, logits


def _check_classes(score: ImageScore | PixelScore, names: tuple[str, ...]) -> None:
    # Labels alone do not tell: those of 19 classes are also in the range of a network for 150.
    if names and isinstance(score, PixelScore) and len(score.labelled) != len(names):
        raise ValueError(
            f"the model knows {len(score.labelled)} classes, and the data {len(names)} ({', '.join(names[:3])}, ...): "
            "give the model for these data"
        )


def _check_labelled(segment: Sequence[ImageScore | PixelScore], domain: str) -> None:
    # At the end of the segment: a single scene may well be without labels, a whole domain has no mIoU then.
    if not any(isinstance(score, ImageScore) or score.num_pixels for score in segment):
        raise ValueError(
            f"{domain} has no labelled pixel in {sum(score.count for score in segment)} images, so it cannot be "
            "scored: the labels of test splits are often withheld; give a split that has them"
        )


def _number(value: Tensor | None) -> float | None:
    """As a float, or None for what is not there or not finite (JSON knows no NaN)."""
    number = None if value is None else float(value)
    return number if number is not None and abs(number) < float("inf") else None

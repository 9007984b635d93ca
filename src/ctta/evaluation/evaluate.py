"""Evaluate one method on one stream: predict, adapt, score; resumable after being killed."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ctta.core.hyperparameters import format_hyperparameters, format_value
from ctta.core.model import AdaptiveModel
from ctta.core.validation import check_integer
from ctta.data.streams import Stream
from ctta.errors import ConfigError, InputError
from ctta.evaluation.batch import check_classes, check_labeled, check_same_kind, evaluate_batch
from ctta.evaluation.environment import PeakMemory, describe_environment
from ctta.evaluation.inputs import PlainBatches, as_batches, as_model
from ctta.evaluation.journal import Journal, write_evaluation
from ctta.evaluation.label_maps import save_label_maps
from ctta.evaluation.passes import count_step_ratio, whole_ratio
from ctta.evaluation.progress import ProgressLine
from ctta.evaluation.results import BatchRecord, Result
from ctta.nn.surgery import source_fingerprint

OnBatch = Callable[[BatchRecord], None]


def evaluate(
    model: AdaptiveModel | nn.Module,
    stream: Stream | Iterable[Any] | Dataset[Any],
    *,
    batch_size: int | None = None,
    reset_at_domain: bool = False,
    step_ratio: int | Literal["auto"] = 1,
    folder: str | os.PathLike[str] | None = None,
    save_every: float = 20.0,
    name: str | None = None,
    labels: dict[str, Any] | None = None,
    progress: bool = False,
    on_batch: OnBatch | None = None,
) -> Result:
    """Send a stream through a model and score its predictions as they come.

    Where labels are maps (N, H, W), pixels are scored at the resolution of the maps (:mod:`ctta.evaluation.metrics`).
    Without labels the result has confidences and counts, and no error. With a model on several ranks
    (:func:`ctta.distributed.data_parallel`), every rank is given the same stream, takes its rows of each batch, and
    returns the whole result; rank 0 writes the folder.

    Args:
        model: A new model; it adapts unless it is frozen. A plain network is evaluated as :class:`ctta.Source`: it
            predicts in eval mode and does not adapt.
        stream: A stream of :mod:`ctta.data.streams`, evaluated from its start; the model sees the images only. Or a
            ``DataLoader``, or any iterable of batches ``(x, y)`` or ``x``, which is read once, in its order; or a
            ``Dataset``, which is shuffled, always in the same way; or arrays ``(images, labels)`` or ``images``.
            Bytes are divided by 255, floats are taken as they are.
        batch_size: Images per batch, for data of single images; by default 32.
        reset_at_domain: Whether to reset the model at the start of each segment (the starred rows of the paper's
            tables).
        step_ratio: For a stream that does not wait: how many times longer a step takes than a plain forward pass. Of
            every ``step_ratio`` batches the model adapts to the first; the others arrive during that step and are
            predicted by one pass of the adapted network (:meth:`ctta.AdaptiveModel.predict_once`). "auto" counts the
            passes of the method on the first batches of a stream, a backward pass as two forward passes. 1 waits for
            every step.
        folder: Where to write a record of every batch, for ``ctta report``. With a stream, also the state at
            intervals: if the folder holds part of the same evaluation, that is resumed, and the result equals that of
            an uninterrupted one (a copy of ``model`` adapts then). Other data cannot be compared with what a folder
            holds and is not resumed: the folder must be new and is written at the end. The predicted label maps of the
            last segment of each domain of a stream are saved too, in ``maps``.
        save_every: Seconds between two saves of the state; 0 saves after every batch.
        name: Name of the method in tables; by default that of the class.
        labels: What distinguishes this result from others, such as the number of an order; plain JSON.
        progress: Whether to show the progress on standard error.
        on_batch: Called with the record of each batch, to show progress; if it raises, the state is saved first.

    Returns:
        The result, with the records of all batches.

    Raises:
        ConfigError: The model has already adapted, or does not fit the stream, or the folder holds another evaluation.
        DataError: A domain has labels for some of its batches only, or no labeled pixel.
        InputError: A batch has images or labels in a form that is not known.
        TypeError: The model or the data is something else; the message says what to pass.

    >>> import ctta, numpy as np
    >>> images, labels = np.zeros((20, 32, 32, 3), np.uint8), np.zeros(20, np.int64)
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))
    >>> data = ctta.data.datasets.Corrupted(images, labels, name="black")
    >>> stream = ctta.data.streams.continual(data, names=("brightness", "contrast"), batch_size=10)
    >>> result = ctta.evaluate(ctta.Source(net), stream)
    >>> len(result.errors), 0 <= result.error <= 1
    (2, True)
    >>> result = ctta.evaluate(net, [(torch.rand(4, 3, 32, 32), torch.tensor([0, 1, 2, 3]))])
    >>> result.method, result.num_batches
    ('Source', 1)
    """
    model = as_model(model)
    batches = as_batches(stream, model, batch_size)
    name = name or type(model).__name__
    if isinstance(batches, PlainBatches):
        folders = {} if folder is None else {name: Path(folder)}
        results = evaluate_together(
            {name: model},
            batches,
            reset_at_domain=reset_at_domain,
            step_ratio=step_ratio,
            folders=folders,
            labels=labels,
            progress=progress,
            on_batch=on_batch,
        )
        return results[name]
    return _evaluate_stream(
        model,
        batches,
        name,
        reset_at_domain=reset_at_domain,
        step_ratio=step_ratio,
        folder=None if folder is None else Path(folder),
        save_every=save_every,
        labels=labels,
        listeners=[*([ProgressLine(name, len(batches))] if progress else []), *([on_batch] if on_batch else [])],
    )


def _evaluate_stream(
    model: AdaptiveModel,
    stream: Stream,
    name: str,
    *,
    reset_at_domain: bool,
    step_ratio: int | Literal["auto"],
    folder: Path | None,
    save_every: float,
    labels: dict[str, Any] | None,
    listeners: Sequence[OnBatch],
) -> Result:
    _check_new(model, name)
    if step_ratio == "auto":
        step_ratio = whole_ratio(count_step_ratio(model, stream))
    ratio = check_integer("step_ratio", step_ratio, 1)
    about = _describe(model, name, stream.name, stream.class_names, reset_at_domain, ratio, labels) | {
        "stream_hash": stream.hash,
        "domains": stream.domains,
        "num_batches": len(stream),
        "composition": stream.composition.to_json(),
        **({"visits": stream.visits} if any(stream.visits) else {}),
    }
    coordinator, journal = model.coordinator, None

    def resume() -> list[str]:
        nonlocal journal, model
        if folder is None:
            return []
        journal = Journal(folder, about, save_every=save_every)
        model, done = journal.resume(model)
        return [record.to_json() for record in done]

    records = [BatchRecord.from_json(line) for line in coordinator.run_on_rank_zero(resume)]
    if records:
        model = model if coordinator.is_rank_zero else model.fork()
        model.coordinator = coordinator
        coordinator.broadcast_state_(model)
    reference = _get_reference(model)
    memory = PeakMemory(reference.device)
    stream.position = len(records)
    last_segments = {domain: segment for segment, domain in enumerate(stream.domains)}
    for index, batch in zip(range(len(records), len(stream)), stream, strict=True):
        segment = stream.segment_index(index)
        if reset_at_domain and records and records[-1].segment != segment:
            model.reset()
        record, logits = evaluate_batch(model, batch, reference, segment, memory, waits=index % ratio == 0)
        check_classes(record.score, stream.class_names)
        check_same_kind(record.score, records, batch.domain)
        records.append(record)
        if index + 1 == len(stream) or stream.segment_index(index + 1) != segment:
            check_labeled([record.score for record in records if record.segment == segment], batch.domain)
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
            for listen in listeners:
                listen(record)
        except BaseException:
            if journal:
                journal.save(model, len(records))
            raise
    if journal:
        journal.finish()
    return Result.from_batches(about, records)


def evaluate_together(
    models: Mapping[str, AdaptiveModel],
    batches: PlainBatches,
    *,
    reset_at_domain: bool,
    folders: Mapping[str, Path],
    labels: dict[str, Any] | None,
    progress: bool,
    step_ratio: int | Literal["auto"] = 1,
    on_batch: OnBatch | None = None,
) -> dict[str, Result]:
    """Send batches that can be read only once through several models, batch by batch.

    Args:
        models: New models by name.
        batches: The batches.
        reset_at_domain: As for :func:`evaluate`.
        folders: New folders to write to, by name.
        labels: As for :func:`evaluate`.
        progress: As for :func:`evaluate`.
        step_ratio: As for :func:`evaluate`, a number.
        on_batch: As for :func:`evaluate`.

    Returns:
        The results by name.
    """
    if step_ratio == "auto":
        raise ConfigError(
            f"step_ratio='auto' counts passes on the first batches, and {batches.name} can be read only once: give a "
            "number, or a stream of ctta.data.streams"
        )
    ratio = check_integer("step_ratio", step_ratio, 1)
    for name, model in models.items():
        _check_new(model, name)
    for folder in folders.values():
        if (folder / "about.json").exists():
            raise ConfigError(
                f"{folder} holds an evaluation already, and {batches.name} cannot be compared with what that saw: use "
                "another folder, or a stream of ctta.data.streams, which resumes"
            )
    references = {name: _get_reference(model) for name, model in models.items()}
    memory = PeakMemory(next(iter(references.values())).device) if len(models) == 1 else None
    lines = {name: ProgressLine(name, batches.num_batches) for name in models} if progress else {}
    records: dict[str, list[BatchRecord]] = {name: [] for name in models}
    for batch in batches:
        for name, model in models.items():
            done = records[name]
            if reset_at_domain and done and done[-1].segment != batches.segment:
                model.reset()
            waits = len(done) % ratio == 0
            record, _logits = evaluate_batch(model, batch, references[name], batches.segment, memory, waits=waits)
            check_classes(record.score, batches.class_names)
            check_same_kind(record.score, done, batch.domain)
            done.append(record)
            if name in lines:
                lines[name](record)
            if on_batch:
                on_batch(record)
    for line in lines.values():
        line.finish()
    results = {}
    for name, model in models.items():
        if not records[name]:
            raise InputError(f"{batches.name} yields no batch: check the data; a generator can be read only once")
        for segment, domain in enumerate(batches.domains):
            check_labeled([record.score for record in records[name] if record.segment == segment], domain)
        about = _describe(model, name, batches.name, batches.class_names, reset_at_domain, ratio, labels) | {
            "stream_hash": batches.hash,
            "domains": batches.domains,
            "num_batches": len(records[name]),
        }
        if name in folders and model.coordinator.is_rank_zero:
            write_evaluation(folders[name], about, records[name])
        results[name] = Result.from_batches(about, records[name])
    return results


def _check_new(model: AdaptiveModel, name: str) -> None:
    if model.num_steps:
        raise ConfigError(
            f"the model {name!r} has already adapted to {model.num_steps} batches: pass a new model or a fork()"
        )


def _get_reference(model: AdaptiveModel) -> Tensor:
    """Return a tensor with the device and the data type that the model takes."""
    return next((each for each in model.source.parameters() if each.is_floating_point()), torch.empty(0))


def _describe(
    model: AdaptiveModel,
    name: str,
    stream: str,
    class_names: tuple[str, ...],
    reset_at_domain: bool,
    step_ratio: int,
    labels: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return what is evaluated, but for the batches."""
    return {
        "method": name,
        "settings": _format_settings(model),
        "source": source_fingerprint(model.source),
        "stream": stream,
        "reset_at_domain": reset_at_domain,
        "step_ratio": step_ratio,
        "labels": labels or {},
        "environment": describe_environment(_get_reference(model).device),
        **({"class_names": class_names} if class_names else {}),
    }


def _format_settings(model: AdaptiveModel) -> dict[str, str]:
    """Format every hyperparameter; for a wrapper also those of the model inside, as ``model``."""
    settings = {name: format_value(value) for name, value in model.hyperparameters.items()}
    if model.wrapped is not None:
        inside = format_hyperparameters(model.unwrapped.hyperparameters)
        settings["model"] = f"{type(model.unwrapped).__name__}({inside})"
    return settings

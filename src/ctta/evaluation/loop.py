"""The evaluation loop: a model over anything that yields batches; predict, adapt, score, and resume after a kill."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ctta.core.hyperparameters import format_hyperparameters, format_value
from ctta.core.model import AdaptiveModel
from ctta.core.validation import check_integer
from ctta.data.streams import Batch, Stream
from ctta.errors import ConfigError, DataError, InputError
from ctta.evaluation.environment import PeakMemory, describe_environment
from ctta.evaluation.inputs import PlainBatches, as_batches, as_model
from ctta.evaluation.journal import Journal, write_evaluation
from ctta.evaluation.label_maps import save_label_maps
from ctta.evaluation.metrics import BatchScore, PixelScore, Score, UnlabeledScore, score_batch, score_from_json
from ctta.evaluation.passes import count_step_ratio, whole_ratio
from ctta.evaluation.results import BatchRecord, Result
from ctta.nn.surgery import source_fingerprint

OnBatch = Callable[[BatchRecord], None]
ERASE_TO_END = "\x1b[K"
TERMINAL_INTERVAL, LOG_INTERVAL = 0.2, 10.0  # seconds between two lines of progress


def evaluate_batch(
    model: AdaptiveModel,
    batch: Batch,
    reference: Tensor,
    segment: int,
    memory: PeakMemory | None,
    *,
    adapt: bool = True,
) -> tuple[BatchRecord, Tensor]:
    """Send a batch through a model and score it.

    Args:
        model: The model.
        batch: The batch; every rank has the whole batch, and takes its rows.
        reference: A tensor with the device and the data type that the model takes.
        segment: Index of the segment that the batch belongs to.
        memory: Measures the peak memory, if given.
        adapt: Whether to adapt; else the batch is answered by one pass of the network as it is.

    Returns:
        The record of the batch, and the logits of this rank's rows.
    """
    rows = model.coordinator.local_rows(len(batch.x))
    x, labels = batch.x[rows].to(reference), None if batch.y is None else batch.y[rows]
    num_steps_before, started = model.num_steps, time.perf_counter()
    logits = model(x) if adapt else model.predict_once(x)
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


class _Evaluation:
    """A model on its way through batches, whatever they come from.

    Args:
        model: The model.
        name: Name of the method.
        reset_at_domain: As for :func:`evaluate`.
        step_ratio: As for :func:`evaluate`, a number.
        listeners: Called with the record of each batch.
        measures_memory: Whether to record the peak memory.
        journal: Where records and states are written.
        records: Records of the batches that are done already.
    """

    def __init__(
        self,
        model: AdaptiveModel,
        name: str,
        *,
        reset_at_domain: bool,
        step_ratio: int,
        listeners: Sequence[OnBatch],
        measures_memory: bool = True,
        journal: Journal | None = None,
        records: Sequence[BatchRecord] = (),
    ) -> None:
        self.model, self.name, self.reset_at_domain, self.step_ratio = model, name, reset_at_domain, step_ratio
        self.listeners, self.journal, self.records = listeners, journal, list(records)
        self.reference = _get_reference(model)
        self.memory = PeakMemory(self.reference.device) if measures_memory else None

    def step(self, batch: Batch, segment: int, class_names: tuple[str, ...]) -> Tensor:
        """Predict, adapt and score; return the logits of this rank's rows."""
        if self.reset_at_domain and self.records and self.records[-1].segment != segment:
            self.model.reset()
        adapt = len(self.records) % self.step_ratio == 0
        record, logits = evaluate_batch(self.model, batch, self.reference, segment, self.memory, adapt=adapt)
        check_classes(record.score, class_names)
        check_same_kind(record.score, self.records, batch.domain)
        self.records.append(record)
        return logits

    def check_labeled(self, segment: int, domain: str) -> None:
        """Raise if a segment that is complete cannot be scored."""
        check_labeled([record.score for record in self.records if record.segment == segment], domain)

    def publish(self) -> None:
        """Write the last record to the journal and tell the listeners; if one raises, the state is saved first."""
        record = self.records[-1]
        if self.journal:
            self.journal.append(record)
            if self.journal.schedule.is_due:
                self.journal.save(self.model, len(self.records))
        try:
            for listen in self.listeners:
                listen(record)
        except BaseException:
            if self.journal:
                self.journal.save(self.model, len(self.records))
            raise


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
    evaluation = _Evaluation(
        model,
        name,
        reset_at_domain=reset_at_domain,
        step_ratio=ratio,
        listeners=listeners,
        journal=journal,
        records=records,
    )
    stream.position = len(records)
    last_segments = {domain: segment for segment, domain in enumerate(stream.domains)}
    for index, batch in zip(range(len(records), len(stream)), stream, strict=True):
        segment = stream.segment_index(index)
        logits = evaluation.step(batch, segment, stream.class_names)
        if index + 1 == len(stream) or stream.segment_index(index + 1) != segment:
            evaluation.check_labeled(segment, batch.domain)
        has_maps = batch.y is not None and batch.y.ndim == 3
        if folder is not None and has_maps and segment == last_segments[batch.domain]:
            logits = coordinator.all_gather(logits)
            if journal and batch.y is not None:
                save_label_maps(journal.folder, index, logits, batch.y)
        evaluation.publish()
    if journal:
        journal.finish()
    return Result.from_batches(about, evaluation.records)


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
    lines = {name: ProgressLine(name, batches.num_batches) for name in models} if progress else {}
    evaluations = [
        _Evaluation(
            model,
            name,
            reset_at_domain=reset_at_domain,
            step_ratio=ratio,
            listeners=[*([lines[name]] if name in lines else []), *([on_batch] if on_batch else [])],
            measures_memory=len(models) == 1,
        )
        for name, model in models.items()
    ]
    for batch in batches:
        for evaluation in evaluations:
            evaluation.step(batch, batches.segment, batches.class_names)
            evaluation.publish()
    for line in lines.values():
        line.finish()
    results = {}
    for evaluation in evaluations:
        name, model, records = evaluation.name, evaluation.model, evaluation.records
        if not records:
            raise InputError(f"{batches.name} yields no batch: check the data; a generator can be read only once")
        for segment, domain in enumerate(batches.domains):
            evaluation.check_labeled(segment, domain)
        about = _describe(model, name, batches.name, batches.class_names, reset_at_domain, ratio, labels) | {
            "stream_hash": batches.hash,
            "domains": batches.domains,
            "num_batches": len(records),
        }
        if name in folders and model.coordinator.is_rank_zero:
            write_evaluation(folders[name], about, records)
        results[name] = Result.from_batches(about, records)
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


class ProgressLine:
    """Shows how far an evaluation is; call it with the record of each batch.

    Args:
        name: What is evaluated.
        num_batches: Number of batches in all, if known.
        file: Where to write; standard error by default.
    """

    def __init__(self, name: str, num_batches: int | None, file: TextIO | None = None) -> None:
        self.name, self.num_batches, self.file = name, num_batches, file or sys.stderr
        self.num_done, self._values, self._text = 0, 0.0, ""
        self._is_terminal = self.file.isatty()
        self._shown_at = time.monotonic()

    def __call__(self, record: BatchRecord) -> None:
        """Count a batch, and show it if it is time."""
        self.num_done += 1
        score = record.score
        self._values += score.confidence if isinstance(score, UnlabeledScore) else score.error
        what = "confidence" if isinstance(score, UnlabeledScore) else "error"
        total = "" if self.num_batches is None else f" of {self.num_batches}"
        value = f"{what} {100 * self._values / self.num_done:.1f} %"
        self._text = f"{self.name}: {self.num_done}{total} batches, {value}"
        interval = TERMINAL_INTERVAL if self._is_terminal else LOG_INTERVAL
        if self.num_done == self.num_batches:
            self.finish()
        elif time.monotonic() - self._shown_at >= interval:
            self._show(is_last=False)

    def finish(self) -> None:
        """Show the last batch, unless it has been shown."""
        if self._text:
            self._show(is_last=True)
            self._text = ""

    def _show(self, *, is_last: bool) -> None:
        # What is left of a longer line, which may be another method's, is erased.
        before, after = ("\r", ERASE_TO_END + "\n" * is_last) if self._is_terminal else ("", "\n")
        self.file.write(f"{before}{self._text}{after}")
        self.file.flush()
        self._shown_at = time.monotonic()

"""The evaluation loop: a model over anything that yields batches; predict, adapt, score, and resume after a kill."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ctta.core.hyperparameters import format_hyperparameters, format_value
from ctta.core.model import AdaptiveModel
from ctta.core.validation import check_integer
from ctta.data.datasets import IGNORE_INDEX
from ctta.data.streams import Batch, Stream
from ctta.errors import ConfigError, DataError, InputError
from ctta.evaluation.inputs import PlainBatches, as_batches, as_model
from ctta.evaluation.journal import Journal, write_evaluation
from ctta.evaluation.label_maps import save_label_maps
from ctta.evaluation.metrics import PixelScore, Score, UnlabeledScore, score_batch, score_from_json
from ctta.evaluation.results import BatchRecord, Result
from ctta.evaluation.steps import (
    PeakMemory,
    count_step_ratio,
    describe_environment,
    feed,
    step_batch,
    whole_ratio,
)
from ctta.nn.surgery import find_weight, source_fingerprint

OnBatch = Callable[[BatchRecord], None]
ERASE_TO_END = "\x1b[K"
TERMINAL_INTERVAL, LOG_INTERVAL = 0.2, 10.0  # seconds between two lines of progress


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
    ignore_index: int = IGNORE_INDEX,
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
        ignore_index: The label of pixels that are not scored.
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
    >>> data = ctta.data.datasets.ArrayDataset(images, labels, name="black")
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
        return evaluate_together(
            {name: model},
            batches,
            reset_at_domain=reset_at_domain,
            step_ratio=step_ratio,
            ignore_index=ignore_index,
            folders=folders,
            labels=labels,
            progress=progress,
            on_batch=on_batch,
        )[name]
    if step_ratio == "auto":
        step_ratio = whole_ratio(count_step_ratio(model, batches))
    line = ProgressLine(name, len(batches)) if progress else None
    evaluation = _Evaluation(model, name, reset_at_domain, step_ratio, ignore_index, line, on_batch)
    about = evaluation.describe(batches, len(batches), labels) | {
        "composition": batches.composition.to_json(),
        **({"visits": batches.visits} if any(batches.visits) else {}),
    }
    coordinator = model.coordinator

    def resume() -> list[str]:
        if folder is None:
            return []
        evaluation.journal = Journal(Path(folder), about, save_every=save_every)
        evaluation.model, done = evaluation.journal.resume(evaluation.model)
        return [record.to_json() for record in done]

    evaluation.records = [BatchRecord.from_json(line) for line in coordinator.run_on_rank_zero(resume)]
    num_done = len(evaluation.records)
    if num_done:
        if not coordinator.is_rank_zero:
            evaluation.model = model.fork()
        evaluation.model.coordinator = coordinator
        coordinator.broadcast_state_(evaluation.model)
    device = find_weight(model.source).device
    evaluation.memory = PeakMemory(device)
    batches.position = num_done
    last_segments = {domain: segment for segment, domain in enumerate(batches.domains)}
    for index, batch in zip(range(num_done, len(batches)), feed(batches, device), strict=True):
        segment = batches.segment_index(index)
        logits = evaluation.step(batch, segment, batches.class_names)
        if index + 1 == len(batches) or batches.segment_index(index + 1) != segment:
            evaluation.check_labeled(segment, batch.domain)
        has_maps = batch.y is not None and batch.y.ndim == 3
        if folder is not None and has_maps and segment == last_segments[batch.domain]:
            logits = coordinator.all_gather(logits)
            if evaluation.journal and batch.y is not None:
                save_label_maps(evaluation.journal.folder, index, logits, batch.y, ignore_index=ignore_index)
        evaluation.publish()
    if evaluation.journal:
        evaluation.journal.finish()
    return Result.from_batches(about, evaluation.records)


class _Evaluation:
    """A new model on its way through batches, whatever they come from, and the records of those that are done."""

    def __init__(
        self,
        model: AdaptiveModel,
        name: str,
        reset_at_domain: bool,
        step_ratio: int,
        ignore_index: int,
        *listeners: OnBatch | None,
    ) -> None:
        if model.num_steps:
            raise ConfigError(
                f"the model {name!r} has already adapted to {model.num_steps} batches: pass a new model or a fork()"
            )
        self.model, self.name, self.listeners = model, name, [listen for listen in listeners if listen]
        self.reset_at_domain, self.step_ratio = reset_at_domain, check_integer("step_ratio", step_ratio, 1)
        self.ignore_index = ignore_index
        self.memory: PeakMemory | None = None
        self.journal: Journal | None = None
        self.records: list[BatchRecord] = []

    def describe(self, data: Stream | PlainBatches, num_batches: int, labels: dict[str, Any] | None) -> dict[str, Any]:
        """Return what is evaluated, as in ``about.json``."""
        settings = {name: format_value(value) for name, value in self.model.hyperparameters.items()}
        if self.model.wrapped is not None:
            inside = self.model.unwrapped
            settings["model"] = f"{type(inside).__name__}({format_hyperparameters(inside.hyperparameters)})"
        return {
            "method": self.name,
            "settings": settings,
            "source": source_fingerprint(self.model.source),
            "stream": data.name,
            "reset_at_domain": self.reset_at_domain,
            "step_ratio": self.step_ratio,
            "labels": (labels or {})
            | ({} if self.ignore_index == IGNORE_INDEX else {"ignore_index": self.ignore_index}),
            "environment": describe_environment(find_weight(self.model.source).device),
            **({"class_names": data.class_names} if data.class_names else {}),
            "stream_hash": data.hash,
            "domains": data.domains,
            "num_batches": num_batches,
        }

    def step(self, batch: Batch, segment: int, class_names: tuple[str, ...]) -> Tensor:
        """Predict, adapt and score; return the logits of this rank's rows."""
        model = self.model
        if self.reset_at_domain and self.records and self.records[-1].segment != segment:
            model.reset()
        labels = None if batch.y is None else batch.y[model.coordinator.local_rows(len(batch.x))]
        num_steps_before, started = model.num_steps, time.perf_counter()
        logits = step_batch(model, batch.x, adapt=len(self.records) % self.step_ratio == 0)
        if logits.device.type != "cpu":
            torch.accelerator.synchronize(logits.device)
        seconds = time.perf_counter() - started
        parts = model.coordinator.all_gather_object(
            lambda: score_batch(logits, labels, ignore_index=self.ignore_index).to_json() if len(logits) else None
        )
        score = Score.sum(score_from_json(part) for part in parts if part is not None)
        # The range of labels cannot tell: labels of 19 classes are also valid for a network with 150.
        if class_names and isinstance(score, PixelScore) and len(score.num_labeled) != len(class_names):
            raise ConfigError(
                f"the model has {len(score.num_labeled)} classes, but the dataset has {len(class_names)} "
                f"({', '.join(class_names[:3])}, ...): use the model for this dataset"
            )
        if self.records and type(self.records[-1].score) is not type(score):
            raise DataError(
                f"batch {len(self.records)}, of {batch.domain}, has no labels or others than those before it: label "
                "all batches in the same way, or none"
            )
        step = model.last_step if model.num_steps > num_steps_before else None
        self.records.append(
            BatchRecord(
                segment=segment,
                score=score,
                seconds=seconds,
                peak_mib=self.memory.read_mib() if self.memory else None,
                loss=_to_float(step.loss) if step else None,
                confidence=_to_float(step.confidence) if step else None,
                augmented=_to_float(step.augmented) if step else None,
                skipped=step.skipped if step else False,
                updated=step is not None and step.updated,
            )
        )
        return logits

    def check_labeled(self, segment: int, domain: str) -> None:
        """Raise if a complete segment has no labeled pixel, or no labeled image; a single batch may have none."""
        scores = [record.score for record in self.records if record.segment == segment]
        if not any(score.num_pixels if isinstance(score, PixelScore) else score.num_images for score in scores):
            num_images = sum(score.num_processed for score in scores)
            kind = "pixel" if isinstance(scores[0], PixelScore) else "image"
            raise DataError(
                f"{domain} has no labeled {kind} in {num_images} images, so it cannot be scored: the labels of test "
                "splits are often withheld; use a split that has them"
            )

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


def evaluate_together(
    models: Mapping[str, AdaptiveModel],
    batches: PlainBatches,
    *,
    reset_at_domain: bool,
    folders: Mapping[str, Path],
    labels: dict[str, Any] | None,
    progress: bool,
    step_ratio: int | Literal["auto"] = 1,
    ignore_index: int = IGNORE_INDEX,
    on_batch: OnBatch | None = None,
) -> dict[str, Result]:
    """Send batches that can be read only once through several models, batch by batch; return the results by name."""
    if step_ratio == "auto":
        raise ConfigError(
            f"step_ratio='auto' counts passes on the first batches, and {batches.name} can be read only once: give a "
            "number, or a stream of ctta.data.streams"
        )
    lines = {name: ProgressLine(name, batches.num_batches) for name in models} if progress else {}
    evaluations = [
        _Evaluation(model, name, reset_at_domain, step_ratio, ignore_index, lines.get(name), on_batch)
        for name, model in models.items()
    ]
    for folder in folders.values():
        if (folder / "about.json").exists():
            raise ConfigError(
                f"{folder} holds an evaluation already, and {batches.name} cannot be compared with what that saw: use "
                "another folder, or a stream of ctta.data.streams, which resumes"
            )
    if len(evaluations) == 1:
        evaluations[0].memory = PeakMemory(find_weight(evaluations[0].model.source).device)
    for batch in batches:
        for evaluation in evaluations:
            evaluation.step(batch, batches.segment, batches.class_names)
            evaluation.publish()
    for line in lines.values():
        line.finish()
    results = {}
    for evaluation in evaluations:
        name, records = evaluation.name, evaluation.records
        if not records:
            raise InputError(f"{batches.name} yields no batch: check the data; a generator can be read only once")
        for segment, domain in enumerate(batches.domains):
            evaluation.check_labeled(segment, domain)
        about = evaluation.describe(batches, len(records), labels)
        if name in folders and evaluation.model.coordinator.is_rank_zero:
            write_evaluation(folders[name], about, records)
        results[name] = Result.from_batches(about, records)
    return results


class ProgressLine:
    """Shows how far an evaluation is; call it with the record of each batch."""

    def __init__(self, name: str, num_batches: int | None) -> None:
        self.name, self.num_batches, self.file = name, num_batches, sys.stderr
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
        if self.num_done == self.num_batches:
            self.finish()
        elif time.monotonic() - self._shown_at >= (TERMINAL_INTERVAL if self._is_terminal else LOG_INTERVAL):
            self._show()

    def finish(self) -> None:
        """Show the last batch, unless it has been shown."""
        if self._text:
            self._show(end="\n")
            self._text = ""

    def _show(self, end: str = "") -> None:
        # What is left of a longer line, which may be another method's, is erased.
        self.file.write(f"\r{self._text}{ERASE_TO_END}{end}" if self._is_terminal else f"{self._text}\n")
        self.file.flush()
        self._shown_at = time.monotonic()

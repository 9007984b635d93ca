"""Predict and adapt batch by batch, append the predictions to a table, save the state regularly, and sum up."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.adapt.label_maps import map_path, write_label_map
from ctta.adapt.predictions import CHANGED, ERROR, SHARE, PredictionFile, Predictions
from ctta.advise.input_check import check_size
from ctta.checkpoint.files import save
from ctta.core.hyperparameters import format_hyperparameters
from ctta.core.model import AdaptiveModel
from ctta.core.parallel import change_call
from ctta.core.registry import name_of
from ctta.data.datasets.image_files import Order
from ctta.errors import ConfigError, annotate_network_errors
from ctta.evaluation.journal import SaveSchedule
from ctta.evaluation.steps import step_batch
from ctta.guard import GainEstimate, Monitored
from ctta.guard.diagnostics import Baseline, reuse_source_pass, source_as_trained
from ctta.guard.estimate import GainMonitor, count_inputs, measure_inputs, record_inputs
from ctta.guard.summary import NUM_BINS, measure_answers
from ctta.io.atomic import NO_SPACE_ERRNOS
from ctta.nn import automatic_fraction, blends_automatically
from ctta.nn.surgery import find_weight, resize

if TYPE_CHECKING:
    from ctta.adapt.video import AnnotatedVideo

SECONDS_BETWEEN_SAVES = 20.0
#: Mean confidence of the source above which a batch counts as one of those that it was trained for.
SURE_CONFIDENCE = 0.9
#: The largest fraction of the batch in the statistics for such a batch.
SURE_FRACTION = 0.1


def choose_fraction(num_images: int, confidence: float) -> float:
    """Return the fraction of the batch in the statistics where a method has ``batch_stats="blend"``.

    Batch statistics bring most where the source is unsure, and on images like those of its training they only cost
    right answers. A network that is sure of wrong answers keeps a part of the gain. Both limits were chosen by
    ``benchmarks/choose/blend.py``.

    >>> choose_fraction(32, 0.7), choose_fraction(32, 0.95), choose_fraction(2, 0.95)
    (0.4, 0.1, 0.04)
    """
    fraction = automatic_fraction(num_images, "blend")
    return min(fraction, SURE_FRACTION) if confidence > SURE_CONFIDENCE else fraction


@dataclass(frozen=True)
class NormalizedBatches:
    """How batches of one size were normalized.

    Attributes:
        batch_size: Images per batch.
        num_batches: Number of such batches.
        batch_stats: Fraction of the batch in BatchNorm's statistics; the rest are the source's.
    """

    batch_size: int
    num_batches: int
    batch_stats: float


@dataclass(frozen=True)
class InferenceSummary:
    """Summary of one call of :func:`ctta.adapt.adapt_folder` or :func:`ctta.adapt.adapt_video`.

    Attributes:
        num_images: Images processed by this call.
        num_before: Images processed by earlier calls.
        num_unreadable: Images in the table that could not be read, by this call or earlier ones; the column ``error``
            says why. They are tried again by the next call.
        num_dropped: Images that an earlier call had processed without saving the state, processed again by this one.
        num_changed: Predictions that differ from those of the source network; None if not compared, or if the network
            answers per pixel.
        num_vanished: Images that were deleted before they could be read; if they come back, the next call processes
            them.
        num_skipped: Updates skipped because they were not finite.
        num_by_source: Images of this call for which the guard returned the source's prediction; None without a guard.
        confidence: Mean confidence of the predictions; None if there was no image.
        normalization: How the batches of each size were normalized, without those that the source answered; empty
            without batch statistics.
        seconds: Duration of the processing.
        method: Name of the method: a key of ``ctta.METHODS``, or the name of another class.
        settings: Hyperparameters of the method.
        order: "shuffle", "name" or "time"; the frames of a video come by time.
        events: Number of guard events of each kind, among the last hundred; None without a guard.
        warning: What makes the predictions look worse than the source's; None if nothing does.
        estimated_gain: Accuracy above the source's over the images of this call, estimated without labels; None with
            too few images, or if it cannot be told whether adaptation helped.
        estimated_gain_low: Lower end of its interval.
        estimated_gain_high: Upper end.
        estimated_images: Images that it was estimated from, also where it cannot be told; 0 with too few.
        changed: Fraction of the predictions, or of the pixels, that differ from the source's; None if not compared.
        maps: Folder of the label maps of a network that answers per pixel; None for one that does not, or a video.
        shares: Mean share of the pixels of each class, the largest first, where label maps are written.
        notice: What may be wrong with the images, such as their size; None if nothing was noticed.
    """

    num_images: int
    num_before: int
    num_unreadable: int
    num_dropped: int
    num_changed: int | None
    num_vanished: int
    num_skipped: int
    num_by_source: int | None
    confidence: float | None
    normalization: list[NormalizedBatches]
    seconds: float
    method: str
    settings: str
    order: Order
    events: dict[str, int] | None
    warning: str | None
    estimated_gain: float | None = None
    estimated_gain_low: float | None = None
    estimated_gain_high: float | None = None
    estimated_images: int = 0
    changed: float | None = None
    maps: str | None = None
    shares: dict[str, float] | None = None
    notice: str | None = None


@dataclass(frozen=True)
class InferenceBatch:
    """Images to predict, and how the table names them."""

    x: Tensor | None  # (N, C, H, W) in [0, 1]; None if none of the batch could be read
    names: Sequence[str]
    details: tuple[Sequence[str], ...] = ()  # further columns of the table, after the number of the step
    failed: Mapping[str, str] = field(default_factory=dict)  # why others of the batch could not be read, by name
    num_read: int = 0  # images that were to be read, for the progress
    frames: Sequence[NDArray[np.uint8]] = ()  # the images as the annotated clip shows them; empty without one


class InferenceRun:
    """One pass of a model over a stream of images.

    The model predicts and adapts; with ``compare`` the network as trained predicts every batch too. Where the network
    answers per pixel, which ``allow_pixels`` permits, a row of the table has the class of most pixels, and their mean
    confidence.
    """

    def __init__(
        self,
        model: AdaptiveModel,
        file: PredictionFile,
        state: Path | None,
        classes: Sequence[str] | None,
        *,
        compare: bool,
        allow_pixels: bool,
    ) -> None:
        self.writer: AnnotatedVideo | None = None  # takes the answers too; needs a comparison
        self.maps: Path | None = None  # the folder that label maps are written to
        self.shares = torch.zeros(0, dtype=torch.float64)  # of the pixels by class, sums over images
        self.notice: str | None = None
        self.allow_pixels = allow_pixels
        self.model, self.file, self.state, self.classes, self.compare = model, file, state, classes, compare
        self.num_images, self.num_failed = 0, 0
        self.num_classes = 1  # at most NUM_BINS, as far as it is known
        self.num_by_source, self.confidence_sum = 0, 0.0
        self.answers_pixels = False
        self.change_sum = 0.0  # of images whose answer differs from the source's; of parts of an image, for pixels
        self.gain = GainMonitor(count_inputs(model.source))
        self.normalization: Counter[tuple[int, float]] = Counter()  # batches by size and fraction
        self.schedule = SaveSchedule(SECONDS_BETWEEN_SAVES)
        self.processed: Sequence[str] = ()  # names that the table has, of earlier calls
        self.num_unreadable = self.num_dropped = 0
        self.num_vanished = 0  # images, or frames of a camera, that were not processed because they were gone
        self.num_skipped_before, self.started = model.num_skipped, time.perf_counter()

    def process(self, batches: Iterable[InferenceBatch], on_batch: Callable[[int], None]) -> None:
        """Process batches; save the state regularly and at the end, also after an error between two batches."""
        self.started = time.perf_counter()
        is_consistent, num_done = True, 0  # whether the model and the table are at the same step
        try:
            for batch in batches:
                num_done += batch.num_read
                step, is_consistent = self.model.num_steps, False  # half a step must not be saved
                if batch.x is not None:
                    self.process_batch(batch, batch.x)
                if batch.failed:
                    self.num_failed += len(batch.failed)
                    empty = [""] * (len(self.file.columns) - 3)
                    self._append([[name, step, *empty, reason] for name, reason in batch.failed.items()])
                is_consistent = True
                if self.schedule.is_due:
                    self.save()
                on_batch(num_done)
        finally:
            if is_consistent:
                self.save()

    @torch.no_grad()
    def process_batch(self, batch: InferenceBatch, x: Tensor) -> None:
        """Predict and adapt to the images of a batch, of which each rank takes its part; append the rows of all."""
        names, step = batch.names, self.model.num_steps
        blends = self.model.batch_stats == "blend" and blends_automatically(self.model.source)
        unadapted, baseline, inputs = None, Baseline(), torch.zeros(0)
        if blends or self.compare or not self.answers_pixels:  # an estimate of gain is for images, all of them

            def ask_source() -> Tensor:
                nonlocal baseline
                baseline = Baseline(self._ask_source(x))
                assert baseline.source_logits is not None
                return baseline.source_logits

            with record_inputs() as record:
                unadapted = self._gather(ask_source, x.shape[2:])
            inputs = self._gather_inputs(measure_inputs(source_as_trained(self.model.source), record))
        fraction = self.model.batch_fraction(len(x))
        if blends and unadapted is not None:
            fraction = choose_fraction(len(x), sum(unadapted.confidences) / len(x))
        with (
            change_call(fraction=fraction) if blends else nullcontext(),
            reuse_source_pass(self.model.source, x, baseline),
        ):
            adapted = self._gather(lambda: step_batch(self.model, x), x.shape[2:])
        if unadapted is not None and adapted.label_maps is None:  # it holds for images
            answers = measure_answers(*(torch.tensor(each.classes) for each in (adapted, unadapted)))
            self.gain.add_(answers, inputs, len(adapted.classes), step, self.num_classes)
        shown, changes = [adapted], list[float]()
        if self.compare and unadapted is not None:
            shown.append(unadapted)
            changes = _measure_changes(adapted, unadapted)
            self.change_sum += sum(changes)
        self.num_images, self.answers_pixels = self.num_images + len(names), adapted.label_maps is not None
        if isinstance(self.model, Monitored) and self.model.health.answered_by_source:
            self.num_by_source += len(names)
        else:
            self.normalization[len(x), fraction] += 1
        self.confidence_sum += float(torch.tensor(adapted.confidences, dtype=torch.float64).sum())
        columns = [column for predictions in shown for column in self._columns(predictions)]
        if CHANGED in self.file.columns:
            columns.append([f"{share:.4g}" for share in changes])
        if self.maps is not None and adapted.label_maps is not None:
            columns += self._write_maps(self.maps, names, adapted.label_maps)
        errors = [[""] * len(names)] if self.file.columns[-1] == ERROR else []
        self._append(zip(names, [step] * len(names), *batch.details, *columns, *errors, strict=True))
        if self.writer is not None:
            assert unadapted is not None, "a writer needs a comparison"
            self.writer.add(batch.frames, adapted, unadapted)

    def _write_maps(self, folder: Path, names: Sequence[str], maps: Tensor) -> list[list[str]]:
        """Write the label map of each image; return a column for each class with its share of the pixels."""
        num_classes = sum(column.startswith(SHARE) for column in self.file.columns)
        counts = [torch.bincount(labels.flatten(), minlength=num_classes) for labels in maps]  # without one-hot pixels
        shares = torch.stack(counts).double() / maps[0].numel()
        self.shares = shares.sum(0) + (self.shares if len(self.shares) else 0)
        if self.model.coordinator.is_rank_zero:
            with self.advise_on_full_disk(folder):
                for name, labels in zip(names, maps, strict=True):
                    write_label_map(map_path(folder, name), labels.numpy(), self.classes, num_classes)
        return [[f"{value:.4g}" for value in column.tolist()] for column in shares.T]

    def _append(self, rows: Iterable[Sequence[object]]) -> None:
        if self.model.coordinator.is_rank_zero:
            with self.advise_on_full_disk(self.file.path):
                self.file.append(rows)

    @torch.no_grad()
    def check_network(self, x: Tensor) -> None:
        """Raise if the network cannot predict a batch, or has another number of classes than there are names."""
        source, x = source_as_trained(self.model.source), x.to(find_weight(self.model.source))
        with annotate_network_errors(x), self.model.autocast():
            logits = source(x)
            self.read_answers(logits, x.shape[2:])
        if logits.ndim == 2 and x.ndim == 4 and (found := check_size(source, x)) is not None:
            self.notice = f"{found.describe()}."

    def _ask_source(self, x: Tensor) -> Tensor:
        """Return the logits of the network as trained for this rank's rows."""
        rows = x[self.model.coordinator.local_rows(len(x))].to(find_weight(self.model.source), non_blocking=True)
        with self.model.autocast():
            logits: Tensor = source_as_trained(self.model.source)(rows)
        return logits

    def _gather_inputs(self, inputs: Tensor) -> Tensor:
        """Return the mean over ranks, which hold about as many rows each."""
        return self.model.coordinator.all_gather(inputs.cpu().double()[None]).nanmean(0)  # a rank may have no rows

    def _gather(self, answer: Callable[[], Tensor], size: torch.Size) -> Predictions:
        """Return the answers of all ranks, each to its rows, which are images of a size."""
        own: list[Predictions] = []

        def read() -> tuple[list[int], list[float]]:
            own.append(self.read_answers(answer(), size))
            return own[0].classes, own[0].confidences

        classes, confidences = zip(*self.model.coordinator.all_gather_object(read), strict=True)
        maps = own[0].label_maps
        maps = None if maps is None else self.model.coordinator.all_gather(maps)
        return Predictions(list(chain(*classes)), list(chain(*confidences)), maps)

    def read_answers(self, logits: Tensor, size: torch.Size) -> Predictions:
        """Return the most probable class of each image and its probability, 0 where the logits are not finite.

        Label maps that are written have the size of the images, others that of the logits.
        """
        if logits.ndim != 2 and not self.allow_pixels:
            raise ConfigError(
                f"expected logits of shape (N, classes), got {tuple(logits.shape)}: use a network for classification"
            )
        if self.classes and len(self.classes) != logits.shape[1]:
            raise ConfigError(
                f"got {len(self.classes)} class names for a network with {logits.shape[1]} classes: "
                "give one per line, in the order of the network's outputs"
            )
        self.num_classes = min(logits.shape[1], NUM_BINS)
        probabilities = logits.cpu().double().softmax(1).nan_to_num(0.0)
        confidence, predicted = probabilities.max(1)
        if logits.ndim == 2:
            return Predictions(predicted.tolist(), confidence.tolist())
        if self.maps is not None and probabilities.shape[2:] != size:
            # Image by image: the probabilities of a batch of large images would fill the memory.
            resized = [resize(each[None], size).argmax(1) for each in probabilities]
            predicted = torch.cat([predicted.new_zeros(0, *size), *resized])  # a rank may have no image
        classes = [int(torch.bincount(labels).argmax()) for labels in predicted.flatten(1)]
        return Predictions(classes, confidence.flatten(1).mean(1).tolist(), predicted)

    def save(self) -> None:
        """Save the model, if there is a state file."""
        if self.state is None or not self.model.coordinator.is_rank_zero:
            return
        with self.schedule.saving(), self.advise_on_full_disk(self.state):
            if self.writer is not None:
                self.writer.flush_to_disk(self.model.num_steps)
            self.file.flush_to_disk()  # first: a power cut must not leave a state that is ahead of the rows
            save(self.model, self.state)

    @contextmanager
    def advise_on_full_disk(self, path: Path) -> Iterator[None]:
        """Say in the error of a disk without space what to do."""
        try:
            yield
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS:
                raise
            resume = " to resume from the last saved state" if self.state else ""
            raise OSError(error.errno, f"{error.strerror}: free some space and run again{resume}", str(path)) from error

    def summarize(self, *, num_before: int, order: Order) -> InferenceSummary:
        """Return what the run did, after earlier calls had processed ``num_before`` images in the same order."""
        model, is_compared = self.model, self.compare
        monitor = model if isinstance(model, Monitored) else None
        gain = self.gain.estimate_all()
        told = gain if gain is not None and gain.is_decided else None
        return InferenceSummary(
            num_images=self.num_images,
            num_before=num_before,
            num_unreadable=self.num_unreadable + self.num_failed,
            num_dropped=self.num_dropped,
            num_changed=round(self.change_sum) if is_compared and not self.answers_pixels else None,
            num_vanished=self.num_vanished,
            num_skipped=model.num_skipped - self.num_skipped_before,
            num_by_source=self.num_by_source if monitor else None,
            confidence=self.confidence_sum / self.num_images if self.num_images else None,
            normalization=self._list_normalization(),
            seconds=time.perf_counter() - self.started,
            method=name_of(type(model.unwrapped)),
            settings=format_hyperparameters(model.unwrapped.hyperparameters),
            order=order,
            events=dict(Counter(event.kind for event in monitor.events)) if monitor else None,
            warning=_describe_harm(told),
            estimated_gain=told.gain if told else None,
            estimated_gain_low=told.low if told else None,
            estimated_gain_high=told.high if told else None,
            estimated_images=gain.num_images if gain else 0,
            changed=self.change_sum / self.num_images if is_compared and self.num_images else None,
            maps=None if self.maps is None else str(self.maps),
            shares=self._list_shares(),
            notice=self.notice,
        )

    def _list_shares(self) -> dict[str, float] | None:
        if not len(self.shares):
            return None
        names = [column.removeprefix(SHARE) for column in self.file.columns if column.startswith(SHARE)]
        found = zip(names, (self.shares / self.num_images).tolist(), strict=True)
        return dict(sorted(found, key=lambda pair: -pair[1]))

    def _list_normalization(self) -> list[NormalizedBatches]:
        """Return how the batches were normalized, the largest first; none if no layer uses batch statistics."""
        found = [NormalizedBatches(size, count, fraction) for (size, fraction), count in self.normalization.items()]
        used = [batches for batches in found if batches.batch_stats > 0]
        return sorted(used, key=lambda batches: (-batches.batch_size, -batches.batch_stats))

    def _columns(self, predictions: Predictions) -> list[list[Any]]:
        names = [[self.classes[label] for label in predictions.classes]] if self.classes else []
        return [predictions.classes, *names, [f"{value:.6f}" for value in predictions.confidences]]


def _describe_harm(gain: GainEstimate | None) -> str | None:
    """Return a warning if the estimate says that adaptation harmed, else None."""
    if gain is None or not gain.is_harmful:
        return None
    return (
        f"adaptation seems to harm: {-100 * gain.high:.0f} to {-100 * gain.low:.0f} points of accuracy are lost, "
        f"estimated without labels from {gain.num_images} images. Label a few images to check."
    )


def _measure_changes(adapted: Predictions, source: Predictions) -> list[float]:
    """Return by image whether the answers differ: 0 or 1, or the fraction of the pixels."""
    if adapted.label_maps is not None and source.label_maps is not None:
        shares: list[float] = (adapted.label_maps != source.label_maps).double().flatten(1).mean(1).tolist()
        return shares
    return [float(ours != other) for ours, other in zip(adapted.classes, source.classes, strict=True)]

"""Predict and adapt batch by batch, append the predictions to a table, and save the state from time to time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from ctta.base import AdaptiveModel
from ctta.checkpoint.files import save
from ctta.datasets.archive import NO_SPACE_ERRNOS
from ctta.datasets.base import Rows
from ctta.datasets.image_files import NUM_DECODERS, ImageFiles, check_same_size, decode_file
from ctta.errors import ConfigError, DataError, annotate_network_errors
from ctta.evaluation.journal import SaveSchedule
from ctta.guard import Monitored
from ctta.guard.diagnostics import source_as_trained
from ctta.inference.blending import NormalizationCounter, choose_fraction
from ctta.inference.comparison import AnswerComparison, Predictions
from ctta.inference.predictions import PredictionFile
from ctta.io.images import to_unit_floats
from ctta.methods import Source
from ctta.norms import blend_statistics, blends_automatically
from ctta.streams import Stream

SECONDS_BETWEEN_SAVES = 20.0
SIZE_HINT = "give --size HEIGHT WIDTH (size=) to resize them, or --batch-size 1 (batch_size=)"


@dataclass(frozen=True)
class FolderImages(ImageFiles):
    """Images of a folder in which other programs write and delete files, so that some cannot be read.

    Attributes:
        strict: Whether an image that cannot be read is an error.
        problems: Why images could not be read, by their index; empty for those that were no longer there. :meth:`read`
            returns zeros for them, so that a batch keeps its length.
    """

    strict: bool = False
    problems: dict[int, str] = field(default_factory=dict)

    @override
    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        with ThreadPoolExecutor(NUM_DECODERS) as pool:
            decoded = list(pool.map(self._decode, rows.tolist()))
        present = [position for position, pixels in enumerate(decoded) if pixels is not None]
        arrays = [pixels for pixels in decoded if pixels is not None]
        if not arrays:
            return torch.zeros(len(rows), 3, 1, 1), None
        check_same_size([self.paths[row] for row in rows[present]], arrays, hint=SIZE_HINT)
        images = to_unit_floats(np.stack(arrays))
        if len(present) == len(rows):
            return images, None
        padded = images.new_zeros(len(rows), *images.shape[1:])
        padded[present] = images
        return padded, None

    def _decode(self, row: int) -> NDArray[np.uint8] | None:
        path = self.paths[row]
        try:
            pixels = decode_file(path, self.transform)
        except DataError as error:
            is_there = path.exists()
            if is_there and self.strict:
                raise
            reason = str(error.__cause__ or error).replace(str(path), path.name)
            self.problems[row] = " ".join(reason.split()) or type(error.__cause__).__name__ if is_there else ""
            return None
        self.problems.pop(row, None)  # it may have been read too early
        return pixels


class InferenceRun:
    """One pass of a model over a stream of images.

    Args:
        model: Predicts and adapts.
        source: Also predicts, if given.
        file: Table of predictions.
        state: File to save the model to, if given.
        classes: Class names, if known.
    """

    def __init__(
        self,
        model: AdaptiveModel,
        source: Source | None,
        file: PredictionFile,
        state: Path | None,
        classes: Sequence[str] | None,
    ) -> None:
        self.model, self.source, self.file, self.state, self.classes = model, source, file, state, classes
        # Images are moved to the device and dtype of this tensor.
        self.reference = next(iter(model.source.parameters()), torch.empty(0))
        self.num_images, self.num_changed, self.num_vanished, self.num_failed = 0, 0, 0, 0
        self.num_by_source, self.confidence_sum = 0, 0.0
        self.comparison = AnswerComparison()
        self.normalization = NormalizationCounter()
        self.schedule = SaveSchedule(SECONDS_BETWEEN_SAVES)

    def process(
        self, stream: Stream, images: FolderImages, names: Sequence[str], on_batch: Callable[[int], None]
    ) -> None:
        """Process the stream, and save the state regularly and at the end, also after an error between two batches.

        Args:
            stream: Batches of images.
            images: What the stream reads from.
            names: Names of the images by their index.
            on_batch: Called after each batch with the number of images processed so far.
        """
        is_consistent, num_done = True, 0  # whether the model and the table are at the same step
        try:
            for batch in stream:
                num_done += len(batch.x)
                rows = batch.index.tolist()
                problems = self._gather_problems(rows, images)
                present = [position for position, row in enumerate(rows) if row not in problems]
                failed = {names[row]: problems[row] for row in rows if problems.get(row)}
                self.num_vanished += len(problems) - len(failed)
                step, is_consistent = self.model.num_steps, False  # half a step must not be saved
                if present:
                    x = batch.x if len(present) == len(rows) else batch.x[present]
                    self.process_batch(x, [names[rows[position]] for position in present])
                if failed:
                    self.append_errors(step, failed)
                is_consistent = True
                if self.schedule.is_due:
                    self.save()
                on_batch(num_done)
        finally:
            if is_consistent:
                self.save()

    def _gather_problems(self, rows: list[int], images: FolderImages) -> dict[int, str]:
        """Return why images of a batch could not be read, on whichever rank."""

        def find_problems() -> list[tuple[int, str]]:
            return [(row, images.problems[row]) for row in rows if row in images.problems]

        by_rank = self.model.coordinator.all_gather_object(find_problems)
        return {row: problem for row, problem in chain(*by_rank)}

    def process_batch(self, x: Tensor, names: Sequence[str]) -> None:
        """Predict and adapt to a batch, of which each rank takes its part, and append the rows of all ranks."""
        step, coordinator = self.model.num_steps, self.model.coordinator
        local = x[coordinator.local_rows(len(x))].to(self.reference)
        blends = self.model.batch_stats == "blend" and blends_automatically(self.model.source)
        unadapted: Predictions | None = None
        if blends or self.source is not None or self.comparison.should_compare(step):
            source = self.source or source_as_trained(self.model.source)
            unadapted = _concatenate(coordinator.all_gather_object(lambda: self.predict(source, local)))
        fraction = self.model.batch_fraction(len(x))
        if blends and unadapted is not None:
            fraction = choose_fraction(len(x), sum(unadapted[1]) / len(x))
        with blend_statistics(fraction) if blends else nullcontext():
            adapted = _concatenate(coordinator.all_gather_object(lambda: self.predict(self.model, local)))
        if unadapted is not None:
            self.comparison.add(adapted, unadapted)
        predicted, confidence = adapted
        shown = [adapted]
        if self.source is not None and unadapted is not None:
            shown.append(unadapted)
            self.num_changed += sum(ours != other for ours, other in zip(predicted, unadapted[0], strict=True))
        self.num_images += len(names)
        if isinstance(self.model, Monitored) and self.model.health.answered_by_source:
            self.num_by_source += len(names)
        else:
            self.normalization.add(len(x), fraction)
        self.confidence_sum += float(torch.tensor(confidence, dtype=torch.float64).sum())
        columns = [column for predictions in shown for column in self._columns(*predictions)]
        self._append(zip(names, [step] * len(names), *columns, [""] * len(names), strict=True))

    def append_errors(self, step: int, failed: Mapping[str, str]) -> None:
        """Append the rows of images that could not be read.

        Args:
            step: Step of their batch.
            failed: The reasons by name.
        """
        self.num_failed += len(failed)
        num_empty = len(self.file.columns) - 3
        self._append([[name, step, *[""] * num_empty, reason] for name, reason in failed.items()])

    def _append(self, rows: Iterable[Sequence[object]]) -> None:
        if self.model.coordinator.is_rank_zero:
            with self.advise_on_full_disk(self.file.path):
                self.file.append(rows)

    def check_network(self, x: Tensor) -> None:
        """Raise if the network cannot predict a batch, or has another number of classes than there are names."""
        with annotate_network_errors(x):
            self.predict(source_as_trained(self.model.source), x.to(self.reference))

    @torch.no_grad()
    def predict(self, model: nn.Module, x: Tensor) -> Predictions:
        """Return the most probable class of each image and its probability, 0 where the logits are not finite."""
        logits = model(x)
        if logits.ndim != 2:
            raise ConfigError(
                f"expected logits of shape (N, classes), got {tuple(logits.shape)}: use a network for classification"
            )
        if self.classes and len(self.classes) != logits.shape[1]:
            raise ConfigError(
                f"got {len(self.classes)} class names for a network with {logits.shape[1]} classes: "
                "give one per line, in the order of the network's outputs"
            )
        probabilities = logits.double().softmax(1).nan_to_num(0.0).cpu()
        confidence, predicted = probabilities.max(1)
        return predicted.tolist(), confidence.tolist()

    def save(self) -> None:
        """Save the model, if there is a state file."""
        if self.state is None or not self.model.coordinator.is_rank_zero:
            return
        with self.schedule.saving(), self.advise_on_full_disk(self.state):
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

    def _columns(self, predicted: list[int], confidence: list[float]) -> list[list[Any]]:
        names = [[self.classes[label] for label in predicted]] if self.classes else []
        return [predicted, *names, [f"{value:.6f}" for value in confidence]]


def _concatenate(parts: Sequence[Predictions]) -> Predictions:
    """Concatenate the predictions of the ranks."""
    predicted, confidence = zip(*parts, strict=True)
    return list(chain(*predicted)), list(chain(*confidence))

"""Predict and adapt batch by batch, append the predictions to a table, and save the state from time to time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ctta.base import AdaptiveModel
from ctta.checkpoint.files import save
from ctta.datasets.archive import NO_SPACE_ERRNOS
from ctta.datasets.base import Rows
from ctta.datasets.image_files import ImageFiles
from ctta.errors import ConfigError, DataError
from ctta.evaluation.journal import SaveSchedule
from ctta.inference.predictions import PredictionFile
from ctta.methods import Source
from ctta.streams import Stream

SECONDS_BETWEEN_SAVES = 20.0

Predictions = tuple[list[int], list[float]]  # class and confidence of each image


@dataclass(frozen=True)
class FolderImages(ImageFiles):
    """Images of a folder in which other programs may delete files.

    Attributes:
        vanished: Indices of the images that were no longer there when they were read. :meth:`read` returns zeros for
            them, so that a batch keeps its length.
    """

    vanished: set[int] = field(default_factory=set)

    @override
    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        while True:
            present = [position for position, row in enumerate(rows.tolist()) if row not in self.vanished]
            if not present:
                return torch.zeros(len(rows), 3, 1, 1), None
            try:
                images, labels = super().read(rows[present])
            except DataError:
                missing = [row for row in rows[present].tolist() if not self.paths[row].exists()]
                if not missing:
                    raise
                self.vanished.update(missing)
            else:
                break
        if len(present) == len(rows):
            return images, labels
        padded = images.new_zeros(len(rows), *images.shape[1:])
        padded[present] = images
        return padded, labels


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
        self.num_changed, self.num_vanished, self.confidence_sum = 0, 0, 0.0
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
                present = self._find_present(rows, images)
                self.num_vanished += len(rows) - len(present)
                if present:
                    is_consistent = False  # an interruption in here leaves half a step, which must not be saved
                    x = batch.x if len(present) == len(rows) else batch.x[present]
                    self.process_batch(x, [names[rows[position]] for position in present])
                    is_consistent = True
                if self.schedule.is_due:
                    self.save()
                on_batch(num_done)
        finally:
            if is_consistent:
                self.save()

    def _find_present(self, rows: list[int], images: FolderImages) -> list[int]:
        """Return the positions in a batch of the images that no rank is missing."""
        by_rank = self.model.coordinator.all_gather_object(lambda: sorted(images.vanished.intersection(rows)))
        vanished = set(chain(*by_rank))
        return [position for position, row in enumerate(rows) if row not in vanished]

    def process_batch(self, x: Tensor, names: Sequence[str]) -> None:
        """Predict and adapt to a batch, of which each rank takes its part, and append the rows of all ranks."""
        step, coordinator = self.model.num_steps, self.model.coordinator
        local = x[coordinator.local_rows(len(x))].to(self.reference)
        models = [self.model, *([self.source] if self.source else [])]
        by_rank = coordinator.all_gather_object(lambda: [self.predict(model, local) for model in models])
        adapted, *unadapted = (_concatenate(parts) for parts in zip(*by_rank, strict=True))
        predicted, confidence = adapted
        for source_predicted, _ in unadapted:
            self.num_changed += sum(ours != other for ours, other in zip(predicted, source_predicted, strict=True))
        self.confidence_sum += float(torch.tensor(confidence, dtype=torch.float64).sum())
        columns = [column for predictions in (adapted, *unadapted) for column in self._columns(*predictions)]
        if coordinator.is_rank_zero:
            with self._advise_on_full_disk(self.file.path):
                self.file.append(zip(names, [step] * len(names), *columns, strict=True))

    def predict(self, model: AdaptiveModel, x: Tensor) -> Predictions:
        """Return the most probable class of each image and its probability, 0 where the logits are not finite."""
        logits = model(x)
        if logits.ndim != 2:
            raise ConfigError(
                f"expected logits of shape (N, classes), got {tuple(logits.shape)}: use a network for classification"
            )
        if self.classes and len(self.classes) != logits.shape[1]:
            raise ConfigError(f"got {len(self.classes)} class names for a network with {logits.shape[1]} classes")
        probabilities = logits.double().softmax(1).nan_to_num(0.0).cpu()
        confidence, predicted = probabilities.max(1)
        return predicted.tolist(), confidence.tolist()

    def save(self) -> None:
        """Save the model, if there is a state file."""
        if self.state is None or not self.model.coordinator.is_rank_zero:
            return
        with self.schedule.saving(), self._advise_on_full_disk(self.state):
            self.file.flush_to_disk()  # first: a power cut must not leave a state that is ahead of the rows
            save(self.model, self.state)

    @contextmanager
    def _advise_on_full_disk(self, path: Path) -> Iterator[None]:
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

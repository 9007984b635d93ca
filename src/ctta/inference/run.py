"""One way through some pictures: every batch is predicted, written down, and from time to time the state is saved."""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctta.base import AdaptiveModel
from ctta.checkpoint.files import save
from ctta.errors import annotate_network_errors
from ctta.evaluation.pace import SavingPace
from ctta.inference.predictions import PredictionFile
from ctta.methods import Source
from ctta.streams import Stream

SECONDS_BETWEEN_SAVES = 20.0


class Run:
    """Takes a model through a stream of pictures.

    Args:
        model: predicts and adapts.
        source: is asked as well, if given.
        file: where the predictions go.
        state: where the model is saved, if given.
        classes: names of the classes, if known.
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
        # On the device and of the dtype that images are brought to.
        self.reference = next(iter(model.source.parameters()), torch.empty(0))
        self.num_changed, self.confidence_sum = 0, 0.0
        self.pace = SavingPace(SECONDS_BETWEEN_SAVES)

    def go_through(self, stream: Stream, names: Sequence[str], on_count: Callable[[int], object]) -> None:
        agree, count = True, 0  # whether the model and the file are at the same step
        try:
            for batch in stream:
                agree = False  # an interruption in here leaves half a step, which must not be saved
                self.one_batch(batch.x, [names[row] for row in batch.index.tolist()])
                agree, count = True, count + len(batch.x)
                if self.pace.is_due:
                    self.save()
                on_count(count)
        finally:
            if agree:
                self.save()

    def one_batch(self, x: Tensor, names: Sequence[str]) -> None:
        step, coordinator = self.model.num_steps, self.model.coordinator
        here = x[coordinator.local_rows(len(x))].to(self.reference)
        models = [self.model, *([self.source] if self.source else [])]
        of_parts = coordinator.all_gather_object(lambda: [self.answer(model, here) for model in models])
        answers = [[[*chain(*column)] for column in zip(*parts, strict=True)] for parts in zip(*of_parts, strict=True)]
        (predicted, confidence), *others = answers
        for by_source, _ in others:
            self.num_changed += sum(one != other for one, other in zip(predicted, by_source, strict=True))
        self.confidence_sum += float(torch.tensor(confidence, dtype=torch.float64).sum())
        columns = [column for answer in answers for column in self.columns(*answer)]
        if coordinator.is_rank_zero:
            self.file.append(zip(names, [step] * len(names), *columns, strict=True))

    def answer(self, model: AdaptiveModel, x: Tensor) -> tuple[list[int], list[float]]:
        """The most probable class of each image, and its probability; 0 where the answer is not finite."""
        with annotate_network_errors(x):
            logits = model(x)
        if logits.ndim != 2:
            raise ValueError(f"expected one class per image, and the network's logits are {tuple(logits.shape)}")
        if self.classes and len(self.classes) != logits.shape[1]:
            raise ValueError(f"there are {len(self.classes)} names for the network's {logits.shape[1]} classes")
        probabilities = logits.double().softmax(1).nan_to_num(0.0).cpu()
        confidence, predicted = probabilities.max(1)
        return predicted.tolist(), confidence.tolist()

    def columns(self, numbers: list[int], confidence: list[float]) -> list[list[Any]]:
        names = [[self.classes[number] for number in numbers]] if self.classes else []
        return [numbers, *names, [f"{value:.6f}" for value in confidence]]

    def save(self) -> None:
        if self.state is None or not self.model.coordinator.is_rank_zero:
            return
        with self.pace.saving():
            self.file.flush_to_disk()  # first, or a state could know of rows that a power cut has taken
            save(self.model, self.state)

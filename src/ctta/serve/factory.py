"""New streams, and those from disk: all of one method over one source, whose weights they share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctta.base import AdaptiveModel
from ctta.checkpoint import CheckpointError, load
from ctta.encoding import encode, is_storable
from ctta.hyperparameters import show_hyperparameters
from ctta.methods import Source
from ctta.serve.budget import TimeBudget
from ctta.serve.events import AuditLog
from ctta.serve.snapshots import Snapshots
from ctta.serve.stream import ServedStream
from ctta.serve.window import Window


@dataclass(frozen=True)
class StreamFactory:
    """What every stream of a service has in common."""

    template: AdaptiveModel  # never adapts itself
    reference: Source
    snapshots: Snapshots
    log: AuditLog
    window: int  # images that each stream keeps
    update_every: int  # images between two updates
    budget: float | None  # share of time for updates

    def new(self, name: str) -> ServedStream:
        """A stream that has seen nothing."""
        stream = self._around(name, self.template.fork())
        stream.note("new", "first use")
        return stream

    def from_disk(self, name: str) -> ServedStream:
        """A stream as it was when it was written."""
        stream = self._around(name, self.load_state(self.snapshots.state_file(name)))
        self.snapshots.restore(stream)
        return stream

    def load_state(self, path: Path) -> AdaptiveModel:
        """A saved model that can take a stream's place; CheckpointError if it was made in another way."""
        source, settings = self.template.source, self.template.hyperparameters
        again = {name: value for name, value in settings.items() if not is_storable(value)}
        model = load(path, self.template.copy_of_source(), method=type(self.template), **again)
        model.source = source  # as fork does: weights of the source are there once, for however many streams
        for name, value in settings.items():
            if name not in again and encode(there := model.hyperparameters[name]) != encode(value):
                now, before = (show_hyperparameters({name: each}) for each in (value, there))
                raise CheckpointError(f"{path.name} was made with {before}, and this service has {now}")
        if not all(bool(torch.isfinite(value).all()) for value in tensors_of(model).values()):
            raise CheckpointError(f"{path.name} holds values that are not finite")
        return model

    def _around(self, name: str, model: AdaptiveModel) -> ServedStream:
        return ServedStream(
            name,
            model,
            reference=self.reference,
            window=Window(self.window, self.update_every),
            budget=TimeBudget(self.budget),
            log=self.log,
        )


def tensors_of(model: AdaptiveModel) -> dict[str, Tensor]:
    """What a stream holds beside the source."""
    state: dict[str, Any] = {name: value for name, value in model.state_dict().items() if ".source." not in f".{name}"}
    if model.optimizer is not None:
        for number, values in enumerate(model.optimizer.state.values()):
            state |= {f"optimizer.{number}.{name}": value for name, value in values.items()}
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def num_bytes(stream: ServedStream) -> int:
    """The memory that a live stream takes."""
    images = [] if stream.window.images is None else [stream.window.images]
    return sum(value.nbytes for value in (*tensors_of(stream.model).values(), *images))

"""New streams, and those from disk: all of one method over one source, whose weights they share."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ctta.base import AdaptiveModel
from ctta.checkpoint.encoding import encode, is_serializable
from ctta.checkpoint.files import load
from ctta.checkpoint.manifest import optimizer_tensors, unserializable_arguments
from ctta.errors import CheckpointError
from ctta.hyperparameters import format_hyperparameters
from ctta.serve.budget import TimeBudget
from ctta.serve.events import AuditLog
from ctta.serve.snapshots import Snapshots
from ctta.serve.stream import ServedStream
from ctta.serve.watching import parts_of
from ctta.serve.window import Window


@dataclass(frozen=True)
class StreamFactory:
    """What every stream of a service has in common."""

    template: AdaptiveModel  # never adapts itself
    reference: nn.Module  # the source as it was trained
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
        ours = parts_of(self.template)
        model = load(path, self.template.copy_of_source(), **unserializable_arguments(self.template))
        if type(model) is not type(self.template):
            kinds = type(model).__name__, type(self.template).__name__
            raise CheckpointError(f"{path.name} is of a {kinds[0]}, and the streams of this service are {kinds[1]}")
        for part, own in zip(parts_of(model), ours, strict=True):
            _check_same_settings(part, own, path.name)
            part.source = self.template.source  # as fork does: its weights are there once, for all streams
        return model

    def load_upload(self, path: Path) -> AdaptiveModel:
        """A saved model from outside, which must be healthier than a stream of ours may have become."""
        model = self.load_state(path)
        learnt = (*model.parameters(), *optimizer_tensors(model).values())
        if not all(bool(torch.isfinite(value).all()) for value in learnt):
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


def _check_same_settings(model: AdaptiveModel, own: AdaptiveModel, what: str) -> None:
    for name, value in own.hyperparameters.items():
        there = model.hyperparameters[name]
        if is_serializable(value) and (not is_serializable(there) or encode(there) != encode(value)):
            now, before = (format_hyperparameters({name: each}) for each in (value, there))
            raise CheckpointError(f"{what} was made with {before}, and this service has {now}")


def num_bytes(stream: ServedStream) -> int:
    """The memory that a live stream takes."""
    model = stream.model
    of_source = {id(value) for value in model.source.state_dict(keep_vars=True).values()}
    state = (value for value in model.state_dict(keep_vars=True).values() if isinstance(value, Tensor))
    own = {id(value): value for value in state if id(value) not in of_source}
    images = [] if stream.window.images is None else [stream.window.images]
    return sum(value.nbytes for value in (*own.values(), *optimizer_tensors(model).values(), *images))

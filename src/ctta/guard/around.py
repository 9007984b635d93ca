"""A model around a method: the contract kept without a network of one's own, and a record of what happens."""

import os
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ctta.base import AdaptiveModel
from ctta.guard.events import Event, Events
from ctta.guard.health import Health
from ctta.guard.remedies import snapshot
from ctta.parallel import SingleProcess


class AroundMethod(AdaptiveModel):
    """Holds a method, ``wrapped``, and its last good snapshot, ``good``; the three share one source.

    Args:
        model: the method, which becomes part of this.
        audit: where events are written.
    """

    supports_data_parallel = False  # a guard judges by the rows of its own process, so ranks would decide differently
    wrapped: AdaptiveModel

    def __init__(self, model: AdaptiveModel, audit: str | os.PathLike[str] | None) -> None:
        if not isinstance(model, AdaptiveModel) or isinstance(model, AroundMethod):
            raise TypeError(f"expected a method to guard, such as ctta.CoTTA(net), got {type(model).__name__}")
        if type(model.coordinator) is not SingleProcess:
            raise ValueError(
                "a guard judges by the rows of its own process, so ranks that share a stream would decide differently: "
                "guard a model on one process, or share it without a guard"
            )
        nn.Module.__init__(self)  # and not AdaptiveModel's, which copies a network: the method inside has one
        self._batch_stats, self._output, self._trainable = model.batch_stats, model.output, model._trainable
        self.seed, self.optimizer, self.last_step, self.frozen = model.seed, None, None, model.frozen
        model.frozen = False  # whether to learn is decided out here
        self.source, self.wrapped, self.good = model.source, model, snapshot(model)
        self.log, self.health = Events(audit), Health(step=0)
        self.register_counter("num_steps")
        self.register_counter("num_skipped")

    def reset(self) -> Self:
        """Exactly as new; the events and the audit log stay."""
        log = self.log
        super().reset()
        self.log = log
        self.note("reset", "asked for")
        return self

    def freeze(self) -> Self:
        super().freeze()
        self.note("freeze", "asked for")
        return self

    def unfreeze(self) -> Self:
        super().unfreeze()
        self.note("unfreeze", "asked for")
        return self

    def deploy(self, batches: Iterable[Any] | None = None) -> nn.Module:
        return self.wrapped.deploy(batches)

    def on_load(self, path: str | os.PathLike[str]) -> None:
        self.note("load", f"from {path}")

    def note(self, kind: str, cause: str) -> None:
        """Put an event on record, with the health as it was last known."""
        self.log.note(Event(self.num_steps, kind, cause, self.health.as_dict()))

    @property
    def events(self) -> list[Event]:
        """The last hundred."""
        return list(self.log.last)

    @property
    def audit(self) -> str | None:
        """The file that events are written to; it can be set."""
        return self.log.path

    @audit.setter
    def audit(self, path: str | os.PathLike[str] | None) -> None:
        self.log.path = None if path is None else os.fspath(path)

    @property
    def hyperparameters(self) -> dict[str, Any]:
        # Not the audit log: a saved file that comes from elsewhere must not say where to write.
        return {name: value for name, value in super().hyperparameters.items() if name != "audit"}

    @torch.inference_mode(False)
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        del self.source  # a fork may share it: the method inside makes a copy of its own first, and moves that
        nn.Module._apply(self, fn, recurse)
        self.source = self.good.source = self.wrapped.source
        return self

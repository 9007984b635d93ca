"""One stream: a model that adapts, its window of images, and what is told about it."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctta.base import AdaptiveModel
from ctta.errors import annotate_network_errors
from ctta.functional import confidence
from ctta.serve.budget import TimeBudget
from ctta.serve.errors import Refusal
from ctta.serve.events import AuditLog
from ctta.serve.watching import collapse_score, events_since, has_learnt, health, method_of, roll_back
from ctta.serve.window import Window

NUM_POINTS = 120  # of a line on the page
NUM_EVENTS = 50


@dataclass(frozen=True)
class Answer:
    """What a request gets."""

    logits: Tensor
    num_updates: int  # so far
    adapted: bool
    reason: str | None = None  # why not, if it was asked for


class ServedStream:
    """Answers in the order of its calls; only one thread at a time may call it.

    Args:
        name: that clients gave it.
        model: predicts and adapts.
        reference: the network as it was trained, which answers until there are images enough.
        window: of its last images.
        budget: for its updates.
        log: where its events go.
    """

    def __init__(
        self,
        name: str,
        model: AdaptiveModel,
        *,
        reference: nn.Module,
        window: Window,
        budget: TimeBudget,
        log: AuditLog,
    ) -> None:
        self.name, self.model, self.reference = name, model, reference
        self.window, self.budget, self.log = window, budget, log
        self.num_requests = self.num_images = self.num_over_budget = 0
        self.used_at = time.time()
        self.confidences: deque[float | None] = deque(maxlen=NUM_POINTS)
        self.collapse_scores: deque[float | None] = deque(maxlen=NUM_POINTS)
        self.events: deque[dict[str, Any]] = deque(maxlen=NUM_EVENTS)
        self.num_changes = 0  # since it is in memory, to see whether there is anything to save
        self._last_heard = events_since(model, None)[-1:]

    def infer(self, x: Tensor, *, adapt: bool) -> Answer:
        """Logits for these images; they belong to the stream from then on, unless ``adapt`` is False."""
        batch = self.window.batch(x)
        reason = self._why_not_now(batch, len(x)) if adapt else "only a prediction was asked for"
        try:
            logits = self._logits(batch, x, learn=reason is None)[-len(x) :]
        finally:
            self._hear_the_guard()  # also where it refused
        if reason is None and not has_learnt(self.model):
            reason = RESTING
        self.used_at = time.time()
        if adapt:
            if reason == OVER_BUDGET:
                self.num_over_budget += 1
                self.note("update skipped", OVER_BUDGET)
            self._remember(x, logits, updated=reason in (None, RESTING))
        return Answer(logits, self.num_updates, reason is None, reason if adapt else None)

    def _logits(self, batch: Tensor, x: Tensor, *, learn: bool) -> Tensor:
        with refusing_bad_input(batch):
            if learn:
                with self.budget.spending():
                    logits: Tensor = self.model(batch)
                return logits
            if self.window.is_warm(batch):
                return self.model.predict(batch)
            with torch.no_grad():
                logits = self.reference(x)
            return logits

    def _why_not_now(self, batch: Tensor, num_new: int) -> str | None:
        if self.model.frozen:
            return "the stream is frozen"
        if not self.window.is_warm(batch):
            return "there are too few images yet, so the source answered"
        if not self.window.is_update_due(num_new):
            return "the window is not full of new images yet"
        return OVER_BUDGET if self.budget.is_exhausted else None

    def _remember(self, x: Tensor, logits: Tensor, *, updated: bool) -> None:
        self.window.push(x, updated=updated)
        self.num_requests += 1
        self.num_images += len(x)
        self.num_changes += 1
        mean = float(confidence(logits).mean())
        self.confidences.append(round(mean, 4) if mean == mean else None)
        self.collapse_scores.append(collapse_score(self.model))

    def act(self, action: str) -> None:
        """What an operator asks for: one of :data:`ACTIONS`."""
        ACTIONS[action](self)
        if not self._hear_the_guard():
            self.note(action, "asked for")

    def replace(self, model: AdaptiveModel) -> None:
        """Go on with another state; the window, which is no part of a state, starts anew."""
        self.model = model
        self.window.clear()
        self._last_heard = events_since(model, None)[-1:]
        self.note("load", "a state was uploaded")

    def reset(self) -> None:
        """Exactly as new."""
        self.model.reset()
        self.window.clear()

    def _hear_the_guard(self) -> bool:
        """Write down what the guard has done since; False if that was nothing."""
        new = events_since(self.model, self._last_heard[0] if self._last_heard else None)
        for event in new:
            self.note(event.kind, event.cause, signals=event.signals)
        self._last_heard = new[-1:] or self._last_heard
        return bool(new)

    @property
    def num_updates(self) -> int:
        """How often the method has learnt since it was new."""
        return method_of(self.model).num_steps

    def note(self, kind: str, cause: str, **details: Any) -> None:
        """Write an event down."""
        self.num_changes += 1
        event = self.log.append(self.name, kind, cause, step=self.model.num_steps, **details)
        self.events.append({key: event[key] for key in ("time", "kind", "cause", "step")})

    def summary(self) -> dict[str, Any]:
        """All that a person or a program may want to know of it."""
        return {
            "name": self.name,
            "frozen": self.model.frozen,
            "updates": self.num_updates,
            "requests": self.num_requests,
            "images": self.num_images,
            "skipped": {"not_finite": self.model.num_skipped, "budget": self.num_over_budget},
            "used_at": round(self.used_at, 3),
            "collapse_score": collapse_score(self.model),
            "health": health(self.model),
            "confidences": list(self.confidences),
            "collapse_scores": list(self.collapse_scores),
            "events": list(self.events),
        }

    def restore(self, summary: dict[str, Any]) -> None:
        """Take over the counts and lines that :meth:`summary` gave."""
        self.num_requests, self.num_images = int(summary["requests"]), int(summary["images"])
        self.num_over_budget, self.used_at = int(summary["skipped"]["budget"]), float(summary["used_at"])
        self.confidences.extend(summary["confidences"])
        self.collapse_scores.extend(summary["collapse_scores"])
        self.events.extend(summary["events"])


RESTING = "the guard lets the method rest"
OVER_BUDGET = "the time for adapting is used up"
ACTIONS: dict[str, Callable[[ServedStream], object]] = {
    "reset": ServedStream.reset,
    "freeze": lambda stream: stream.model.freeze(),
    "unfreeze": lambda stream: stream.model.unfreeze(),
    "rollback": lambda stream: roll_back(stream.model),
}


@contextmanager
def refusing_bad_input(x: Tensor) -> Iterator[None]:
    """What a model or its network says about an input becomes a refusal."""
    try:
        with annotate_network_errors(x):
            yield
    except (ValueError, TypeError, IndexError) as error:
        raise Refusal(400, str(error).strip().splitlines()[0]) from error

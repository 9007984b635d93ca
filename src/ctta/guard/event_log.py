"""What a guard reports: the health of the last batch, and events."""

import os

from ctta.core.model import AdaptiveModel
from ctta.guard.events import MAX_EVENTS, Event, EventKind, append_event
from ctta.guard.health import Health


class GuardEvents(AdaptiveModel):
    """The part of a guard that keeps health and events, and writes the audit log."""

    health: Health
    # A tuple, which is replaced: what a failed step recorded is undone with the step.
    _events: tuple[Event, ...]
    _audit: str | None

    def record(self, kind: EventKind, cause: str) -> None:
        """Log an event together with the last known health.

        Args:
            kind: What happened.
            cause: Why, in words.
        """
        event = Event(self.num_steps, kind, cause, self.health.as_dict())
        self._events = (*self._events, event)[-MAX_EVENTS:]
        if self._audit is not None:
            append_event(self._audit, event)

    @property
    def events(self) -> list[Event]:
        """The last hundred events, oldest first."""
        return list(self._events)

    @property
    def audit(self) -> str | None:
        """File that events are written to; it can be set."""
        return self._audit

    @audit.setter
    def audit(self, path: str | os.PathLike[str] | None) -> None:
        self._audit = None if path is None else os.fspath(path)

    @property
    def collapse_score(self) -> float:
        """Score of the last inspected batch; an alarm is raised at 1."""
        return self.health.collapse_score

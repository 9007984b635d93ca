"""What happened to a stream: the last events in memory, and all of them in an audit log."""

import json
import os
from collections import deque
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

MAX_EVENTS = 100  # kept in memory


class EventKind(StrEnum):
    """Kinds of events; the values are what audit logs contain."""

    COLLAPSE = "collapse"  # detected, and only reported
    RECOVERY = "recovery"  # the stream is no longer sorted by class
    ROLLBACK = "rollback"
    RESET = "reset"
    SOFT_RESET = "soft_reset"
    PERIODIC_RESET = "periodic_reset"
    FREEZE = "freeze"
    UNFREEZE = "unfreeze"
    SORTED_STREAM = "sorted_stream"  # batches arrive sorted by class
    REFUSAL = "refusal"  # of a batch that is not valid
    BAD_ROWS = "bad_rows"  # inputs of a batch that were answered by the source
    SKIPPED = "skipped"  # an update with a loss or gradient that is not finite
    SHADOW = "shadow"  # how many predictions would have differed
    LOAD = "load"  # from a file


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        step: Number of batches that the stream had seen.
        kind: What happened.
        cause: Why, in words.
        signals: Health at that moment, as far as it was known.
    """

    step: int
    kind: EventKind
    cause: str
    signals: dict[str, Any]


class EventLog:
    """The last events, and an optional file that gets every event as a line of JSON with a timestamp.

    Args:
        path: The file; None for no file.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else os.fspath(path)
        self.recent: deque[Event] = deque(maxlen=MAX_EVENTS)

    def append(self, event: Event) -> None:
        """Record an event.

        Args:
            event: What happened.
        """
        self.recent.append(event)
        if self.path is not None:
            line = json.dumps({"time": datetime.now(UTC).isoformat(), **asdict(event)}, allow_nan=False)
            # Opened for each event, so that logrotate may move the file; logging's WatchedFileHandler, which does the
            # same, is not supported on Windows, and a handler cannot be copied with the model.
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line + "\n")

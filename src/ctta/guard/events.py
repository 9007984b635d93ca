"""What happened to a stream, and the audit log of it."""

import json
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
    HARM = "harm"  # labels show more errors than without adaptation
    LOAD = "load"  # from a file


#: Events after which a method is in another state, so that labels of earlier answers say nothing about later ones.
STATE_CHANGES = frozenset({EventKind.ROLLBACK, EventKind.RESET, EventKind.SOFT_RESET, EventKind.PERIODIC_RESET})


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


def append_event(path: str, event: Event) -> None:
    """Append an event to a file, as a line of JSON with a timestamp.

    Args:
        path: The file.
        event: What happened.
    """
    line = json.dumps({"time": datetime.now(UTC).isoformat(), **asdict(event)}, allow_nan=False)
    # Opened for each event, so that logrotate may move the file; logging's WatchedFileHandler, which does the same, is
    # not supported on Windows, and a handler cannot be copied with the model.
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")

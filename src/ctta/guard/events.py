"""What happened to a stream: the last events at hand, and every one in a file."""

import json
import os
from collections import deque
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

NUM_KEPT = 100


@dataclass(frozen=True)
class Event:
    """One event.

    Args:
        step: how many batches the stream had seen.
        kind: ``collapse``, ``recovery``, ``rollback``, ``reset``, ``soft_reset``, ``periodic_reset``, ``freeze``,
            ``unfreeze``, ``clumping``, ``refusal``, ``bad_rows``, ``skipped``, ``shadow`` or ``load``.
        cause: in words.
        signals: the health at that moment, as far as it was known.
    """

    step: int
    kind: str
    cause: str
    signals: dict[str, Any]


class Events:
    """The last events; with a path, every event also becomes a line of JSON there, with the time."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else os.fspath(path)
        self.last: deque[Event] = deque(maxlen=NUM_KEPT)

    def note(self, event: Event) -> None:
        self.last.append(event)
        if self.path is not None:
            line = json.dumps({"time": datetime.now(UTC).isoformat(), **asdict(event)}, allow_nan=False)
            with open(self.path, "a", encoding="utf-8") as file:  # at each event, so that the file may be rotated
                file.write(line + "\n")

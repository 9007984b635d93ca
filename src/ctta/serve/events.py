"""What happened to the streams, one line of JSON each, in a file that does not grow without end."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LARGEST = 16 * 2**20  # bytes, after which the file becomes its own predecessor


class AuditLog:
    """Appends events to ``path``; what came before the last 16 MB is in ``path.1``, and older lines are gone.

    Args:
        path: of the file.
        on_event: told the kind of each.
    """

    def __init__(self, path: Path, on_event: Callable[[str], None]) -> None:
        self.path, self._on_event, self._lock = path, on_event, threading.Lock()

    def append(self, stream: str, kind: str, cause: str, **details: Any) -> dict[str, Any]:
        """Write an event down, and give it back with its time."""
        event = {"time": round(time.time(), 3), "stream": stream, "kind": kind, "cause": cause, **details}
        line = json.dumps(event, allow_nan=False, default=str) + "\n"
        with self._lock:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                too_large = file.tell() > LARGEST
            if too_large:
                os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
            self._on_event(kind)
        return event

"""The audit log: what happened to the streams of a service, as lines of JSON."""

import json
import os
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

MAX_BYTES = 16 * 2**20


class StreamEvent(StrEnum):
    """Kinds of events that the service records; those of a guard come on top."""

    NEW = "new"
    LOAD = "load"
    DELETE = "delete"
    DAMAGED = "damaged"
    RESET = "reset"
    FREEZE = "freeze"
    UNFREEZE = "unfreeze"
    ROLLBACK = "rollback"
    UPDATE_SKIPPED = "update skipped"


class AuditLog:
    """Append events to a file that is rotated at 16 MB; the one before is kept as ``<name>.1``.

    Not a ``RotatingFileHandler``: logging handlers swallow errors of the disk, which must reach the caller here, and
    keep the file open after the service has released its directory.

    Args:
        path: The file.
        on_event: Called with the kind of each event.
    """

    def __init__(self, path: Path, on_event: Callable[[str], None]) -> None:
        self.path, self._on_event, self._lock = path, on_event, threading.Lock()

    def append(self, stream: str, kind: str, cause: str, **details: Any) -> dict[str, Any]:
        """Write an event, and return it with its time.

        Args:
            stream: Name of the stream.
            kind: A :class:`StreamEvent`, or the kind of a guard's event.
            cause: Why it happened, in words.
            **details: Further fields.

        Returns:
            The event as it was written.
        """
        event = {"time": round(time.time(), 3), "stream": stream, "kind": str(kind), "cause": cause, **details}
        line = json.dumps(event, allow_nan=False, default=str) + "\n"
        with self._lock:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                is_full = file.tell() > MAX_BYTES
            if is_full:
                os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
            self._on_event(str(kind))
        return event

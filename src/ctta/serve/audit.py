"""The audit log: what happened to the streams of a service, as lines of JSON."""

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

logger = logging.getLogger("ctta.serve")

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
    RESIZED = "resized"


class AuditLog:
    """Append events to a file that is rotated at 16 MB; the one before is kept as ``<name>.1``.

    Every line of the file is complete. An event that cannot be written, because the disk is full for example, goes to
    the log of the service instead, and never fails the request that caused it.

    Not a ``RotatingFileHandler``: its buffered file leaves a part of a line behind when the disk is full or the process
    is killed, and stays open after the service has released its directory.
    """

    def __init__(self, path: Path, on_event: Callable[[str], None], on_failure: Callable[[], None]) -> None:
        self.path, self._on_event, self._on_failure = path, on_event, on_failure
        self._lock = threading.Lock()

    def append(self, stream: str, kind: str, cause: str, **details: Any) -> dict[str, Any]:
        """Write an event of a kind of :class:`StreamEvent` or of a guard's, and return it with its time."""
        event = {"time": round(time.time(), 3), "stream": stream, "kind": str(kind), "cause": cause, **details}
        line = json.dumps(event, allow_nan=False, default=str)
        with self._lock:
            self._on_event(str(kind))
            try:
                if _append_line(self.path, line) > MAX_BYTES:
                    os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
            except OSError as error:
                logger.error("an event could not be written to the audit log (%s): %s", error, line)
                self._on_failure()
        return event


def _append_line(path: Path, line: str) -> int:
    """Append a line to a file, completely or not at all, and return the size of the file."""
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        # A process that was killed while writing leaves a part of a line, which must not swallow this one.
        separator = b"" if file.read(1) in (b"", b"\n") else b"\n"
        data = separator + line.encode() + b"\n"
        try:
            if file.write(data) != len(data):  # as much as there was room for
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(size)
            raise
    return size + len(data)

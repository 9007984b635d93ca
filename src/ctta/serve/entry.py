"""A stream as the store knows it, in memory or not."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from ctta.errors import CheckpointError
from ctta.serve.factory import StreamFactory, num_bytes
from ctta.serve.stream import ServedStream

logger = logging.getLogger("ctta.serve")

T = TypeVar("T")


class Entry:
    """Where a stream is, whose turn it is, and what it last told of itself."""

    def __init__(self, name: str, last_summary: dict[str, Any] | None) -> None:
        self.name, self.last_summary = name, last_summary
        self.stream: ServedStream | None = None
        self.turn = asyncio.Lock()  # first come, first served
        self.num_waiting = self.num_bytes = self.num_saved_changes = 0
        self.is_working = self.is_leaving = self.is_deleted = False

    @property
    def is_dirty(self) -> bool:
        return self.stream is not None and self.stream.num_changes != self.num_saved_changes

    def summary(self) -> dict[str, Any]:
        told = self.stream.summary() if self.stream and not self.is_working else self.last_summary
        assert told is not None  # from disk, or from its first work on
        return {**told, "live": self.stream is not None, "waiting": self.num_waiting}

    def work(self, work: Callable[[ServedStream], T], stream: ServedStream) -> T:
        """For a thread: do it, and take down what the loop will want to know of the stream."""
        try:
            return work(stream)
        finally:
            self.take_down(stream)

    def take_down(self, stream: ServedStream) -> None:
        self.last_summary, self.num_bytes = stream.summary(), num_bytes(stream)


def entries_on_disk(factory: StreamFactory) -> dict[str, Entry]:
    """Every stream that can be read; a damaged one must not keep the others from being served."""
    entries, snapshots = {}, factory.snapshots
    for name in list(snapshots.names()):
        try:
            entries[name] = Entry(name, snapshots.summary(name))
        except CheckpointError as error:
            cause = f"{error}; set aside as {snapshots.set_aside(name)}, and the stream starts anew"
            logger.error("stream %s: %s", name, cause)
            factory.log.append(name, "damaged", cause)
    return entries

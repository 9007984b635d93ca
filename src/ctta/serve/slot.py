"""A stream as the store knows it, in memory or on disk."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from ctta.checkpoint.manifest import optimizer_tensors
from ctta.serve.stream import ServedStream

T = TypeVar("T")


class StreamSlot:
    """A stream as the store knows it, in memory or on disk.

    Args:
        name: Name of the stream.
        last_summary: Its last known summary; None while it is being created.
    """

    def __init__(self, name: str, last_summary: dict[str, Any] | None) -> None:
        self.name, self.last_summary = name, last_summary
        self.stream: ServedStream | None = None
        self.turn = asyncio.Lock()  # of requests; fair: first come, first served
        # Held while a thread uses the stream: by a request that has a worker, or to write the stream to disk. Of the
        # requests only one waits for it, so that saving never waits for more than the request that is being handled.
        self.in_use = asyncio.Lock()
        self.num_waiting = self.num_bytes = self.num_saved_changes = 0
        self.unsaved_since: float | None = None  # time of the oldest change that is not saved
        self.is_working = self.is_deleted = False
        self.is_new = False  # no request has succeeded yet
        self._sized: tuple[int, ...] | None = None  # what the number of bytes was counted for

    @property
    def is_dirty(self) -> bool:
        """Whether the stream has changed since its last snapshot."""
        return self.stream is not None and self.stream.num_changes != self.num_saved_changes

    @property
    def image_size(self) -> tuple[int, int] | None:
        """(height, width) of the first image; None if there is none yet."""
        size = (self.last_summary or {}).get("image_size")
        return (size[0], size[1]) if size else None

    def summary(self) -> dict[str, Any]:
        """Return the summary of the stream, and where it is."""
        summary = self.stream.summary() if self.stream and not self.is_working else self.last_summary
        assert summary is not None, "a stream has a summary once it was created"
        return {**summary, "live": self.stream is not None, "waiting": self.num_waiting}

    def note_changes(self) -> None:
        """Note since when there is anything to save, if there is."""
        if self.unsaved_since is None and self.is_dirty:
            self.unsaved_since = time.monotonic()

    def forget(self) -> None:
        """Drop the stream from memory."""
        self.stream = self.unsaved_since = self._sized = None

    def run(self, work: Callable[[ServedStream], T], stream: ServedStream) -> T:
        """Do some work in a thread, and note what the event loop needs to know of the stream."""
        try:
            return work(stream)
        finally:
            self.observe(stream)

    def observe(self, stream: ServedStream) -> None:
        """Note the summary and the memory of the stream."""
        self.last_summary = stream.summary()
        if (sized := _what_memory_depends_on(stream)) != self._sized:  # counting takes a millisecond
            self.num_bytes, self._sized = _num_bytes(stream), sized


def _what_memory_depends_on(stream: ServedStream) -> tuple[int, ...]:
    """Return what changes with the memory of a stream: buffers have a fixed size, an optimizer's state grows once."""
    optimizer, images = stream.model.unwrapped.optimizer, stream.window.images
    num_states = 0 if optimizer is None else len(optimizer.state)
    return id(stream.model), num_states, 0 if images is None else images.nbytes


def _num_bytes(stream: ServedStream) -> int:
    """Return the memory that a live stream takes in addition to the source."""
    model = stream.model
    shared = {id(value) for value in model.source.state_dict(keep_vars=True).values()}
    state = (value for value in model.state_dict(keep_vars=True).values() if isinstance(value, Tensor))
    own = {id(value): value for value in state if id(value) not in shared}
    images = [] if stream.window.images is None else [stream.window.images]
    return sum(value.nbytes for value in (*own.values(), *optimizer_tensors(model).values(), *images))

"""All streams of a service: those in memory, those on disk, and whose turn it is.

Everything here happens in one event loop, so it needs no locks but those that keep an order; only the work on a stream,
and reading and writing it, is done by threads.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from ctta.errors import CheckpointError
from ctta.serve.entry import Entry, entries_on_disk
from ctta.serve.errors import Refusal
from ctta.serve.factory import StreamFactory
from ctta.serve.limits import Limits
from ctta.serve.stream import ServedStream
from ctta.serve.threads import Threads

logger = logging.getLogger("ctta.serve")

T = TypeVar("T")


class Store:
    """Runs work on streams: in order on each, at once on several, with as many in memory as the limits allow.

    Args:
        factory: of streams.
        limits: of their number, memory and queues.
        workers: threads, and so streams that work at once.
        snapshot_every: seconds between two snapshots of a stream that changes.
    """

    def __init__(self, factory: StreamFactory, limits: Limits, *, workers: int, snapshot_every: float) -> None:
        if workers > limits.live_streams:
            raise ValueError(f"{workers} workers need as many live streams, and {limits.live_streams} are allowed")
        self.factory, self.limits, self.snapshot_every = factory, limits, snapshot_every
        self.entries = entries_on_disk(factory)
        self._live: dict[str, Entry] = {}  # least recently used first
        self._moving, self._slots = asyncio.Lock(), asyncio.Semaphore(workers)
        self._threads = Threads(workers)
        self._jobs: set[asyncio.Task[Any]] = set()
        self._mean_seconds, self.is_closed = 0.1, False
        self._largest = 0  # bytes of a stream, as far as seen
        self.num_snapshot_failures = 0

    # ---- for routes ----

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        return len(self._jobs)

    @property
    def live_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._live.values())

    @property
    def num_alarmed(self) -> int:
        scores = [(entry.last_summary or {}).get("collapse_score") for entry in self.entries.values()]
        return sum(score is not None and score >= 1 for score in scores)

    def entry(self, name: str) -> Entry:
        """A stream that is there, or a refusal."""
        if name not in self.entries:
            raise Refusal(404, f"there is no stream {name!r}: it comes into being with its first image")
        return self.entries[name]

    async def run(self, name: str, work: Callable[[ServedStream], T], *, create: bool = False) -> T:
        """Do some work on a stream when its turn comes; a refusal if that would take too long.

        Args:
            name: of the stream.
            work: what a thread does.
            create: make the stream if there is none.
        """
        entry = self._entry_or_new(name) if create else self.entry(name)
        self._check_room_in_queues(entry)
        self.entries[name] = entry  # and not before: nobody would take it away after a refusal
        started = asyncio.Event()
        job = asyncio.create_task(self._in_turn(entry, work, started))
        entry.num_waiting += 1
        self._jobs.add(job)
        job.add_done_callback(lambda _job: self._forget(entry, job))
        # Not wait_for, which would cancel: an update that has begun must end, also where nobody waits for it.
        await asyncio.wait({job}, timeout=self.limits.seconds)
        if not job.done():
            if started.is_set():
                raise Refusal(504, f"no answer within {self.limits.seconds:g} s; the work goes on, and will count")
            job.cancel()
            raise Refusal(503, f"no turn within {self.limits.seconds:g} s; nothing was done", retry_after=1)
        return job.result()

    async def delete(self, name: str) -> None:
        """Forget a stream, in memory and on disk."""
        entry = self.entry(name)
        async with entry.turn, self._moving:
            if self.entries.get(name) is entry:
                try:
                    await self._threads.run(self.factory.snapshots.delete, name)
                except OSError as error:
                    raise Refusal(503, f"the stream cannot be deleted from disk: {error}", retry_after=30) from error
                entry.is_deleted, entry.stream = True, None
                self._live.pop(name, None)
                del self.entries[name]
                self.factory.log.append(name, "delete", "asked for")

    async def save_now_and_then(self) -> None:
        """Write what has changed, again and again; for a task that is cancelled at the end."""
        while True:
            await asyncio.sleep(self.snapshot_every)
            await self.save_all()

    async def save_all(self) -> None:
        """Write every stream in memory that has changed."""
        for entry in [entry for entry in self._live.values() if entry.is_dirty]:
            async with entry.turn, self._moving:
                if entry.is_dirty:
                    with suppress(OSError):  # told already; the snapshot before is still there
                        await self._save(entry)

    async def close(self) -> None:
        """Finish what is under way, and write every stream."""
        self.is_closed = True
        while self._jobs:
            await asyncio.wait(set(self._jobs))
        await self.save_all()
        self._threads.end()

    # ---- turns ----

    def _entry_or_new(self, name: str) -> Entry:
        if name not in self.entries:
            if len(self.entries) >= self.limits.streams:
                reason = f"there are {len(self.entries)} streams, and no more are allowed: delete one"
                raise Refusal(429, reason, retry_after=60)
            return Entry(name, None)
        return self.entries[name]

    def _check_room_in_queues(self, entry: Entry) -> None:
        if self.is_closed:
            raise Refusal(503, "the service is stopping", retry_after=5)
        if entry.num_waiting >= self.limits.queue or len(self._jobs) >= self.limits.total_queue:
            seconds = min(max(1, math.ceil(entry.num_waiting * self._mean_seconds)), 60)
            raise Refusal(429, "too many requests are waiting: send again later", retry_after=seconds)

    def _forget(self, entry: Entry, job: asyncio.Task[Any]) -> None:
        entry.num_waiting -= 1
        self._jobs.discard(job)
        if not job.cancelled() and (error := job.exception()) and not isinstance(error, Refusal):
            logger.error("work on stream %s failed", entry.name, exc_info=error)
        never_began = entry.last_summary is None and entry.stream is None and not entry.num_waiting
        if never_began and self.entries.get(entry.name) is entry:
            del self.entries[entry.name]

    async def _in_turn(self, entry: Entry, work: Callable[[ServedStream], T], started: asyncio.Event) -> T:
        async with entry.turn, self._slots:
            if entry.is_deleted:
                raise Refusal(409, f"the stream {entry.name!r} was deleted while this request waited: send it again")
            started.set()
            stream = await self._bring_in(entry)
            begun, entry.is_working = time.monotonic(), True
            try:
                return await self._threads.run(entry.work, work, stream)
            finally:
                entry.is_working = False
                self._largest = max(self._largest, entry.num_bytes)
                self._mean_seconds += 0.1 * (time.monotonic() - begun - self._mean_seconds)

    # ---- memory and disk ----

    async def _bring_in(self, entry: Entry) -> ServedStream:
        if entry.stream is None or entry.is_leaving:
            async with self._moving:
                if entry.stream is None:
                    await self._make_room()
                    await self._read(entry)
        assert entry.stream is not None
        self._live[entry.name] = self._live.pop(entry.name, entry)  # the most recently used comes last
        return entry.stream

    async def _read(self, entry: Entry) -> None:
        known = entry.last_summary is not None
        try:
            entry.stream = await self._threads.run(self.factory.from_disk if known else self.factory.new, entry.name)
        except (CheckpointError, FileNotFoundError) as error:
            raise Refusal(
                409, f"what is stored of the stream {entry.name!r} cannot be gone on with ({error}): delete it"
            ) from error
        except OSError as error:  # of the moment, perhaps; what is stored may be in order
            raise Refusal(503, f"the disk cannot be read or written now: {error}", retry_after=30) from error
        entry.num_saved_changes = 0
        entry.take_down(entry.stream)

    async def _make_room(self) -> None:
        """Write those used least recently to disk until one more fits."""
        while self._live and (
            len(self._live) >= self.limits.live_streams or self.live_bytes + self._largest > self.limits.memory
        ):
            idle = next((entry for entry in self._live.values() if not entry.is_working), None)
            if idle is None:
                break  # by memory; by number there always is one, as there are fewer workers than live streams
            idle.is_leaving = True
            try:
                if idle.is_dirty:
                    await self._save(idle)
                idle.stream = None
                del self._live[idle.name]
            except OSError as error:
                raise Refusal(503, f"a stream cannot be written to disk: {error}", retry_after=30) from error
            finally:
                idle.is_leaving = False

    async def _save(self, entry: Entry) -> None:
        assert entry.stream is not None
        num_changes = entry.stream.num_changes
        try:
            await self._threads.run(self.factory.snapshots.write, entry.stream)
        except OSError:
            self.num_snapshot_failures += 1
            logger.exception("the stream %s could not be written", entry.name)
            raise
        entry.num_saved_changes, entry.last_summary = num_changes, entry.stream.summary()

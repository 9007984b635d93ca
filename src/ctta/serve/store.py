"""All streams of a service: which are in memory and which on disk, and whose turn it is.

Everything here runs in one event loop, so the only locks are those that keep an order. Work on a stream, reading it and
writing it are done by threads.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from ctta.errors import CheckpointError, ConfigError, DamagedCheckpointError
from ctta.serve.audit import StreamEvent
from ctta.serve.http import ApiError, hide_internal_errors, report_disk_errors
from ctta.serve.metrics import ServiceMetrics
from ctta.serve.persistence import StreamFactory
from ctta.serve.stream import ServedStream

logger = logging.getLogger("ctta.serve")

T = TypeVar("T")

MIN_DISK_THREADS = 4  # writing a snapshot is mostly waiting for the disk
FINAL_SAVE_ATTEMPTS, FINAL_SAVE_PAUSE = 3, 1.0  # number, seconds


class StreamSlot:
    """A stream as the store knows it, in memory or on disk."""

    def __init__(self, name: str, last_summary: dict[str, Any] | None, *, is_stored: bool = False) -> None:
        # None while it is being created, or as long as what is stored cannot be read.
        self.name, self.last_summary, self.is_stored = name, last_summary, is_stored
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
    optimizer, images = model.unwrapped.optimizer, stream.window.images
    moments = [] if optimizer is None else [each for state in optimizer.state.values() for each in state.values()]
    tensors = (*own.values(), *moments, *([] if images is None else [images]))
    return sum(value.nbytes for value in tensors if isinstance(value, Tensor))


class StreamStore:
    """Run work on streams: in order on each, in parallel on several, with as many in memory as the limits allow.

    Each of the ``num_workers`` threads works on one stream at a time.
    """

    def __init__(self, factory: StreamFactory, metrics: ServiceMetrics, num_workers: int) -> None:
        limits = factory.options.limits
        if num_workers > limits.max_live_streams:
            raise ConfigError(
                f"{num_workers} workers need as many live streams, and {limits.max_live_streams} are allowed: "
                "use fewer workers, or allow more live streams"
            )
        self.factory, self.limits, self.metrics = factory, limits, metrics
        self.snapshot_interval = factory.options.snapshot_interval
        self.slots = _find_streams(factory)
        self.is_closed = False
        self._live: dict[str, StreamSlot] = {}  # least recently used first
        self._moving, self._workers = asyncio.Lock(), asyncio.Semaphore(num_workers)
        num_torch_threads = torch.get_num_threads()  # a setting of each thread
        self._num_savers = max(MIN_DISK_THREADS, num_workers)
        self._threads, self._disk_threads = (
            ThreadPoolExecutor(size, name, initializer=lambda: torch.set_num_threads(num_torch_threads))
            for name, size in (("stream", num_workers), ("disk", self._num_savers))
        )
        self._jobs: set[asyncio.Task[Any]] = set()
        self._mean_seconds = 0.1  # of a job
        self._largest_stream = 0  # bytes, as far as seen

    # ---- for routes ----

    @property
    def num_live(self) -> int:
        """Number of streams in memory."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait or are being worked on."""
        return len(self._jobs)

    @property
    def num_live_bytes(self) -> int:
        """Memory of the live streams without their source."""
        return sum(slot.num_bytes for slot in self._live.values())

    @property
    def estimated_gain(self) -> float:
        """Mean estimated gain of the streams that have one; NaN if there is none."""
        found = [gain for _, health in self.list_health() if (gain := health.get("estimated_gain")) is not None]
        return sum(found) / len(found) if found else float("nan")

    def list_health(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the streams by name, each with its last known health, the most recently used first."""
        summaries = [(slot.name, slot.last_summary or {}) for slot in list(self.slots.values())]
        summaries.sort(key=lambda each: -each[1].get("used_at", 0.0))
        return [(name, summary.get("health") or {}) for name, summary in summaries]

    @property
    def unsaved_seconds(self) -> float:
        """Age of the oldest change that is not saved; 0 if there is none."""
        times = [slot.unsaved_since for slot in self._live.values() if slot.unsaved_since is not None]
        return time.monotonic() - min(times) if times else 0.0

    def slot(self, name: str) -> StreamSlot:
        """Return a stream that exists; ApiError if there is none."""
        if name not in self.slots:
            raise ApiError(404, f"there is no stream {name!r}: its first image creates it")
        return self.slots[name]

    async def run(self, name: str, work: Callable[[ServedStream], T], *, create: bool = False) -> T:
        """Do some work on a stream in a thread when its turn comes; ApiError if that would take too long.

        Args:
            name: Name of the stream.
            work: Called with the stream; what it returns is returned.
            create: Whether to create the stream if there is none.
        """
        slot = self._slot_or_new(name) if create else self.slot(name)
        self._check_queues(slot)
        self.slots[name] = slot  # not before the check: nobody would remove it after an error
        started = asyncio.Event()
        job = asyncio.create_task(self._run_in_turn(slot, work, started))
        slot.num_waiting += 1
        self._jobs.add(job)
        job.add_done_callback(lambda _job: self._finish(slot, job))
        # Not wait_for, which would cancel: an update that has started must end, even if nobody waits for it.
        await asyncio.wait({job}, timeout=self.limits.request_timeout)
        if not job.done():
            seconds = f"{self.limits.request_timeout:g} s"
            if started.is_set():
                raise ApiError(504, f"no answer within {seconds}; the update continues and will count")
            job.cancel()
            raise ApiError(503, f"the stream was busy for {seconds}; nothing was done", retry_after=1)
        return job.result()

    def image_size(self, name: str) -> tuple[int, int] | None:
        """Return the (height, width) of a stream's first image; None if there is none yet."""
        return self.slots[name].image_size if name in self.slots else None

    async def delete(self, name: str) -> None:
        """Delete a stream, in memory and on disk."""
        self.check_open()
        slot = self.slot(name)
        async with slot.turn, slot.in_use:
            if self.slots.get(name) is slot:
                with report_disk_errors(f"deleting stream {name}", self.metrics.count_failure):
                    await self._run_in_thread(self._disk_threads, self.factory.snapshots.delete, name)
                slot.is_deleted = True
                slot.forget()
                self._live.pop(name, None)
                del self.slots[name]
                self.factory.log.append(name, StreamEvent.DELETE, "requested")

    async def autosave_loop(self) -> None:
        """Save what has changed at regular intervals, until the task is cancelled."""
        due = time.monotonic()
        while True:
            # At a fixed rate: if saving takes less than an interval, a change is saved within two of them.
            due = max(due + self.snapshot_interval, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            await self.save_all()

    async def save_all(self) -> None:
        """Try to save every stream in memory that has changed; failures are logged and counted."""
        pending = [slot for slot in self._live.values() if slot.is_dirty]
        try:
            async with asyncio.TaskGroup() as savers:
                for _ in range(min(self._num_savers, len(pending))):
                    savers.create_task(self._save_pending(pending))
        except Exception:  # whatever it is, the next attempt may succeed
            self.metrics.snapshot_failures.inc()
            logger.exception("streams could not be saved")

    async def close(self) -> None:
        """Finish the jobs that were accepted, and save every stream; OSError if some could not be saved."""
        self.is_closed = True
        while self._jobs:
            await asyncio.wait(set(self._jobs))
        for attempt in range(FINAL_SAVE_ATTEMPTS):
            if attempt:
                await asyncio.sleep(FINAL_SAVE_PAUSE)
            await self.save_all()
            if not any(slot.is_dirty for slot in self._live.values()):
                break
        self._threads.shutdown()
        self._disk_threads.shutdown()
        self.check_all_saved()

    def check_all_saved(self) -> None:
        """Raise OSError if a stream in memory has changed since its last snapshot."""
        if unsaved := sorted(slot.name for slot in self._live.values() if slot.is_dirty):
            names = ", ".join(unsaved[:5]) + (", ..." if len(unsaved) > 5 else "")
            raise OSError(
                f"{len(unsaved)} streams could not be saved and will resume from their last snapshot ({names}): "
                "see the log"
            )

    # ---- turns ----

    def _slot_or_new(self, name: str) -> StreamSlot:
        if name in self.slots:
            return self.slots[name]
        if len(self.slots) >= self.limits.max_streams:
            raise ApiError(
                429, f"there are {len(self.slots)} streams, and no more are allowed: delete one", retry_after=60
            )
        return StreamSlot(name, None)

    def check_open(self) -> None:
        """Raise ApiError with status 503 if the service shuts down."""
        if self.is_closed:
            raise ApiError(503, "the service is shutting down", retry_after=5)

    def _check_queues(self, slot: StreamSlot) -> None:
        self.check_open()
        if slot.num_waiting >= self.limits.max_queue or len(self._jobs) >= self.limits.max_total_queue:
            seconds = min(max(1, math.ceil(slot.num_waiting * self._mean_seconds)), 60)
            raise ApiError(429, "too many requests are waiting: send the request again later", retry_after=seconds)

    def _finish(self, slot: StreamSlot, job: asyncio.Task[Any]) -> None:
        slot.num_waiting -= 1
        self._jobs.discard(job)
        if not job.cancelled():
            job.exception()  # or asyncio would report one that nobody waited for; it is logged already
        is_known = slot.is_stored or slot.last_summary is not None or slot.stream is not None
        if not is_known and not slot.num_waiting and self.slots.get(slot.name) is slot:
            del self.slots[slot.name]

    async def _run_in_turn(self, slot: StreamSlot, work: Callable[[ServedStream], T], started: asyncio.Event) -> T:
        async with slot.turn, self._workers, slot.in_use:
            if slot.is_deleted:
                raise ApiError(409, f"the stream {slot.name!r} was deleted while this request waited: send it again")
            started.set()
            with hide_internal_errors(f"a request for stream {slot.name}", self.metrics.count_failure):
                stream = await self._bring_in(slot)
                begun, slot.is_working = time.monotonic(), True
                try:
                    result: T = await self._run_in_thread(self._threads, slot.run, work, stream)
                    slot.is_new = False
                    return result
                except Exception:
                    if slot.is_new:  # the request that creates a stream creates none if it fails
                        del self._live[slot.name]
                        slot.forget()
                        slot.last_summary = None
                    raise
                finally:
                    slot.is_working = False
                    if slot.is_dirty and slot.unsaved_since is None:
                        slot.unsaved_since = time.monotonic()
                    self._largest_stream = max(self._largest_stream, slot.num_bytes)
                    self._mean_seconds += 0.1 * (time.monotonic() - begun - self._mean_seconds)

    async def _run_in_thread(self, threads: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
        """Wait for a thread, even if cancelled: it cannot be stopped, and needs the caller's locks to its end."""
        job = asyncio.get_running_loop().run_in_executor(threads, work, *arguments)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            await asyncio.wait({job})
            raise

    # ---- memory and disk ----

    async def _bring_in(self, slot: StreamSlot) -> ServedStream:
        if slot.stream is None:
            async with self._moving:
                await self._make_room()
                slot.stream = await self._read_or_create(slot)
                slot.num_saved_changes = 0
                slot.observe(slot.stream)
        self._live[slot.name] = self._live.pop(slot.name, slot)  # the most recently used comes last
        return slot.stream

    async def _read_or_create(self, slot: StreamSlot) -> ServedStream:
        snapshots = self.factory.snapshots
        # Errors of the disk may be temporary, and what is stored undamaged.
        with report_disk_errors(f"reading stream {slot.name}", self.metrics.count_failure):
            if not slot.is_stored:  # or its disk was not there at the start
                slot.is_stored = bool(await self._run_in_thread(self._threads, snapshots.numbers, slot.name))
            if slot.is_stored:
                try:
                    return await self._run_in_thread(self._threads, self.factory.read, slot.name)
                except DamagedCheckpointError as error:
                    await self._run_in_thread(self._threads, self.factory.quarantine, slot.name, error)
                    slot.is_stored = False
                except CheckpointError as error:  # the operator's mistake, for the log
                    raise CheckpointError(
                        f"the stored state of stream {slot.name} does not fit this service ({error}): serve it with "
                        "the network and settings that it was saved with, or delete the stream"
                    ) from error
        slot.is_new = True
        return await self._run_in_thread(self._threads, self.factory.create, slot.name)

    async def _make_room(self) -> None:
        """Move the least recently used streams to disk until one more fits."""
        while self._live and (
            len(self._live) >= self.limits.max_live_streams
            or self.num_live_bytes + self._largest_stream > self.limits.max_live_bytes
        ):
            idle = [slot for slot in self._live.values() if not slot.is_working]
            if not idle:
                break  # for lack of memory only: there are at most as many workers as live streams
            leaving = next((slot for slot in idle if not slot.in_use.locked()), idle[0])
            async with leaving.in_use:  # it may be being saved
                if leaving.stream is None:
                    continue  # deleted meanwhile
                if leaving.is_dirty:
                    with report_disk_errors("moving another stream to disk", self.metrics.count_failure):
                        await self._save(leaving)
                leaving.forget()
                del self._live[leaving.name]

    async def _save_pending(self, pending: list[StreamSlot]) -> None:
        """Save one stream after the other, while there are any; several tasks share the list."""
        while pending:
            # Those first that can be saved now; the others are saved as soon as the request in progress is done.
            slot = next((slot for slot in pending if not slot.is_working), pending[0])
            pending.remove(slot)
            async with slot.in_use:
                if slot.is_dirty:
                    with suppress(Exception):  # logged already; the previous snapshot is still there
                        await self._save(slot)

    async def _save(self, slot: StreamSlot) -> None:
        assert slot.stream is not None
        num_changes = slot.stream.num_changes
        try:
            await self._run_in_thread(self._disk_threads, self.factory.snapshots.write, slot.stream)
        except Exception:
            self.metrics.snapshot_failures.inc()
            logger.exception("stream %s could not be saved", slot.name)
            raise
        slot.num_saved_changes, slot.last_summary, slot.unsaved_since = num_changes, slot.stream.summary(), None
        slot.is_stored = True


def _find_streams(factory: StreamFactory) -> dict[str, StreamSlot]:
    """Return every stream on disk; damaged ones are moved out of the way, and others may be readable later."""
    slots, snapshots = {}, factory.snapshots
    for name in list(snapshots.names()):
        try:
            slots[name] = StreamSlot(name, snapshots.read_summary(name), is_stored=True)
        except DamagedCheckpointError as error:
            factory.quarantine(name, error)
        except OSError as error:
            slots[name] = StreamSlot(name, None, is_stored=True)
            logger.error("stream %s cannot be read now, and is answered with status 503: %s", name, error)
    return slots

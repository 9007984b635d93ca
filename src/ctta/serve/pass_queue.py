"""Single images of several streams that the source answers: whoever gets a worker takes several of them."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ctta.serve.errors import hide_internal_errors
from ctta.serve.passes import SourcePasses, largest_pass
from ctta.serve.slot import StreamSlot
from ctta.serve.stream import ServedStream


@dataclass(frozen=True)
class SingleImage:
    """A request for one image, whose answer may come from the source network.

    Attributes:
        x: The image as a batch of one.
        is_answered_by_source: Returns whether the source answers it in the current state of the stream; called in the
            event loop.
        work: Called in a thread with the stream and the logits of the source, or None if they are not known.
    """

    x: Tensor
    is_answered_by_source: Callable[[ServedStream], bool]
    work: Callable[[ServedStream, Tensor | None], Any]


@dataclass(frozen=True)
class Answer:
    """What the work on a stream returned."""

    value: Any


@dataclass(eq=False)
class _Waiting:
    """A request that has the turn of its stream, and waits for a pass."""

    slot: StreamSlot
    image: SingleImage
    started: asyncio.Event
    answer: asyncio.Future[Answer | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class PassQueue:
    """Let single images that wait for a worker share a pass of the source network.

    Nothing is delayed: a worker takes the images that are there when it becomes free.

    Args:
        passes: The passes.
        workers: Limits what works in parallel.
        num_workers: That limit.
        run_in_thread: Runs a function with an argument in a worker thread.
        on_failure: Called with the cause of a failure that is not the client's fault.
    """

    def __init__(
        self,
        passes: SourcePasses,
        workers: asyncio.Semaphore,
        num_workers: int,
        run_in_thread: Callable[..., Coroutine[Any, Any, list[Answer | Exception]]],
        on_failure: Callable[[str], None],
    ) -> None:
        self._passes, self._workers, self._num_workers = passes, workers, num_workers
        self._run_in_thread, self._on_failure = run_in_thread, on_failure
        self._waiting: list[_Waiting] = []
        self._runners: set[asyncio.Task[None]] = set()  # or nothing would keep them from being collected
        self._num_running = 0  # without those that have found nothing to do, and are about to end

    async def join(self, slot: StreamSlot, image: SingleImage, started: asyncio.Event) -> Answer | None:
        """Wait for a pass, and finish the request with its logits.

        Args:
            slot: The stream, whose turn the caller has.
            image: The image.
            started: Set once the pass has started.

        Returns:
            The answer; None if the request has to be handled by itself, as the stream has moved to disk or is being
            saved.

        Raises:
            ApiError: With the status for the client.
        """
        waiting = _Waiting(slot, image, started)
        self._waiting.append(waiting)
        if self._num_running < self._num_workers:
            self._num_running += 1
            runner = asyncio.create_task(self._run_passes())
            self._runners.add(runner)
            runner.add_done_callback(self._runners.discard)
        try:
            return await waiting.answer
        finally:
            if waiting in self._waiting:  # given up
                self._waiting.remove(waiting)

    async def _run_passes(self) -> None:
        try:
            while self._waiting:
                async with self._workers:
                    if group := self._take_group():
                        await self._run_pass(group)
        finally:
            self._num_running -= 1

    def _take_group(self) -> list[_Waiting]:
        """Take the next images of one shape, without those of streams that cannot be used at once."""
        for waiting in list(self._waiting):
            if waiting.answer.done():  # given up, but not removed yet
                self._waiting.remove(waiting)
            elif waiting.slot.stream is None or waiting.slot.in_use.locked():
                self._waiting.remove(waiting)
                waiting.answer.set_result(None)
        if not self._waiting:
            return []
        x = self._waiting[0].image.x
        same = [waiting for waiting in self._waiting if waiting.image.x.shape == x.shape]
        group = same[: largest_pass(len(same)) if self._passes.may_share(x) else 1]
        self._waiting = [waiting for waiting in self._waiting if waiting not in group]
        return group

    async def _acquire(self, group: list[_Waiting]) -> list[_Waiting]:
        """Return those of a group whose streams are in memory and now in use for them; the others are done with."""
        for waiting in group:
            # Free, but whoever waited for it before comes first: a snapshot, or a move to disk. Neither waits for us.
            await waiting.slot.in_use.acquire()
        acquired = []
        for waiting in group:
            if waiting.answer.done() or waiting.slot.stream is None:  # given up, or moved to disk meanwhile
                waiting.slot.in_use.release()
                if not waiting.answer.done():
                    waiting.answer.set_result(None)
            else:
                acquired.append(waiting)
        return acquired

    async def _run_pass(self, group: list[_Waiting]) -> None:
        group = await self._acquire(group)
        if not group:
            return
        for waiting in group:
            waiting.slot.is_working = True
            waiting.started.set()
        outcomes: Sequence[Answer | Exception]
        try:
            outcomes = await self._run_in_thread(self._answer, group)
        except Exception as error:  # no thread
            outcomes = [error] * len(group)
        finally:
            for waiting in group:
                waiting.slot.is_working = False
                waiting.slot.note_changes()
                waiting.slot.in_use.release()
        for waiting, outcome in zip(group, outcomes, strict=True):
            if waiting.answer.done():
                continue
            if isinstance(outcome, Exception):
                waiting.answer.set_exception(outcome)
            else:
                waiting.answer.set_result(outcome)

    def _answer(self, group: list[_Waiting]) -> list[Answer | Exception]:
        """Run a pass and finish each request, in a thread."""
        logits: list[Tensor] | list[None]
        try:
            logits = self._passes.predict_each([waiting.image.x for waiting in group])
        except Exception:  # each has a pass of its own then, and fails by itself
            logits = [None] * len(group)
        return [self._finish(waiting, row) for waiting, row in zip(group, logits, strict=True)]

    def _finish(self, waiting: _Waiting, logits: Tensor | None) -> Answer | Exception:
        slot, work = waiting.slot, waiting.image.work
        assert slot.stream is not None
        try:
            with hide_internal_errors(f"a request for stream {slot.name}", self._on_failure):
                return Answer(slot.run(lambda stream: work(stream, logits), slot.stream))
        except Exception as error:
            return error

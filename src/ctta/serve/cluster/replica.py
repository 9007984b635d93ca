"""A replica: the service of one process, for the streams that it owns."""

import asyncio
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from fastapi import FastAPI

from ctta.serve.app import create_app
from ctta.serve.auth import Tokens
from ctta.serve.cluster.coordinator import HandOverError, Member
from ctta.serve.cluster.messages import HttpRequest, HttpResponse, call_app
from ctta.serve.cluster.snapshots import FencedSnapshots
from ctta.serve.cluster.state import SharedState
from ctta.serve.cluster.view import View
from ctta.serve.listing import Listing, StreamQuery, list_streams
from ctta.serve.service import Service

logger = logging.getLogger("ctta.serve")


class CoordinatorHandle(Protocol):
    """What a replica calls of the coordinator, wherever that runs."""

    async def join(self, member: Member) -> None:
        """Ask to become a member."""

    async def renew(self, name: str, incarnation: str) -> View | None:
        """Extend the lease; None if there is none."""


class Replica:
    """Serves the streams that it owns while it holds a lease.

    Args:
        name: Name of the replica.
        make_service: Called with the shared state; returns the service.
        path: Path of the shared state.
        coordinator: Grants leases.
        lease: Seconds that a lease lasts.
        tokens: Bearer tokens of the service.
        node: Machine that this process runs on.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        name: str,
        make_service: Callable[[SharedState], Service],
        path: str,
        coordinator: CoordinatorHandle,
        *,
        lease: float,
        tokens: Tokens = Tokens(),  # noqa: B008  # frozen
        node: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.node, self.lease = name, node, lease
        self._coordinator, self._clock = coordinator, clock
        self.incarnation = uuid.uuid4().hex
        self.view = self._newest_view = View()
        self._pending: View | None = None  # prepared for
        self._lease_until = 0.0
        self._is_complete = False  # whether all streams of the view have been found
        self._changing = asyncio.Lock()
        self._in_flight: Counter[str] = Counter()
        self._landed, self._notified, self._view_came = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.state = SharedState(
            path, f"{name}-{self.incarnation[:8]}", owns=self._is_assigned, may_write=lambda: self.has_lease
        )
        self.service = make_service(self.state)
        self.app: FastAPI = create_app(self.service, tokens)

    @property
    def has_lease(self) -> bool:
        """Whether this process may answer and save for now."""
        return self._clock() < self._lease_until

    @property
    def _snapshots(self) -> FencedSnapshots:
        snapshots = self.service.factory.snapshots
        assert isinstance(snapshots, FencedSnapshots)
        return snapshots

    def _is_assigned(self, stream: str) -> bool:
        """Return whether a stream is this replica's in the current view."""
        return self.view.members.get(self.name) == self.incarnation and self.view.owner(stream) == self.name

    def _is_staying(self, stream: str) -> bool:
        pending = self._pending
        return pending is None or (
            pending.members.get(self.name) == self.incarnation and pending.owner(stream) == self.name
        )

    def owns(self, stream: str) -> bool:
        """Return whether requests for a stream are to be answered here, and now."""
        is_found = self._is_complete or stream in self.service.store.slots
        is_lost = stream in self._snapshots.lost
        return self.has_lease and self._is_assigned(stream) and self._is_staying(stream) and is_found and not is_lost

    # ---- requests ----

    async def handle(self, stream: str | None, request: HttpRequest) -> HttpResponse | None:
        """Answer a request.

        Args:
            stream: Stream that it is about; None if it is about none.
            request: The request.

        Returns:
            The answer; None if the stream is not served here, and nothing was done.
        """
        if stream is None:
            return await call_app(self.app, request)
        if not self.owns(stream):
            return None
        self._in_flight[stream] += 1
        try:
            response = await call_app(self.app, request)
        finally:
            self._in_flight[stream] -= 1
            if not self._in_flight[stream]:
                del self._in_flight[stream]
            self._landed.set()
        if not self.has_lease:  # another replica may have answered meanwhile
            message = b'{"error": "the replica lost its lease; the stream resumes elsewhere: send the request again"}'
            return HttpResponse(503, [(b"content-type", b"application/json"), (b"retry-after", b"1")], message)
        return response

    async def list_streams(self, query: StreamQuery) -> Listing:
        """List the streams of this replica.

        Args:
            query: What to list.

        Returns:
            The list.
        """
        return await list_streams(self.service.store.slots.values(), query)

    async def summaries(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the summaries of streams; those that are not here any more are left out.

        Args:
            names: Names of streams.

        Returns:
            Their summaries.
        """
        slots = self.service.store.slots
        return [slots[name].summary() for name in names if name in slots and slots[name].last_summary is not None]

    # ---- lease and view ----

    async def run(self) -> None:
        """Run the service, and hold a lease, until the task is cancelled."""
        async with self.app.router.lifespan_context(self.app):
            adopting = asyncio.create_task(self._adopt_loop())
            try:
                await self._renew_loop()
            finally:
                adopting.cancel()
                await asyncio.wait({adopting})

    async def _renew_loop(self) -> None:
        has_joined = False
        while True:
            self._notified.clear()
            # The coordinator may be being restarted; as long as there is a lease, streams are served without it.
            try:
                async with asyncio.timeout(self.lease):
                    if not has_joined:
                        await self._coordinator.join(self._member())
                    has_joined = await self._renew()
            except Exception as error:
                logger.warning("replica %s could not renew its lease: %r", self.name, error)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.lease / 5):
                    await self._notified.wait()

    async def notify(self) -> None:
        """Ask for the view now, as it has changed."""
        self._notified.set()

    def _member(self) -> Member:
        return Member(self.name, self.incarnation, self.node, os.getpid())

    async def _renew(self) -> bool:
        """Renew the lease; False if there is none, and the replica has to join again."""
        sent = self._clock()
        view = await self._coordinator.renew(self.name, self.incarnation)
        if view is None:
            await self._start_over()
            return False
        if view.members.get(self.name) == self.incarnation:
            self._lease_until = sent + self.lease  # from before the coordinator knew: it counts from later on
        if view.epoch > self._newest_view.epoch:
            self._newest_view = view
            self._view_came.set()
        return True

    async def _adopt_loop(self) -> None:
        """Follow the view, next to renewing the lease: finding streams may take longer than a lease lasts."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.lease):
                    await self._view_came.wait()
            try:
                if self._view_came.is_set():
                    self._view_came.clear()
                    await self._adopt(self._newest_view)
                for stream in list(self._snapshots.lost):
                    await self.service.store.release(stream, save=False)
                await asyncio.to_thread(self.state.upload_audit_log)
            except Exception:
                logger.exception("replica %s could not find its streams, and tries again", self.name)
                await asyncio.sleep(self.lease / 5)
                self._view_came.set()

    async def _start_over(self) -> None:
        """Forget all streams, which belong to others now, and join as a new member."""
        logger.warning("replica %s has no lease any more: its streams resume elsewhere", self.name)
        async with self._changing:
            self._lease_until, self.view, self._pending = 0.0, View(), None
            self._newest_view, self._is_complete = View(), False
            self.incarnation = uuid.uuid4().hex
            # A request that was accepted before might create its stream anew once that is forgotten.
            await self._wait_for_requests(lambda stream: True)
            for stream in list(self.service.store.slots):
                await self._release(stream, save=False)

    async def prepare(self, view: View, incarnation: str) -> None:
        """Save and release the streams that leave this replica in the next view.

        Args:
            view: The next view.
            incarnation: Incarnation of the replica that is asked.

        Raises:
            HandOverError: If a stream could not be saved.
            LookupError: If another incarnation was asked.
        """
        if incarnation != self.incarnation:
            raise LookupError(f"this is another incarnation of replica {self.name}")
        async with self._changing:
            if view.epoch <= self.view.epoch:
                return
            self._pending = view  # from here on, no request for a stream that leaves is accepted
            await self._wait_for_requests(lambda stream: not self._is_staying(stream))
            leaving = [stream for stream in self.service.store.slots if not self._is_staying(stream)]
            results = await asyncio.gather(*(self._release(stream) for stream in leaving), return_exceptions=True)
            if errors := [result for result in results if isinstance(result, BaseException)]:
                raise HandOverError(f"{len(errors)} streams of replica {self.name} could not be saved: {errors[0]}")

    async def _wait_for_requests(self, concerns: Callable[[str], bool]) -> None:
        """Wait until no request for some streams is being handled."""
        while any(concerns(stream) for stream in self._in_flight):
            self._landed.clear()
            await self._landed.wait()

    async def is_process_gone(self, pid: int) -> bool:
        """Return whether there is no such process on this machine.

        Args:
            pid: Process id.
        """
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # it exists, and is somebody else's
            return False
        return False

    async def _adopt(self, view: View) -> None:
        """Serve according to a view, and find the streams that are new here."""
        async with self._changing:
            if view.epoch < self.view.epoch or (self._pending and view.epoch < self._pending.epoch):
                return
            self._is_complete = False
            self.view, self._pending = view, None
            self._snapshots.start_epoch(view.epoch, held=self.service.store.slots)
            if view.members.get(self.name) == self.incarnation:
                await self.service.store.adopt()
                self._is_complete = True

    async def _release(self, stream: str, *, save: bool = True) -> None:
        await self.service.store.release(stream, save=save)
        self._snapshots.release(stream)

"""The coordinator: who is a member, for how long, and when streams move.

A replica answers and saves only while it holds a lease, which it renews all the time. A stream gets another owner only
after its owner has released it, has ended for certain, or has lost its lease, so there are never two. Views change in
two steps: every member of the old view first saves and releases the streams that leave it (*prepare*), and only then
their new owners may read them (*commit*). The view is recorded before it takes effect, so the coordinator may be
restarted at any time.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Protocol

from ctta.serve.cluster.state import SharedFiles, read_cluster, write_cluster
from ctta.serve.cluster.view import View

logger = logging.getLogger("ctta.serve")

DEFAULT_LEASE = 10.0  # seconds
CLOCK_DRIFT = 1.05  # the coordinator waits longer than a replica, whose clock may be slower
RETRY_SECONDS = 5.0  # after streams could not be handed over


@dataclass(frozen=True)
class Member:
    """A process that serves streams.

    Attributes:
        name: Name of the replica, which decides which streams it owns.
        incarnation: Distinguishes it from its predecessors of the same name.
        node: Machine that it runs on.
        pid: Process id on that machine.
    """

    name: str
    incarnation: str
    node: str = ""
    pid: int = 0


class ReplicaHandle(Protocol):
    """What the coordinator calls of a replica, wherever that runs."""

    async def prepare(self, view: View, incarnation: str) -> None:
        """Save and release the streams that leave the replica; HandOverError if that fails."""

    async def notify(self) -> None:
        """Ask for the view, which has changed."""

    async def is_process_gone(self, pid: int) -> bool:
        """Return whether there is no such process on the machine of the replica."""


class HandOverError(Exception):
    """Streams could not be handed over, so the view does not change for now."""


class ClusterCoordinator:
    """Grants leases and changes the view; everything runs in one event loop.

    Args:
        files: Shared state, where the view is recorded.
        connect: Returns a handle for the replica of a name.
        lease: Seconds that a replica may serve without hearing from the coordinator.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        files: SharedFiles,
        connect: Callable[[str], ReplicaHandle],
        *,
        lease: float = DEFAULT_LEASE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files, self._connect, self.lease, self._clock = files, connect, lease, clock
        self._lock = files.lock()
        record = read_cluster(files)
        self._members = {each["name"]: Member(**each) for each in record.get("members", [])}
        # Past every epoch that was given out, and also one that may have been prepared but not recorded as committed.
        self._epoch = int(record.get("epoch", 0)) + 2
        # Those of before a restart may still serve, so they count as if they had just renewed their leases.
        self._expiry = {name: self._clock() + lease * CLOCK_DRIFT for name in self._members}
        self._leaving: set[str] = set()
        self._joining: dict[str, Member] = {}
        self._wake = asyncio.Event()
        self.view = View(self._epoch, {name: each.incarnation for name, each in self._members.items()})
        self._record(self._members)

    # ---- called by replicas and by the front ----

    async def join(self, member: Member) -> None:
        """Ask to become a member; the view says when that is so."""
        self._joining[member.name] = member
        self._wake.set()
        if (before := self._members.get(member.name)) is not None:
            await self.suspect(before.name, before.incarnation)

    def renew(self, name: str, incarnation: str) -> View | None:
        """Extend the lease of a replica; None if it has none, and must forget its streams and join again."""
        joining = self._joining.get(name)
        if joining is not None and joining.incarnation == incarnation:
            return self.view
        member = self._members.get(name)
        if member is None or member.incarnation != incarnation or not self._has_lease(name):
            return None
        self._expiry[name] = self._clock() + self.lease * CLOCK_DRIFT
        return self.view

    async def suspect(self, name: str, incarnation: str) -> None:
        """Take up a report that a replica does not answer: if its process has ended, do not wait for its lease."""
        member = self._members.get(name)
        if member is not None and member.incarnation == incarnation and await self._is_gone(member):
            self._expire(name)

    def leave(self, name: str) -> None:
        """Take all streams from a replica, which is going to be removed."""
        self._leaving.add(name)
        self._wake.set()

    def stay(self, name: str) -> None:
        """Allow a replica of a name to be a member again."""
        self._leaving.discard(name)
        self._wake.set()

    # ---- changes of the view ----

    async def run(self) -> None:
        """Watch the leases and change the view when members come and go, until the task is cancelled."""
        while True:
            self._wake.clear()
            wanted = self._wanted()
            if {name: each.incarnation for name, each in wanted.items()} != dict(self.view.members):
                try:
                    await self._change(wanted)
                except (HandOverError, OSError) as error:
                    logger.error("streams could not be handed over (%s): trying again in %g s", error, RETRY_SECONDS)
                    with suppress(OSError):  # the view cannot be recorded either
                        self._commit(self._living())  # whoever has released streams takes them back
                    await asyncio.sleep(RETRY_SECONDS)
                continue  # the members may have changed meanwhile
            soonest = min((expiry - self._clock() for expiry in self._expiry.values()), default=self.lease)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(soonest, 0.01)):
                    await self._wake.wait()

    def _wanted(self) -> dict[str, Member]:
        """Return the members that there should be."""
        # A new process of a replica can only be a member when the lease of the one before is over.
        arriving = {name: each for name, each in self._joining.items() if not self._has_lease(name)}
        return {name: each for name, each in {**self._living(), **arriving}.items() if name not in self._leaving}

    def _living(self) -> dict[str, Member]:
        return {name: each for name, each in self._members.items() if self._has_lease(name)}

    def _has_lease(self, name: str) -> bool:
        return self._expiry.get(name, 0.0) > self._clock()

    def _expire(self, name: str) -> None:
        self._expiry.pop(name, None)
        self._wake.set()

    async def _change(self, wanted: dict[str, Member]) -> None:
        self._epoch += 1
        self._record(self._members)  # the number is never given out again
        new = View(self._epoch, {name: each.incarnation for name, each in wanted.items()})
        logger.info("view %d: preparing for the replicas %s", new.epoch, ", ".join(sorted(wanted)) or "none")
        await asyncio.gather(*(self._prepare(member, new) for member in self._living().values()))
        # Whoever has died meanwhile is found by the next change.
        self._commit(wanted)

    async def _prepare(self, member: Member, new: View) -> None:
        """Wait until a member has released what leaves it, or has no lease."""
        call = asyncio.ensure_future(self._connect(member.name).prepare(new, member.incarnation))
        try:
            while self._has_lease(member.name):
                done, _ = await asyncio.wait({call}, timeout=min(0.2, self.lease / 5))
                if not done:
                    continue
                if (error := call.exception()) is None:
                    return
                if isinstance(error, HandOverError) and self._has_lease(member.name):
                    raise error
                await self.suspect(member.name, member.incarnation)
                await asyncio.sleep(0.1)
                call = asyncio.ensure_future(self._connect(member.name).prepare(new, member.incarnation))
        finally:
            call.cancel()

    def _commit(self, wanted: dict[str, Member]) -> None:
        self._epoch += 1
        self._record(wanted)
        for name, member in wanted.items():
            if self._joining.get(name) == member:
                del self._joining[name]
                self._expiry[name] = self._clock() + self.lease * CLOCK_DRIFT
        self._members = dict(wanted)
        self._expiry = {name: self._expiry[name] for name in wanted if name in self._expiry}
        self.view = View(self._epoch, {name: each.incarnation for name, each in wanted.items()})
        logger.info("view %d: the replicas are %s", self.view.epoch, ", ".join(sorted(wanted)) or "none")
        for name in wanted:
            task = asyncio.ensure_future(self._connect(name).notify())
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # then it hears with a renewal

    def _record(self, members: dict[str, Member]) -> None:
        """Record a view before it takes effect; OSError if that fails."""
        write_cluster(self._files, {"epoch": self._epoch, "members": [asdict(each) for each in members.values()]})

    async def _is_gone(self, member: Member) -> bool:
        """Return whether the process of a member has ended, as another replica on the same machine sees it."""
        others = [each for each in (*self._living().values(), *self._joining.values()) if each.node == member.node]
        for other in others:
            if other.pid == member.pid:
                continue
            try:
                async with asyncio.timeout(1.0):
                    return await self._connect(other.name).is_process_gone(member.pid)
            except Exception:  # it may be gone too
                continue
        return False

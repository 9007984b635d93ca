"""A service with several replicas in one process and one event loop, for tests without Ray."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from serving import SIZE, TIMEOUT, infer_request, make_images, make_tent
from torch import Tensor

from ctta import AdaptiveModel
from ctta.serve import Limits, Service, Tokens
from ctta.serve.cluster.coordinator import ClusterCoordinator, Member
from ctta.serve.cluster.front import Front, create_front
from ctta.serve.cluster.messages import HttpRequest, HttpResponse, call_app
from ctta.serve.cluster.replica import Replica
from ctta.serve.cluster.state import SharedFiles, SharedState
from ctta.serve.cluster.view import View

BATCH = 6  # images of each request, which is one update


class Handle:
    """A replica or the coordinator as the others see it: it may be dead."""

    def __init__(self, target: Callable[[], Any]) -> None:
        self._target = target

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            target = self._target()
            if target is None:
                raise ConnectionError("dead")
            result = getattr(target, method)(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return call


class LocalCoordinator(ClusterCoordinator):
    async def get_view(self) -> View:
        return self.view


class LocalCluster:
    """Replicas that can be killed, paused and added.

    The time of leases stands still unless :meth:`expire` lets it pass, so that a slow machine loses none.
    """

    def __init__(
        self,
        folder: Path,
        path: str,
        *,
        lease: float,
        snapshot_interval: float,
        tokens: Tokens = Tokens(),  # noqa: B008
    ) -> None:
        self.tokens, self.now = tokens, 0.0
        self.folder, self.path, self.lease, self.snapshot_interval = folder, path, lease, snapshot_interval
        self.replicas: dict[str, Replica] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.start_coordinator()
        front = Front(self.coordinator_handle, self.connect, timeout=TIMEOUT)
        self.front, self.app = front, create_front(front, tokens, Limits())

    def start_coordinator(self) -> None:
        self.coordinator = LocalCoordinator(
            SharedFiles(self.path), self.connect, lease=self.lease, clock=lambda: self.now
        )
        self.tasks["coordinator"] = asyncio.create_task(self.coordinator.run())

    @property
    def coordinator_handle(self) -> Any:
        return Handle(lambda: self.coordinator)

    def connect(self, name: str) -> Any:
        return Handle(lambda: self.replicas.get(name))

    def make_service(self, state: SharedState) -> Service:
        return make_service(state, self.folder, self.snapshot_interval)

    def start(self, name: str) -> None:
        replica = Replica(
            name,
            self.make_service,
            self.path,
            self.coordinator_handle,
            lease=self.lease,
            tokens=self.tokens,
            clock=lambda: self.now,
        )
        self.replicas[name] = replica
        self.tasks[name] = asyncio.create_task(replica.run())

    def kill(self, name: str) -> None:
        """Let a replica vanish without saving anything."""
        replica = self.replicas.pop(name)
        replica.service.factory.snapshots.write = lambda stream: None  # type: ignore[method-assign]
        self.tasks.pop(name).cancel()

    async def expire(self, name: str) -> None:
        """Let time pass until a replica that does not renew its lease is no member, while the others renew theirs."""
        while name in self.coordinator.view.members:
            self.now += self.lease / 4
            for replica in self.replicas.values():
                await replica.notify()
            await self.until(lambda: all(each._lease_until >= self.now + self.lease for each in self.replicas.values()))
            self.coordinator._wake.set()
            await asyncio.sleep(0.01)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_members(self, *names: str) -> None:
        await self.until(
            lambda: (
                set(self.coordinator.view.members) == set(names)
                and all(self.replicas[name].view == self.coordinator.view for name in names)
                and all(self.replicas[name]._is_complete for name in names)
            )
        )

    async def call(
        self, method: str, path: str, *, query: bytes = b"", body: bytes = b"", token: str | None = None
    ) -> HttpResponse:
        headers = [(b"host", b"localhost"), *([(b"authorization", f"Bearer {token}".encode())] if token else [])]
        request = HttpRequest(method, path, query, headers, body)
        return await call_app(self.app, request)

    async def infer(self, stream: str, x: Tensor) -> tuple[int, dict[str, Any]]:
        body = json.dumps(infer_request(stream, x)).encode()
        response = await self.call("POST", "/v2/models/ctta/infer", body=body)
        return response.status, json.loads(response.body)

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await task
        if self.coordinator._lock:
            self.coordinator._lock.release()


@asynccontextmanager
async def local_cluster(
    folder: Path,
    path: str | None = None,
    *,
    num_replicas: int = 3,
    lease: float = 20.0,
    snapshot_interval: float = 60.0,
    tokens: Tokens = Tokens(),  # noqa: B008
) -> AsyncIterator[LocalCluster]:
    path = path or str(folder / "state")
    cluster = LocalCluster(folder, path, lease=lease, snapshot_interval=snapshot_interval, tokens=tokens)
    try:
        for number in range(num_replicas):
            cluster.start(f"r{number}")
        await cluster.until_members(*(f"r{number}" for number in range(num_replicas)))
        yield cluster
    finally:
        await cluster.close()


def make_service(state: SharedState, folder: Path, snapshot_interval: float) -> Service:
    torch.set_num_threads(1)
    return Service(
        make_tent(folder, lr=0.01),
        state,
        image_size=SIZE,
        window_size=0,
        num_workers=1,
        snapshot_interval=snapshot_interval,
    )


def make_batch(stream: str, number: int) -> Tensor:
    return make_images(BATCH, seed=1000 * (1 + int("".join(filter(str.isdigit, stream)) or 0)) + number)


class History:
    """The batches that make up the state of a stream, and the answers of one process to them."""

    def __init__(self, template: AdaptiveModel, stream: str) -> None:
        self.stream, self._template = stream, template
        self._model = self._template.fork()
        self.batches: list[int] = []
        self.num_lost = 0
        self._unanswered: int | None = None

    def fail(self, batch: int) -> None:
        """Note a batch without an answer; only the first since the last answer can have been counted."""
        self._unanswered = batch if self._unanswered is None else self._unanswered

    def check(self, batch: int, answer: dict[str, Any]) -> None:
        """Check an answer bit for bit; a lower count of updates means that the stream resumed from a snapshot."""
        updates = answer["parameters"]["update"]
        if self._unanswered is not None and updates == len(self.batches) + 2:  # it was counted and saved
            self._model(make_batch(self.stream, self._unanswered))
            self.batches.append(self._unanswered)
        self._unanswered = None
        assert 1 <= updates <= len(self.batches) + 1, (self.stream, updates, self.batches)
        if num_lost := len(self.batches) + 1 - updates:
            self.num_lost += num_lost
            del self.batches[updates - 1 :]
            self._model = self._template.fork()
            for known in self.batches:
                self._model(make_batch(self.stream, known))
        self.batches.append(batch)
        expected: NDArray[np.float32] = self._model(make_batch(self.stream, batch)).detach().numpy()
        (logits,) = [output for output in answer["outputs"] if output["name"] == "logits"]
        found = np.array(logits["data"], dtype=np.float32).reshape(logits["shape"])
        np.testing.assert_array_equal(found, expected, err_msg=f"{self.stream} update {updates}")


__all__ = ["BATCH", "History", "LocalCluster", "Member", "local_cluster", "make_batch", "make_service"]

"""Shards of a service in one process and one event loop, for tests without Ray."""

import asyncio
import json
from collections.abc import AsyncIterator
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
from ctta.serve.ray import RayOptions, RayService, Shard, SharedState, call_app, create_front, find_shard

BATCH = 6  # images of each request, which is one update
NUM_SHARDS = 4


class LocalShards(RayService):
    """Shards that can be killed; each is started when it is first called."""

    def __init__(self, folder: Path, path: str, *, snapshot_interval: float, tokens: Tokens, limits: Limits) -> None:
        def make(state: SharedState) -> Service:
            return make_service(state, folder, snapshot_interval)

        super().__init__(RayOptions(make, path, tokens=tokens, num_shards=NUM_SHARDS, limits=limits))
        self.timeout = TIMEOUT
        self.processes: dict[int, Shard] = {}
        self.app = create_front(self)

    async def running(self) -> list[int]:
        return sorted(self.processes)

    async def connect(self, shard: int) -> None:
        if shard not in self.processes:
            self.processes[shard] = self.start_shard(shard)

    async def call(self, shard: int, method: str, *arguments: Any) -> Any:
        await self.connect(shard)
        process = self.processes[shard]
        result = await getattr(process, method)(*arguments)
        if self.processes.get(shard) is not process:
            raise ConnectionError("it was killed meanwhile")
        return result

    def start_shard(self, shard: int) -> Shard:
        """Start a process for a shard, as Ray does: also if another one is still there."""
        return Shard(self.options, shard)

    def process_of(self, stream: str) -> Shard:
        return self.processes[find_shard(stream, NUM_SHARDS)]

    async def kill(self, stream: str) -> None:
        """Let the process of a stream vanish without saving anything."""
        process = self.processes.pop(find_shard(stream, NUM_SHARDS))
        process.service.factory.snapshots.write = lambda stream: None  # type: ignore[method-assign]
        await end(process)

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: bytes = b"",
        body: bytes = b"",
        token: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> tuple[int, bytes]:
        bearer = [(b"authorization", f"Bearer {token}".encode())] if token else []
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "headers": [(b"host", b"localhost"), *bearer, *headers],
        }
        response = await call_app(self.app, scope, body)
        return response.status_code, bytes(response.body)

    async def infer(self, stream: str, x: Tensor) -> tuple[int, dict[str, Any]]:
        body = json.dumps(infer_request(stream, x)).encode()
        status, content = await self.request("POST", "/v2/models/ctta/infer", body=body)
        return status, json.loads(content)


async def end(process: Shard) -> None:
    process._running.cancel()
    with suppress(asyncio.CancelledError, OSError):
        await process._running


@asynccontextmanager
async def local_shards(
    folder: Path,
    path: str | None = None,
    *,
    snapshot_interval: float = 60.0,
    tokens: Tokens = Tokens(),  # noqa: B008
    limits: Limits = Limits(),  # noqa: B008
) -> AsyncIterator[LocalShards]:
    state = path or str(folder / "state")
    shards = LocalShards(folder, state, snapshot_interval=snapshot_interval, tokens=tokens, limits=limits)
    try:
        yield shards
    finally:
        for process in shards.processes.values():
            with suppress(OSError):
                await process.close()


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

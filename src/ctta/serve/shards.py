"""One shard of a service on several machines: a process, its streams, and the state that all processes share.

The hash of its name assigns a stream to a shard, and one process at a time serves a shard. A process that starts claims
its shard: it leaves a marker with the next *incarnation* in the shared state, and only the highest incarnation of a
shard counts. The numbers of snapshots start with the incarnation that wrote them, so what a former process writes late
is lower than what its successor has read and written. A process confirms its claim in every second of its own clock in
which it answers, so one that was paused or cut off ends instead of answering.
"""

import asyncio
import hashlib
import logging
import os
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import Any

from starlette.types import ASGIApp, Message

from ctta.core.model import AdaptiveModel
from ctta.errors import ConfigError, DamagedCheckpointError
from ctta.serve.app import create_app
from ctta.serve.auth import Tokens
from ctta.serve.directory import StateDirectory, check_same_service, lock_shared
from ctta.serve.listing import Listing, StreamQuery, list_streams
from ctta.serve.persistence import INCARNATION, RemoteFiles, RemoteSnapshots, ShardLostError, Snapshots
from ctta.serve.service import Service
from ctta.serve.store import StreamSlot

logger = logging.getLogger("ctta.serve")

SERVICE_FILE = "service.json"
MAX_CLAIM_AGE = 1.0  # seconds since a claim was confirmed; Ray takes longer to declare a machine dead
CLAIM_INTERVAL = 0.5  # seconds between two confirmations without a request


def find_shard(stream: str, num_shards: int) -> int:
    """Return the shard of a stream.

    >>> [find_shard(f"camera{number}", 256) for number in range(4)]
    [191, 156, 165, 229]
    """
    return int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest()) % num_shards


def check_num_shards(path: str, num_shards: int) -> None:
    """Raise ConfigError if the streams in a shared state were started with another number of shards."""
    for found in {marker.split("/")[1] for marker in RemoteFiles(path).list("shards")} - {str(num_shards)}:
        raise ConfigError(f"the streams in {path} are on {found} shards for good: give --shards {found}")


class SharedState(StateDirectory):
    """The shared state as the process of one shard uses it, which claims the shard.

    Args:
        path: A folder that every machine sees under this path, or a URL for fsspec.
        num_shards: Number of shards.
        shard: Number of the shard.

    Raises:
        ConfigError: If a service of one process uses the folder.
    """

    def __init__(self, path: str, num_shards: int, shard: int) -> None:
        self.files, self.shard, self._num_shards = RemoteFiles(path), shard, num_shards
        self._folder = f"shards/{num_shards}/{shard:03d}"
        self._lock_file: int | None = None
        self._scratch: str | None = None
        if not self.files.is_folder:
            self._scratch = tempfile.mkdtemp(prefix="ctta-shard-")
            if recorded := self.files.read(SERVICE_FILE):
                Path(self._scratch, SERVICE_FILE).write_bytes(recorded)
        else:
            self._lock_file = lock_shared(Path(path))
        self.path = Path(self._scratch or path)
        self._uploaded_at = 0  # when the audit log had changed last
        self.incarnation = self._claim()

    def owns(self, stream: str) -> bool:
        """Return whether a stream belongs to this shard."""
        return find_shard(stream, self._num_shards) == self.shard

    def _claim(self) -> int:
        """Leave a marker with the next incarnation, and return it; no other process gets the same."""
        # The markers may be missing where somebody has copied the streams alone.
        snapshots = open_snapshots(self.files, self.path, owns=self.owns, incarnation=0)
        newest = max((max(snapshots.numbers(name)) for name in snapshots.names()), default=0) // INCARNATION
        while True:
            number = max([newest, *map(_parse_marker, self._markers())]) + 1
            own = f"{self._folder}/{number}-{uuid.uuid4().hex}"
            self.files.write(own)
            # Of two processes that have chosen the same number, at least the one that looks last sees the other's
            # marker, or a higher one of a third process, which removes lower ones.
            if all(name == own or _parse_marker(name) < number for name in self._markers()):
                break
            time.sleep(random.uniform(0.05, 0.5))
        for name in self._markers():
            if _parse_marker(name) < number:
                self.files.remove(name)
        return number

    def _markers(self) -> list[str]:
        return self.files.list(self._folder)

    def check_owner(self) -> None:
        """Raise ShardLostError if another process has claimed the shard; OSError if the state cannot be read."""
        if (newest := max(map(_parse_marker, self._markers()), default=0)) > self.incarnation:
            raise ShardLostError(
                f"shard {self.shard} has incarnation {newest}, and this process is incarnation {self.incarnation}: it "
                "was paused or cut off, or another service uses the same state"
            )

    @property
    def audit_file(self) -> Path:
        """File of the audit log of this incarnation."""
        return self.path / f"audit-{self.shard:03d}-{self.incarnation}.jsonl"

    def check_same_service(self, model: AdaptiveModel) -> None:
        """Raise ConfigError if the streams were started with another network or method."""
        check_same_service(self.path, model)
        if self._scratch and self.files.read(SERVICE_FILE) is None:
            self.files.write(SERVICE_FILE, (self.path / SERVICE_FILE).read_bytes())

    def open_snapshots(self) -> Snapshots:
        """Return the snapshots of the streams of this shard."""
        return open_snapshots(
            self.files, self.path, owns=self.owns, incarnation=self.incarnation, check_owner=self.check_owner
        )

    def upload_audit_log(self) -> None:
        """Copy the audit log, and the file before it, to where the streams are, if that is not a folder."""
        if not self._scratch or not self.audit_file.exists():
            return
        if (changed_at := self.audit_file.stat().st_mtime_ns) != self._uploaded_at:
            for file in self.path.glob(f"{self.audit_file.name}*"):
                self.files.write(file.name, file.read_bytes())
            self._uploaded_at = changed_at

    def release(self) -> None:
        """Let a service of one process use the folder; of a URL, copy what is left and remove the local folder."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None
        if self._scratch:
            self.upload_audit_log()
            shutil.rmtree(self._scratch, ignore_errors=True)


def open_snapshots(files: RemoteFiles, path: Path, **options: Any) -> Snapshots:
    """Return the snapshots in a shared state, which pass through a local folder if the state is not one."""
    directory = path / "streams"
    return Snapshots(directory, **options) if files.is_folder else RemoteSnapshots(files, directory, **options)


def read_slots(path: str) -> dict[str, StreamSlot]:
    """Return the streams in a shared state as they were saved, without changing anything; damaged ones are left out."""
    files, slots = RemoteFiles(path), {}
    with tempfile.TemporaryDirectory(prefix="ctta-front-") as scratch:
        snapshots = open_snapshots(files, Path(path if files.is_folder else scratch), incarnation=0)
        for name in list(snapshots.names()):
            with suppress(DamagedCheckpointError):  # which its shard finds and reports
                slots[name] = StreamSlot(name, snapshots.read_summary(name, take_over=False))
    return slots


def _parse_marker(name: str) -> int:
    return int(name.rpartition("/")[2].partition("-")[0])


def read_clock() -> float:
    """Return a time in seconds that passes also while this process or its machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Shard:
    """The process that serves the streams of one shard, as long as no other process has claimed it; a Ray actor.

    Args:
        make_service: Called with the shared state; returns the service.
        path: Path of the shared state.
        num_shards: Number of shards.
        shard: Number of this one.
        tokens: Bearer tokens of the service.
    """

    def __init__(
        self,
        make_service: Callable[[SharedState], Service],
        path: str,
        num_shards: int,
        shard: int,
        tokens: Tokens = Tokens(),  # noqa: B008  # frozen
    ) -> None:
        self._confirmed_at = read_clock()
        self.state = SharedState(path, num_shards, shard)
        try:
            self.service = make_service(self.state)
        except BaseException:
            self.state.release()
            raise
        self.app, self._is_closing = create_app(self.service, tokens), asyncio.Event()
        self._running = asyncio.get_event_loop().create_task(self._run())

    async def handle(self, scope: dict[str, Any], body: bytes) -> list[Message]:
        """Answer a request with messages of ASGI; OSError if the shard may be another process's by now."""
        messages = await call_app(self.app, scope, body)
        await self._confirm()
        return messages

    async def list_streams(self, query: StreamQuery) -> Listing:
        """List the streams of this shard."""
        return await list_streams(self.service.store.slots.values(), query)

    async def summaries(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the summaries of some streams; those that are not here any more are left out."""
        slots = self.service.store.slots
        return [slots[name].summary() for name in names if name in slots and slots[name].last_summary is not None]

    async def describe(self) -> dict[str, Any]:
        """Return what ``GET /cluster`` shows."""
        state = self.state
        return {"shard": state.shard, "incarnation": state.incarnation, "host": gethostname(), "pid": os.getpid()}

    async def close(self) -> None:
        """Save every stream; OSError if some could not be saved."""
        self._is_closing.set()
        await self._running

    async def _run(self) -> None:
        async with self.app.router.lifespan_context(self.app):
            while not self._is_closing.is_set():
                try:
                    await self._confirm(max_age=0.0)
                    await asyncio.to_thread(self.state.upload_audit_log)
                except OSError:
                    logger.exception("shard %d cannot reach its state, and answers nothing", self.state.shard)
                with suppress(TimeoutError):
                    async with asyncio.timeout(CLAIM_INTERVAL):
                        await self._is_closing.wait()

    async def _confirm(self, *, max_age: float = MAX_CLAIM_AGE) -> None:
        """Raise OSError unless the shard is this process's, or was so a moment ago."""
        asked_at = read_clock()
        if asked_at - self._confirmed_at < max_age:
            return
        try:
            await asyncio.to_thread(self.state.check_owner)
        except ShardLostError:
            logger.exception("this process ends")
            end_process()
            raise
        self._confirmed_at = asked_at


def end_process() -> None:
    """End this process without saving anything; Ray starts another one if it should serve the shard."""
    os._exit(1)


async def call_app(app: ASGIApp, scope: dict[str, Any], body: bytes) -> list[Message]:
    """Return the messages with which an ASGI application answers a request."""
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    messages: list[Message] = []
    answered = asyncio.Event()

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            answered.set()

    try:
        await app(scope, receive, send)
    except Exception:
        if not answered.is_set():  # or it is logged, and answered with status 500
            raise
    return messages

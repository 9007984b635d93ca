"""The service on a Ray cluster: named actors, which Ray restarts; a front on each machine, and one for each shard.

The hash of its name assigns a stream to a shard, and one process at a time serves a shard. A process that starts claims
its shard: it leaves a marker with the next *incarnation* in the shared state, and only the highest incarnation of a
shard counts. The numbers of snapshots start with the incarnation that wrote them, so what a former process writes late
is lower than what its successor has read and written. A process confirms its claim in every second of its own clock in
which it answers, so one that was paused or cut off ends instead of answering.
"""

import asyncio
import hashlib
import importlib
import logging
import math
import os
import random
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import gethostname
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message

from ctta.errors import ConfigError, DamagedCheckpointError, first_line
from ctta.io.atomic import parse_local_path
from ctta.serve.app import StreamServer, add_error_handlers, create_app, open_listener
from ctta.serve.directory import STREAMS_FOLDER, StateDirectory, lock_shared
from ctta.serve.http import METHODS, ApiError, Authenticator, BodyReader, MemoryBudget, Tokens, check_host
from ctta.serve.listing import Listing, StreamQuery, list_streams, merge_listings
from ctta.serve.metrics import merge_metrics
from ctta.serve.options import Limits, ShardOptions
from ctta.serve.persistence import INCARNATION, ShardLostError, Snapshots
from ctta.serve.protocol import estimate_memory, parse_stream_name, split_body
from ctta.serve.service import Service
from ctta.serve.store import StreamSlot

logger = logging.getLogger("ctta.serve")

T = TypeVar("T")

NAMESPACE = "ctta"
START_TIMEOUT = 600.0  # seconds; a cluster may have to start machines
POLL_TIMEOUT = 3.0  # seconds for what is asked of all shards; probes and scrapers wait longer
RETRY_PAUSE = 0.2  # seconds
MAX_AGE = 1.0  # seconds of what was asked of the head or read from the state for another request
NUM_THREADS = 4  # that start shards
HEAD = "node:__internal_head__"  # a resource of the node that Ray was started on
MAX_CLAIM_AGE = 1.0  # seconds since a claim was confirmed; Ray takes longer to declare a machine dead
CLAIM_INTERVAL = 0.5  # seconds between two confirmations without a request
#: Headers that describe a body as it was sent, and not as it was read.
BODY_HEADERS = {b"content-encoding", b"content-length", b"transfer-encoding"}
#: What a shard needs of a request.
SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string")


def import_ray(name: str = "ray") -> Any:
    """Return a module of Ray, or raise ImportError that names the extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError("a service on Ray needs the extra 'serve-ray': pip install 'ctta[serve-ray]'") from error


def find_shard(stream: str, num_shards: int) -> int:
    """Return the shard of a stream.

    >>> [find_shard(f"camera{number}", 256) for number in range(4)]
    [191, 156, 165, 229]
    """
    return int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest()) % num_shards


def check_num_shards(path: str, num_shards: int) -> None:
    """Raise ConfigError if the streams in a shared state were started with another number of shards."""
    for found in {folder.name for folder in Path(path, "shards").glob("*")} - {str(num_shards)}:
        raise ConfigError(f"the streams in {path} are on {found} shards for good: give --shards {found}")


def read_slots(path: str) -> dict[str, StreamSlot]:
    """Return the streams in a shared state as they were saved, but those that cannot be read; nothing is changed."""
    snapshots, slots = Snapshots(Path(path, STREAMS_FOLDER), incarnation=0), {}
    for name in list(snapshots.names()):
        with suppress(DamagedCheckpointError, OSError):  # which its shard finds and reports
            slots[name] = StreamSlot(name, snapshots.read_summary(name))
    return slots


class SharedState(StateDirectory):
    """The shared state as the process of one shard uses it, which claims the shard.

    Raises:
        ConfigError: If a service of one process uses the folder, or it is a URL.
    """

    def __init__(self, path: str, num_shards: int, shard: int) -> None:
        self.path, self.shard, self._num_shards = parse_local_path(path), shard, num_shards
        self._claims = self.path / "shards" / str(num_shards) / f"{shard:03d}"
        self._lock_file = ExitStack()
        self._lock_file.callback(os.close, lock_shared(self.path))
        self.incarnation = self._claim()

    def owns(self, stream: str) -> bool:
        """Return whether a stream belongs to this shard."""
        return find_shard(stream, self._num_shards) == self.shard

    def _claim(self) -> int:
        """Leave a marker with the next incarnation, and return it; no other process gets the same."""
        self._claims.mkdir(parents=True, exist_ok=True)
        # The markers may be missing where somebody has copied the streams alone.
        snapshots = Snapshots(self.path / STREAMS_FOLDER, owns=self.owns, incarnation=0)
        numbers = {0}
        for name in snapshots.names():
            with suppress(OSError):  # of this stream alone
                numbers |= snapshots.numbers(name)
        newest = max(numbers) // INCARNATION
        while True:
            number = max(newest, *self._markers().values(), 0) + 1
            own = self._claims / f"{number}-{uuid.uuid4().hex}"
            own.touch()
            # Of two processes that have chosen the same number, at least the one that looks last sees the other's
            # marker, or a higher one of a third process, which removes lower ones.
            if all(marker == own or other < number for marker, other in self._markers().items()):
                break
            time.sleep(random.uniform(0.05, 0.5))
        for marker, other in self._markers().items():
            if other < number:
                marker.unlink(missing_ok=True)
        return number

    def _markers(self) -> dict[Path, int]:
        """Return the incarnation of each marker of this shard; OSError if they cannot be read."""
        return {marker: int(marker.name.partition("-")[0]) for marker in self._claims.iterdir()}

    def check_owner(self) -> None:
        """Raise ShardLostError if another process has claimed the shard; OSError if the state cannot be read."""
        if (newest := max(self._markers().values(), default=0)) > self.incarnation:
            raise ShardLostError(
                f"shard {self.shard} has incarnation {newest}, and this process is incarnation {self.incarnation}: it "
                "was paused or cut off, or another service uses the same state"
            )

    @property
    def audit_file(self) -> Path:
        """File of the audit log of this incarnation."""
        return self.path / f"audit-{self.shard:03d}-{self.incarnation}.jsonl"

    def open_snapshots(self) -> Snapshots:
        """Return the snapshots of the streams of this shard."""
        return Snapshots(
            self.path / STREAMS_FOLDER, owns=self.owns, incarnation=self.incarnation, check_owner=self.check_owner
        )

    def release(self) -> None:
        """Let a service of one process use the folder."""
        self._lock_file.close()


@dataclass(frozen=True)
class RayOptions(ShardOptions):
    """How a service runs on a cluster; every process of it gets these."""

    make_service: Callable[[SharedState], Service]  # picklable; what it needs must be on every machine
    state: str  # folder that every machine sees under this path
    name: str = "ctta"
    tokens: Tokens = field(default_factory=Tokens, repr=False)
    limits: Limits = field(default_factory=Limits)  # of the front

    def __post_init__(self) -> None:
        parse_local_path(self.state)


def read_clock() -> float:
    """Return a time in seconds that passes also while this process or its machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


async def call_app(app: ASGIApp, scope: dict[str, Any], body: bytes) -> Response:
    """Return the answer of an ASGI application to a request."""
    messages: list[Message] = []
    requests: asyncio.Queue[Message] = asyncio.Queue()  # receiving more than one waits, as nobody disconnects
    requests.put_nowait({"type": "http.request", "body": body})

    async def send(message: Message) -> None:
        messages.append(message)

    try:
        await app(scope, requests.get, send)
    except Exception:
        if not messages:  # or it is logged, and answered with status 500
            raise
    response = Response(b"".join(each.get("body", b"") for each in messages), messages[0]["status"])
    response.raw_headers = list(messages[0]["headers"])
    return response


class Shard:
    """The process that serves the streams of one shard, as long as no other process has claimed it; a Ray actor."""

    def __init__(self, options: RayOptions, shard: int) -> None:
        self._confirmed_at = read_clock()
        self.state = SharedState(options.state, options.num_shards, shard)
        try:
            self.service = options.make_service(self.state)
        except BaseException:
            self.state.release()
            raise
        self.app, self._is_closing = create_app(self.service, options.tokens), asyncio.Event()
        self._running = asyncio.get_event_loop().create_task(self._run())

    async def handle(self, scope: dict[str, Any], body: bytes = b"") -> Response:
        """Answer a request; OSError if the shard may be another process's by now."""
        response = await call_app(self.app, scope, body)
        await self._confirm()
        return response

    async def list_streams(self, query: StreamQuery) -> Listing:
        """List the streams of this shard."""
        return await list_streams(self.service.store.slots.values(), query)

    async def summaries(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the summaries of some streams; those that are not here any more are left out."""
        slots = self.service.store.slots
        return [slots[name].summary() for name in names if name in slots and slots[name].last_summary is not None]

    async def describe(self) -> dict[str, Any]:
        """Return what ``GET /cluster`` shows."""
        shard, incarnation = self.state.shard, self.state.incarnation
        return {"shard": shard, "incarnation": incarnation, "host": gethostname(), "pid": os.getpid()}

    async def close(self) -> None:
        """Save every stream; OSError if some could not be saved."""
        self._is_closing.set()
        await self._running

    async def _run(self) -> None:
        async with self.app.router.lifespan_context(self.app):
            while not self._is_closing.is_set():
                try:
                    await self._confirm(max_age=0.0)
                except OSError:
                    logger.exception("shard %d cannot reach its state, and answers nothing", self.state.shard)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._is_closing.wait(), CLAIM_INTERVAL)

    async def _confirm(self, *, max_age: float = MAX_CLAIM_AGE) -> None:
        """Raise OSError unless the shard is this process's, or was so a moment ago."""
        asked_at = read_clock()
        if asked_at - self._confirmed_at < max_age:
            return
        try:
            await asyncio.to_thread(self.state.check_owner)
        except ShardLostError:
            logger.exception("this process ends, and saves nothing")
            os._exit(1)  # Ray starts another one if it should serve the shard
            raise
        self._confirmed_at = asked_at


class SharedCall(Generic[T]):
    """A call that may hang, which a thread of its own makes for all who ask at that time or soon after.

    Args:
        function: What to call.
        name: What does not answer if the call does not end in time.
    """

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function, self._name = function, name
        self._thread = ThreadPoolExecutor(1, "shared-call")
        self._call: asyncio.Future[T] | None = None
        self._started = -math.inf

    async def get(self, max_age: float) -> T:
        """Return the result of a recent call, or of a new one; raise an ApiError if there is none in time."""
        is_over = self._call is None or self._call.done()
        if self._call is None or (is_over and (time.monotonic() - self._started > max_age or self._call.exception())):
            self._started = time.monotonic()
            self._call = asyncio.get_running_loop().run_in_executor(self._thread, self._function)
            self._call.add_done_callback(_note_error)
        try:
            return await asyncio.wait_for(asyncio.shield(self._call), POLL_TIMEOUT)
        except (OSError, import_ray().exceptions.RayError) as error:  # also TimeoutError
            logger.error("%s does not answer: %r", self._name, error)
            raise ApiError(503, f"{self._name} does not answer", retry_after=5) from error


def _note_error(call: "asyncio.Future[Any]") -> None:
    """Take note of the error of a call for which nobody may wait any more, so that asyncio does not report it."""
    if not call.cancelled():
        call.exception()


class RayService:
    """A service on the cluster that this process is connected to, whose shards are started when first called."""

    def __init__(self, options: RayOptions) -> None:
        self.options, self.timeout = options, options.limits.request_timeout + POLL_TIMEOUT
        self._handles: dict[int, Any] = {}  # of shards that have answered
        self._connecting: dict[int, asyncio.Task[Any]] = {}
        # Not the threads of asyncio, which other requests need: these calls hang while the head does not answer.
        self._threads = ThreadPoolExecutor(NUM_THREADS, "connect")
        self._names = SharedCall(lambda: self.find_names("shard"), "the head of the cluster")
        self._stored = SharedCall(lambda: read_slots(options.state), "the state folder")
        self._num_asked = Counter[int]()  # requests in progress of each shard
        self._num_bytes = Counter[int]()  # of their bodies

    def start_shard(self, shard: int) -> Any:
        """Return the actor of a shard, of which Ray has one at most: that which exists, or a new one."""
        placement = {"scheduling_strategy": "SPREAD", "num_gpus": self.options.num_gpus or 0.0}
        actor = self._declare(Shard, f"shard-{shard}", num_cpus=self.options.num_cpus, **placement)
        return actor.remote(self.options, shard)

    def _declare(self, kind: type, name: str, **placement: Any) -> Any:
        return (
            import_ray()
            .remote(kind)
            .options(
                name=f"{self.options.name}-{name}",
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                max_restarts=-1,
                max_task_retries=0,  # a request must not be counted twice
                **placement,
            )
        )

    def find_names(self, kind: str) -> list[str]:
        """Return what follows the kind in the names of the actors of a kind."""
        prefix, found = f"{self.options.name}-{kind}-", import_ray().util.list_named_actors(all_namespaces=True)
        names = [each["name"] for each in found if each["namespace"] == NAMESPACE]
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def find(self, kind: str) -> dict[str, Any]:
        """Return the actors of a kind, by what follows the kind in their names."""
        ray, found = import_ray(), {}
        for name in self.find_names(kind):
            with suppress(ValueError):  # it has just ended
                found[name] = ray.get_actor(f"{self.options.name}-{kind}-{name}", NAMESPACE)
        return found

    async def running(self) -> list[int]:
        """Return the shards that have a process, or had one a moment ago; ApiError if the cluster does not say so."""
        return sorted(map(int, await self._names.get(MAX_AGE)))

    async def connect(self, shard: int) -> Any:
        """Return the actor of a shard once it answers; Ray may have to start it.

        Raises:
            ConnectionError: If it cannot be started.
            TimeoutError: If it takes too long.
        """
        while shard not in self._handles:
            if shard not in self._connecting:
                self._connecting[shard] = task = asyncio.create_task(self._connect(shard))
                task.add_done_callback(_note_error)
                task.add_done_callback(lambda _task: self._connecting.pop(shard))
            await asyncio.shield(self._connecting[shard])  # for all who wait for it
        return self._handles[shard]

    async def _connect(self, shard: int) -> None:
        loop, errors = asyncio.get_running_loop(), import_ray().exceptions
        async with asyncio.timeout(self.timeout):
            while shard not in self._handles:
                actor = await loop.run_in_executor(self._threads, self.start_shard, shard)
                try:
                    await actor.describe.remote()
                    self._handles[shard] = actor
                except errors.ActorUnavailableError:  # it is being restarted
                    await asyncio.sleep(RETRY_PAUSE)
                except errors.RayActorError as error:
                    raise ConnectionError(str(error)) from error

    async def call(self, shard: int, method: str, *arguments: Any) -> Any:
        """Call a method of a shard; ConnectionError if its process ended meanwhile."""
        actor = await self.connect(shard)
        try:
            return await getattr(actor, method).remote(*arguments)
        except import_ray().exceptions.RayActorError as error:
            self._handles.pop(shard, None)
            raise ConnectionError(str(error)) from error

    async def ask(self, shard: int, scope: dict[str, Any], body: bytes = b"") -> Response:
        """Send a request to a shard; ApiError with the status for the client if it does not answer."""
        # The others need room in this process.
        if self._num_asked[shard] >= self.options.limits.max_total_queue or self._is_too_large(shard, len(body)):
            raise ApiError(429, "too many requests are waiting: send the request again later", retry_after=1)
        self._num_asked[shard] += 1
        self._num_bytes[shard] += len(body)
        is_sent = False
        try:
            async with asyncio.timeout(self.timeout):
                await self.connect(shard)
                is_sent = True
                response: Response = await self.call(shard, "handle", scope, body)
                return response
        except TimeoutError:
            if is_sent:
                raise ApiError(504, f"no answer within {self.timeout:g} s; an update may still count") from None
            message = f"no process could be started for the stream within {self.timeout:g} s; nothing was done"
            raise ApiError(503, message, retry_after=5) from None
        except OSError as error:
            logger.error("shard %d does not answer: %s", shard, error)
            message = "the process of the stream does not answer; it resumes from its last snapshot: send it again"
            raise ApiError(503, message, retry_after=1) from error
        finally:
            self._num_asked[shard] -= 1
            self._num_bytes[shard] -= len(body)

    def _is_too_large(self, shard: int, num_bytes: int) -> bool:
        """Return whether a shard would hold more bytes than are then left for all; one body it may always have."""
        num_left = self.options.limits.max_total_body_bytes - self._num_bytes.total() - num_bytes
        return min(num_bytes, self._num_bytes[shard]) > 0 and self._num_bytes[shard] + num_bytes > num_left

    async def ask_all(self, method: str, *arguments: Any, of: Iterable[int] | None = None) -> dict[int, Any]:
        """Call a method of some shards, or of all that have a process; return what those return that answer soon."""

        async def ask(shard: int) -> Any:
            with suppress(OSError):  # also TimeoutError
                return await asyncio.wait_for(self.call(shard, method, *arguments), POLL_TIMEOUT)

        shards = list(await self.running() if of is None else of)
        answers = await asyncio.gather(*map(ask, shards))
        return {shard: answer for shard, answer in zip(shards, answers, strict=True) if answer is not None}

    async def list_streams(self, query: StreamQuery) -> dict[str, Any]:
        """Return a page of the streams of all shards; those that do not answer are listed as they were saved."""
        num_shards, listings = self.options.num_shards, await self.ask_all("list_streams", query)
        # What is saved for shards without a process does not change.
        slots = await self._stored.get(math.inf if len(listings) == len(await self.running()) else MAX_AGE)
        stored = {name: slot for name, slot in slots.items() if find_shard(name, num_shards) not in listings}
        listing = merge_listings([*listings.values(), await list_streams(stored.values(), query)])
        page = listing.page(query)
        found = await self.ask_all("summaries", page, of=listings)
        summaries = {each["name"]: each for part in found.values() for each in part}
        summaries |= {name: stored[name].summary() for name in page if name in stored}
        return listing.describe([summaries[stream] for stream in page if stream in summaries])

    def start(self, *, host: str = "127.0.0.1", port: int = 8000) -> None:
        """Start the service, or what is missing of one that runs, at an address of every machine; wait for an answer.

        Raises:
            ConfigError: If it cannot be started, or another service uses the state.
        """
        options, ray = self.options, import_ray()
        check_host(host, options.tokens)
        is_new = not self.find_names("shard")
        if is_new:
            StateDirectory(options.state).release()  # raises if another service uses it
        check_num_shards(options.state, options.num_shards)
        try:  # with one shard, so that mistakes are found now and not by the first client
            ray.get(self.start_shard(0).describe.remote(), timeout=START_TIMEOUT)
            fronts = self.start_fronts(host=host, port=port)
            ray.get([front.wait_until_listening.remote() for front in fronts], timeout=START_TIMEOUT)
        except BaseException as error:
            if is_new:  # or what has been started would go on without the command
                with suppress(OSError):  # of processes that have failed
                    self.stop()
            if isinstance(error, ray.exceptions.RayError):
                message = str(error).strip().splitlines()[-1]
                raise ConfigError(f"the service could not be started: {message}") from error
            raise

    def start_fronts(self, *, host: str, port: int) -> list[Any]:
        """Return the fronts of all machines, and start those that are missing."""
        ray, strategies = import_ray(), import_ray("ray.util.scheduling_strategies")
        # Of several nodes on one machine the head, which lives as long as the cluster.
        nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: HEAD in node["Resources"])
        machines = {node["NodeManagerAddress"]: node["NodeID"] for node in nodes}
        fronts = self.find("front")
        for address in machines.keys() - fronts.keys():
            placement = strategies.NodeAffinitySchedulingStrategy(machines[address], soft=False)
            actor = self._declare(Front, f"front-{address}", num_cpus=0, scheduling_strategy=placement)
            fronts[address] = actor.remote(self.options, host, port)
        return list(fronts.values())

    @property
    def is_running(self) -> bool:
        """Whether the service answers, or is being started."""
        return bool(self.find_names("front"))

    def stop(self) -> None:
        """Save every stream, and end all processes of the service; OSError if some streams could not be saved."""
        self._close("front", self.timeout)  # nothing is lost with one that fails
        if errors := self._close("shard", START_TIMEOUT):
            raise OSError(f"{len(errors)} shards could not save all of their streams: {errors[0]}")

    def _close(self, kind: str, timeout: float) -> list[str]:
        """Close and end the actors of a kind, and return what went wrong."""
        ray, actors = import_ray(), self.find(kind)
        closing, errors = {name: actor.close.remote() for name, actor in actors.items()}, []
        for name, actor in actors.items():
            try:
                ray.get(closing[name], timeout=timeout)
            except (OSError, ray.exceptions.RayError) as error:
                errors.append(f"{kind} {name}: {first_line(error)}")
            ray.kill(actor, no_restart=True)
        return errors


class Front:
    """The process of a machine that clients talk to, which passes each request to its shard; a Ray actor."""

    def __init__(self, options: RayOptions, host: str, port: int) -> None:
        listener = open_listener(host, port)  # now, so that an address that cannot be used is reported
        self._server = StreamServer(create_front(RayService(options)), options.limits)
        self._running = asyncio.get_event_loop().create_task(self._server.serve(sockets=[listener]))

    async def wait_until_listening(self) -> int:
        """Wait until the front accepts requests, and return the number of its process."""
        while not self._server.started:
            await asyncio.sleep(0.05)
        return os.getpid()

    async def close(self) -> None:
        """Finish the requests that were accepted."""
        self._server.request_stop()
        await self._running


def create_front(shards: RayService) -> FastAPI:
    """Return the ASGI application of the front: the HTTP API of one process, over all shards.

    The front checks tokens for what it reads itself; the shards check each request again.
    """
    app = FastAPI(title="ctta serve", openapi_url=None, docs_url=None, redoc_url=None)
    limits, num_shards = shards.options.limits, shards.options.num_shards
    auth = Authenticator(shards.options.tokens)
    memory = MemoryBudget(limits.max_decoded_bytes, limits.request_timeout)
    add_error_handlers(app, lambda cause: logger.error("the front failed: %s", cause))
    Body = Annotated[bytearray, Depends(BodyReader(limits))]
    infer, public = [Depends(auth.require_infer)], [Depends(auth.allow_anyone)]

    def describe(request: Request) -> dict[str, Any]:
        """Return what a shard needs of a request, as a scope of ASGI."""
        headers = [(name, value) for name, value in request.headers.raw if name not in BODY_HEADERS]
        return {**{key: request.scope[key] for key in SCOPE if key in request.scope}, "headers": headers}

    async def forward(request: Request, stream: str | None, body: bytes | bytearray = b"") -> Response:
        """Send a request to the shard of its stream, or to any if it is about none."""
        shard = random.choice(await shards.running() or [0]) if stream is None else find_shard(stream, num_shards)
        return await shards.ask(shard, describe(request), bytes(body))

    @app.get("/streams", dependencies=infer)
    async def show_streams(query: Annotated[StreamQuery, Depends()]) -> dict[str, Any]:
        return await shards.list_streams(query)

    @app.get("/metrics", dependencies=infer)
    async def metrics(request: Request) -> Response:
        answers = await shards.ask_all("handle", describe(request))
        texts = {f"{shard}": bytes(each.body).decode() for shard, each in answers.items() if each.status_code == 200}
        return Response(merge_metrics(texts, "shard"), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v2/health/ready", dependencies=public)
    @app.get("/v2/models/{name}/ready", dependencies=public)
    @app.get("/v2/models/{name}/versions/{version}/ready", dependencies=public)
    async def ready(request: Request) -> Response:
        if not await shards.running():
            return await forward(request, None)
        if not (answers := (await shards.ask_all("handle", describe(request))).values()):
            raise ApiError(503, "no shard answers", retry_after=5)
        response: Response = max(answers, key=lambda each: int(each.status_code))  # not ready, if any is not
        return response

    @app.get("/cluster", dependencies=infer)
    async def show_cluster() -> dict[str, Any]:
        return {"shards": num_shards, "running": list((await shards.ask_all("describe")).values())}

    @app.post("/v2/models/{name}/infer", dependencies=infer)
    @app.post("/v2/models/{name}/versions/{version}/infer", dependencies=infer)
    async def infer_tensor(request: Request, body: Body) -> Response:
        json_length = request.headers.get("inference-header-content-length")
        async with memory.reserve(estimate_memory(body, json_length)):
            stream = parse_stream_name(await asyncio.to_thread(split_body, body, json_length))
        return await forward(request, stream, body)

    @app.api_route("/streams/{stream}", methods=list(METHODS), dependencies=infer)
    @app.api_route("/streams/{stream}/{rest:path}", methods=list(METHODS), dependencies=infer)
    async def stream_route(request: Request, stream: str, body: Body) -> Response:
        return await forward(request, stream, body)

    @app.api_route("/{path:path}", methods=list(METHODS))
    async def other(request: Request) -> Response:
        return await forward(request, None)  # no such route has a body

    return app


def connect(address: str) -> None:
    """Connect this process to the Ray cluster at an address; ``"auto"`` finds one, ``"local"`` starts one."""
    try:
        import_ray().init(
            address=None if address == "local" else address,
            namespace=NAMESPACE,
            include_dashboard=False if address == "local" else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, import_ray().exceptions.RayError) as error:
        if "AuthenticationError" in "".join(traceback.format_exception(error)):  # Ray nests it in others
            raise ConfigError(
                f"the Ray cluster at {address!r} does not accept the token of this process: set RAY_AUTH_MODE=token "
                "and RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, as where the cluster was started"
            ) from error
        raise ConfigError(
            f"there is no Ray cluster at {address!r}: start one with 'ray start --head', or give --ray local"
        ) from error

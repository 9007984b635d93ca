"""The service on a Ray cluster: Ray Serve in front, and a named actor for each shard, which Ray restarts."""

import asyncio
import importlib
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Message

from ctta.errors import ConfigError, first_line
from ctta.serve.api import ApiError
from ctta.serve.app import add_error_handlers
from ctta.serve.auth import Authenticator, Tokens, check_host
from ctta.serve.directory import lock_directory
from ctta.serve.limits import BodyReader, Limits, MemoryBudget
from ctta.serve.listing import StreamQuery, list_streams, merge_listings, read_query
from ctta.serve.metrics import merge_metrics
from ctta.serve.options import ShardOptions
from ctta.serve.protocol import estimate_memory, parse_stream_name, split_body
from ctta.serve.service import Service
from ctta.serve.shards import Shard, SharedState, check_num_shards, find_shard, read_slots

logger = logging.getLogger("ctta.serve")

NAMESPACE = "ctta"
CONCURRENCY = 1000  # calls of an actor at once
START_TIMEOUT = 600.0  # seconds; a cluster may have to start machines
POLL_TIMEOUT = 5.0  # seconds for what is asked of all shards
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"]
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


@dataclass(frozen=True)
class RayOptions(ShardOptions):
    """How a service runs on a cluster; every process of it gets these.

    Attributes:
        make_service: Called in the process of each shard with the shared state; returns the service. It must be
            picklable, and what it needs must be on every machine.
        state: Folder that every machine sees under this path, or a URL for fsspec.
        name: Name of the service on the cluster.
        tokens: Bearer tokens.
        limits: Limits of the front.
        num_fronts: Processes that pass requests on; one is enough for some hundred requests per second.
    """

    make_service: Callable[[SharedState], Service]
    state: str
    name: str = "ctta"
    tokens: Tokens = field(default_factory=Tokens, repr=False)
    limits: Limits = field(default_factory=Limits)
    num_fronts: int = 1


class RayShards:
    """The shards of a service as named actors, which are created when they are first called.

    Args:
        options: Of the service.
    """

    def __init__(self, options: RayOptions) -> None:
        self._ray, self.options = import_ray(), options
        self._handles: dict[int, Any] = {}

    async def call(self, shard: int, method: str, *arguments: Any) -> Any:
        """Call a method of a shard; ConnectionError if its process ended meanwhile."""
        if shard not in self._handles:
            self._handles[shard] = await asyncio.to_thread(self.start, shard)
        try:
            return await getattr(self._handles[shard], method).remote(*arguments)
        except self._ray.exceptions.RayActorError as error:
            self._handles.pop(shard, None)  # if it could not be started, another one may be under its name
            raise ConnectionError(str(error)) from error

    async def running(self) -> list[int]:
        """Return the shards that have a process."""
        return sorted(await asyncio.to_thread(self.find))

    def start(self, shard: int) -> Any:
        """Return the actor of a shard, of which Ray has one at most: that which exists, or a new one."""
        actor = self._ray.remote(Shard).options(
            name=f"{self.options.name}-shard-{shard}",
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,  # a request must not be counted twice
            max_concurrency=CONCURRENCY,
            scheduling_strategy="SPREAD",
            num_cpus=self.options.num_cpus,
            num_gpus=self.options.num_gpus or 0.0,
        )
        options = self.options
        return actor.remote(options.make_service, options.state, options.num_shards, shard, options.tokens)

    def find(self) -> dict[int, Any]:
        """Return the actors of all shards that have one."""
        prefix, found = f"{self.options.name}-shard-", {}
        for each in self._ray.util.list_named_actors(all_namespaces=True):
            if each["namespace"] == NAMESPACE and each["name"].startswith(prefix):
                with suppress(ValueError):  # it has just ended
                    found[int(each["name"].removeprefix(prefix))] = self._ray.get_actor(each["name"], NAMESPACE)
        return found


class Front:
    """Sends requests to the shards of their streams.

    Args:
        shards: The shards.
        state: Path of the shared state.
        num_shards: Number of shards.
        timeout: Seconds until a request is given up.
    """

    def __init__(self, shards: RayShards, state: str, num_shards: int, *, timeout: float) -> None:
        self._shards, self._state, self.num_shards, self.timeout = shards, state, num_shards, timeout
        self._stored: Any = None  # streams as saved, for shards without a process, where nothing changes
        self._turn = itertools.count()

    async def send(self, stream: str | None, scope: dict[str, Any], body: bytes) -> list[Message]:
        """Send a request to the shard of its stream, or to any if it is about none.

        Args:
            stream: Name of the stream; None for none.
            scope: Of ASGI.
            body: The whole body.

        Returns:
            The messages of the answer.

        Raises:
            ApiError: With the status for the client, if the shard does not answer.
        """
        if stream is not None:
            shard = find_shard(stream, self.num_shards)
        else:
            running = await self._shards.running() or [0]
            shard = running[next(self._turn) % len(running)]
        messages: list[Message] = await self._call(shard, "handle", scope, body)
        return messages

    async def _call(self, shard: int, method: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(self.timeout):
                return await self._shards.call(shard, method, *arguments)
        except TimeoutError:
            raise ApiError(504, f"no answer within {self.timeout:g} s; an update may still count") from None
        except OSError as error:
            logger.error("shard %d does not answer: %s", shard, error)
            message = "the process of the stream does not answer; it resumes from its last snapshot: send it again"
            raise ApiError(503, message, retry_after=1) from error

    async def ask_all(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Call a method of every shard that has a process, and return what those return that answer soon."""

        async def ask(shard: int) -> Any:
            with suppress(OSError):  # also TimeoutError
                async with asyncio.timeout(POLL_TIMEOUT):
                    return await self._shards.call(shard, method, *arguments)

        shards = await self._shards.running()
        answers = await asyncio.gather(*map(ask, shards))
        return {shard: answer for shard, answer in zip(shards, answers, strict=True) if answer is not None}

    async def list_streams(self, query: StreamQuery) -> dict[str, Any]:
        """Return a page of the streams of all shards; those without a process are listed as they were saved."""
        if self._stored is None:
            self._stored = await asyncio.to_thread(read_slots, self._state)
        running = await self._shards.running()
        stored = {name: slot for name, slot in self._stored.items() if find_shard(name, self.num_shards) not in running}
        listings = await asyncio.gather(*(self._call(shard, "list_streams", query) for shard in running))
        listing = merge_listings([*listings, await list_streams(stored.values(), query)])
        page = listing.page(query)
        live = {shard: [name for name in page if find_shard(name, self.num_shards) == shard] for shard in running}
        found = await asyncio.gather(*(self._call(shard, "summaries", part) for shard, part in live.items() if part))
        summaries = {each["name"]: each for part in found for each in part}
        summaries |= {name: stored[name].summary() for name in page if name in stored}
        return listing.describe([summaries[stream] for stream in page if stream in summaries])


def _to_response(messages: list[Message]) -> Response:
    response = Response(b"".join(each.get("body", b"") for each in messages), messages[0]["status"])
    response.raw_headers = list(messages[0]["headers"])
    return response


def create_front(front: Front, tokens: Tokens, limits: Limits) -> FastAPI:
    """Return the ASGI application of the front: the HTTP API of one process, over all shards.

    Args:
        front: Sends requests to shards.
        tokens: Bearer tokens of the service, for what the front reads itself; the shards check each request again.
        limits: Limits of bodies.

    Returns:
        The application.
    """
    app = FastAPI(title="ctta serve", openapi_url=None, docs_url=None, redoc_url=None)
    auth, read_body = Authenticator(tokens), BodyReader(limits)
    memory = MemoryBudget(limits.max_decoded_bytes, limits.request_timeout)
    add_error_handlers(app, lambda cause: logger.error("the front failed: %s", cause))

    def describe(request: Request) -> dict[str, Any]:
        headers = [(name, value) for name, value in request.headers.raw if name not in BODY_HEADERS]
        return {**{key: request.scope[key] for key in SCOPE if key in request.scope}, "headers": headers}

    async def forward(request: Request, stream: str | None, body: bytes | bytearray = b"") -> Response:
        return _to_response(await front.send(stream, describe(request), bytes(body)))

    Body = Annotated[bytearray, Depends(read_body)]
    infer, public = [Depends(auth.require_infer)], [Depends(auth.allow_anyone)]

    @app.get("/streams", dependencies=infer)
    async def show_streams(query: Annotated[StreamQuery, Depends(read_query)]) -> dict[str, Any]:
        return await front.list_streams(query)

    @app.get("/metrics", dependencies=infer)
    async def metrics(request: Request) -> Response:
        answers = await front.ask_all("handle", describe(request), b"")
        texts = {f"{shard}": each[1]["body"].decode() for shard, each in answers.items() if each[0]["status"] == 200}
        return Response(merge_metrics(texts, "shard"), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v2/health/ready", dependencies=public)
    @app.get("/v2/models/{name}/ready", dependencies=public)
    @app.get("/v2/models/{name}/versions/{version}/ready", dependencies=public)
    async def ready(request: Request) -> Response:
        answers = list((await front.ask_all("handle", describe(request), b"")).values())
        worst = max(answers, key=lambda each: int(each[0]["status"]), default=None)  # not ready, if any is not
        return await forward(request, None) if worst is None else _to_response(worst)

    @app.get("/cluster", dependencies=infer)
    async def show_cluster() -> dict[str, Any]:
        return {"shards": front.num_shards, "running": list((await front.ask_all("describe")).values())}

    @app.post("/v2/models/{name}/infer", dependencies=infer)
    @app.post("/v2/models/{name}/versions/{version}/infer", dependencies=infer)
    async def infer_tensor(
        request: Request,
        body: Body,
        json_length: Annotated[str | None, Header(alias="Inference-Header-Content-Length")] = None,
    ) -> Response:
        async with memory.reserve(estimate_memory(body, json_length)):
            stream = parse_stream_name(await asyncio.to_thread(split_body, body, json_length))
        return await forward(request, stream, body)

    @app.api_route("/streams/{stream}", methods=METHODS, dependencies=infer)
    @app.api_route("/streams/{stream}/{rest:path}", methods=METHODS, dependencies=infer)
    async def stream_route(request: Request, stream: str, body: Body) -> Response:
        return await forward(request, stream, body)

    @app.api_route("/{path:path}", methods=METHODS)
    async def other(request: Request) -> Response:
        return await forward(request, None)  # no such route has a body

    return app


class RayService:
    """A service on the cluster that this process is connected to.

    Args:
        options: How it runs.
    """

    def __init__(self, options: RayOptions) -> None:
        self._ray, self._serve, self.options = import_ray(), import_ray("ray.serve"), options
        self._shards = RayShards(options)

    def start(self, *, host: str = "127.0.0.1", port: int = 8000) -> None:
        """Start the service, or what is missing of one that runs, and wait until it answers.

        Args:
            host: Address that Ray Serve listens on, on every machine.
            port: Its port.

        Raises:
            ConfigError: If it cannot be started, or another service uses the state.
        """
        options = self.options
        check_host(host, options.tokens)
        if "://" not in options.state and not self._shards.find():
            Path(options.state).mkdir(parents=True, exist_ok=True)
            lock_directory(Path(options.state)).release()  # raises if another service uses it
        check_num_shards(options.state, options.num_shards)
        try:  # with one shard, so that mistakes are found now and not by the first client
            self._ray.get(self._shards.start(0).describe.remote(), timeout=START_TIMEOUT)
        except self._ray.exceptions.RayError as error:
            raise ConfigError(f"the service could not be started: {str(error).strip().splitlines()[-1]}") from error
        timeout = 2 * options.limits.request_timeout
        http = {"host": host, "port": port, "request_timeout_s": 2 * timeout}
        self._serve.start(proxy_location="EveryNode", http_options=http)

        def build() -> FastAPI:
            front = Front(RayShards(options), options.state, options.num_shards, timeout=timeout)
            return create_front(front, options.tokens, options.limits)

        deployment = self._serve.deployment(
            name=f"{options.name}-front",
            num_replicas=options.num_fronts,
            max_ongoing_requests=options.limits.max_connections,
            ray_actor_options={"num_cpus": 0},
        )
        front = deployment(self._serve.ingress(build)()).bind()
        self._serve.run(front, name=options.name, route_prefix="/", blocking=False)

    @property
    def is_running(self) -> bool:
        """Whether the service answers, or is being started."""
        return self.options.name in self._serve.status().applications

    def stop(self) -> None:
        """Save every stream, and end all processes of the service; OSError if some streams could not be saved."""
        with suppress(Exception):
            self._serve.delete(self.options.name)
        actors = self._shards.find()
        closing, errors = {shard: actor.close.remote() for shard, actor in actors.items()}, []
        for shard, actor in actors.items():
            try:
                self._ray.get(closing[shard], timeout=START_TIMEOUT)
            except (OSError, self._ray.exceptions.RayError) as error:
                errors.append(f"shard {shard}: {first_line(error)}")
            self._ray.kill(actor, no_restart=True)
        if errors:
            raise OSError(f"{len(errors)} shards could not save all of their streams: {errors[0]}")


def connect(address: str) -> None:
    """Connect this process to a Ray cluster.

    Args:
        address: Address of a running cluster, ``"auto"`` to find one, ``"local"`` to start one on this machine.

    Raises:
        ConfigError: If there is no such cluster.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        import_ray().init(
            address=None if address == "local" else address,
            namespace=NAMESPACE,
            include_dashboard=False if address == "local" else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except ConnectionError as error:
        raise ConfigError(
            f"there is no Ray cluster at {address!r}: start one with 'ray start --head', or give --ray local"
        ) from error

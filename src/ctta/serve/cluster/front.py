"""The front of a service with several replicas: the same HTTP API, each request sent to where its stream is."""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import methodcaller
from typing import Annotated, Any, Protocol

from fastapi import Depends, FastAPI, Header, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ctta.serve.app import add_error_handlers
from ctta.serve.auth import Authenticator, Tokens
from ctta.serve.cluster.coordinator import ReplicaHandle
from ctta.serve.cluster.messages import HttpRequest, HttpResponse
from ctta.serve.cluster.view import View
from ctta.serve.errors import ApiError
from ctta.serve.limits import BodyReader, Limits, MemoryBudget
from ctta.serve.listing import Listing, StreamQuery, merge_listings, read_query
from ctta.serve.protocol import parse_stream_name
from ctta.serve.tensors import estimate_memory, split_body

logger = logging.getLogger("ctta.serve")

RETRY_SECONDS = 0.05  # while a stream moves
MAX_VIEW_AGE = 1.0  # seconds
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"]
#: Headers that describe a body as it was sent, and not as it was read.
OF_THE_BODY = {b"content-encoding", b"content-length", b"transfer-encoding"}
#: Headers of an answer that the server in front writes itself.
HOP_BY_HOP = {b"content-length", b"connection", b"transfer-encoding", b"date", b"server"}


class FrontHandle(ReplicaHandle, Protocol):
    """What the front calls of a replica, wherever that runs."""

    async def handle(self, stream: str | None, request: HttpRequest) -> HttpResponse | None:
        """Answer a request; None if its stream is not here."""

    async def list_streams(self, query: StreamQuery) -> Listing:
        """List the streams of the replica."""

    async def summaries(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the summaries of streams; those that are not here any more are left out."""


class ViewSource(Protocol):
    """What the front calls of the coordinator, wherever that runs."""

    async def get_view(self) -> View:
        """Return the current view."""

    async def suspect(self, name: str, incarnation: str) -> None:
        """Report a replica that does not answer."""


class Front:
    """Knows where streams are, as far as it has heard; replicas reject what is not theirs.

    Args:
        coordinator: Knows the view.
        connect: Returns a handle for the replica of a name.
        timeout: Seconds that a request waits for a stream that moves.
    """

    def __init__(self, coordinator: ViewSource, connect: Callable[[str], FrontHandle], *, timeout: float) -> None:
        self._coordinator, self._connect, self.timeout = coordinator, connect, timeout
        self.view, self._updated_at = View(), -math.inf
        self._turn = itertools.count()

    async def send(self, stream: str, request: HttpRequest) -> HttpResponse:
        """Send a request to the owner of its stream, and wait if the stream is moving.

        Args:
            stream: Name of the stream.
            request: The request.

        Returns:
            The answer.

        Raises:
            ApiError: With status 503 if the replica died with the request, or if nobody owns the stream in time.
        """
        deadline = time.monotonic() + self.timeout
        await self._update_old_view()
        while time.monotonic() < deadline:
            if (owner := self.view.owner(stream)) is not None:
                response: HttpResponse | None = await self._call(owner, lambda replica: replica.handle(stream, request))
                if response is not None:
                    return response
            await asyncio.sleep(RETRY_SECONDS)
            await self.update_view()
        raise ApiError(503, f"the stream {stream!r} is being moved; nothing was done", retry_after=1)

    async def send_to_any(self, request: HttpRequest) -> HttpResponse:
        """Send a request that is about no stream to one of the replicas."""
        names = await self._members()
        name = names[next(self._turn) % len(names)]
        response: HttpResponse = await self._call(name, lambda each: each.handle(None, request))
        return response

    async def ask_all(self, request: HttpRequest) -> dict[str, HttpResponse]:
        """Send a request to every replica."""
        names = await self._members()
        responses = await asyncio.gather(*(self._call(name, lambda each: each.handle(None, request)) for name in names))
        return {name: each for name, each in zip(names, responses, strict=True) if each is not None}

    async def list_streams(self, query: StreamQuery) -> dict[str, Any]:
        """Return a page of the streams of all replicas."""
        names = await self._members()
        listing = merge_listings(
            await asyncio.gather(*(self._call(name, lambda each: each.list_streams(query)) for name in names))
        )
        page = listing.page(query)
        by_owner = {name: [stream for stream in page if self.view.owner(stream) == name] for name in names}
        found = await asyncio.gather(
            *(self._call(name, methodcaller("summaries", part)) for name, part in by_owner.items() if part)
        )
        summaries = {each["name"]: each for part in found for each in part}
        return listing.describe([summaries[stream] for stream in page if stream in summaries])

    async def _members(self) -> list[str]:
        await self._update_old_view()
        if not self.view.members:
            raise ApiError(503, "no replica is ready yet: send the request again later", retry_after=1)
        return sorted(self.view.members)

    async def _call(self, name: str, call: Callable[[FrontHandle], Any]) -> Any:
        try:
            return await call(self._connect(name))
        except ConnectionError as error:
            incarnation = self.view.members.get(name, "")
            with suppress(ConnectionError):  # the coordinator is being restarted
                await self._coordinator.suspect(name, incarnation)
            await self.update_view()
            message = "a replica ended with the request; its streams resume from their last snapshots: send it again"
            raise ApiError(503, message, retry_after=1) from error

    async def _update_old_view(self) -> None:
        if time.monotonic() - self._updated_at > MAX_VIEW_AGE or not self.view.members:
            await self.update_view()

    async def update_view(self) -> None:
        """Ask the coordinator for the view; while it is being restarted, the one that is known remains."""
        try:
            view = await self._coordinator.get_view()
        except ConnectionError as error:
            logger.warning("the coordinator does not answer: %s", error)
            return
        self._updated_at = time.monotonic()
        if view.epoch > self.view.epoch:
            self.view = view


def create_front(front: Front, tokens: Tokens, limits: Limits) -> FastAPI:
    """Return the ASGI application of the front.

    Args:
        front: Sends requests to replicas.
        tokens: Bearer tokens of the service, for what the front reads itself; the replicas check each request again.
        limits: Limits of bodies.

    Returns:
        The application.
    """
    app = FastAPI(title="ctta serve", openapi_url=None, docs_url=None, redoc_url=None)
    auth, read_body = Authenticator(tokens), BodyReader(limits)
    memory = MemoryBudget(limits.max_decoded_bytes, limits.request_timeout)
    add_error_handlers(app, lambda cause: logger.error("the front failed: %s", cause))

    async def forward(request: Request, stream: str | None, body: bytes | bytearray = b"") -> Response:
        query: bytes = request.scope["query_string"]
        headers = [(name, value) for name, value in request.headers.raw if name not in OF_THE_BODY]
        message = HttpRequest(request.method, request.scope["path"], query, headers, body)
        return _to_response(await (front.send_to_any(message) if stream is None else front.send(stream, message)))

    Body = Annotated[bytearray, Depends(read_body)]
    infer = [Depends(auth.require_infer)]

    @app.get("/streams", dependencies=infer)
    async def show_streams(query: Annotated[StreamQuery, Depends(read_query)]) -> dict[str, Any]:
        return await front.list_streams(query)

    @app.get("/metrics", dependencies=infer)
    async def metrics(request: Request) -> Response:
        message = HttpRequest("GET", "/metrics", b"", list(request.headers.raw))
        answers = {name: each for name, each in (await front.ask_all(message)).items() if each.status == 200}
        texts = {name: each.body.decode() for name, each in answers.items()}
        return Response(merge_metrics(texts), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v2/health/ready", dependencies=[Depends(auth.allow_anyone)])
    @app.get("/v2/models/{name}/ready", dependencies=[Depends(auth.allow_anyone)])
    @app.get("/v2/models/{name}/versions/{version}/ready", dependencies=[Depends(auth.allow_anyone)])
    async def ready(request: Request) -> Response:
        message = HttpRequest("GET", request.scope["path"], b"", list(request.headers.raw))
        responses = (await front.ask_all(message)).values()
        return _to_response(max(responses, key=lambda each: each.status))  # one that is not ready, if there is any

    @app.get("/cluster", dependencies=infer)
    async def show_cluster() -> dict[str, Any]:
        await front.update_view()
        return {"epoch": front.view.epoch, "replicas": sorted(front.view.members)}

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


def _to_response(message: HttpResponse) -> Response:
    response = Response(message.body, message.status)
    kept = [(name, value) for name, value in message.headers if name.lower() not in HOP_BY_HOP]
    length = (b"content-length", str(len(message.body)).encode())
    response.raw_headers = [*((name.lower(), value) for name, value in kept), length]
    return response


class _Families:
    """A collector of metrics that exist already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merge_metrics(texts: dict[str, str]) -> bytes:
    """Return the metrics of several replicas as one text, each with the label ``replica``.

    Args:
        texts: Metrics of each replica in the text format of Prometheus.

    Returns:
        All of them.
    """
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry)

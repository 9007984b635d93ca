"""The service as an ASGI application, and how to run it until it is asked to stop."""

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp
from typing_extensions import Doc
from uvicorn.protocols.http.auto import AutoHTTPProtocol

import ctta
from ctta.core.options import Option, takes_options
from ctta.errors import InputError
from ctta.serve.cameras import CameraReaders, StreamCamera
from ctta.serve.http import (
    INTERNAL,
    OUT_OF_MEMORY,
    RETRY_AFTER_OUT_OF_MEMORY,
    ApiError,
    Authenticator,
    BodyReader,
    MetricsMiddleware,
    Tokens,
    check_host,
    error_responses,
    is_out_of_memory,
)
from ctta.serve.options import SERVER, Limits
from ctta.serve.protocol import protocol_routes
from ctta.serve.routes import page_routes, stream_routes
from ctta.serve.service import Service

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

logger = logging.getLogger("ctta.serve")

RESERVED_FILES = 64  # that may be open beside connections: libraries, the log, and the snapshots being read and written
# At a time. One that is closed to make room for another is open for three more, as asyncio makes and closes them later.
ACCEPTED_AT_ONCE = 8
MAX_NOT_ACCEPTED = 2048  # connections that the system keeps until they are accepted
_BUSY_BODY = b'{"error": "too many connections are open: send the request again later"}'
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BUSY_BODY), _BUSY_BODY)
)


def create_app(
    service: Service,
    tokens: Tokens = Tokens(),  # noqa: B008  # frozen
    cameras: Sequence[StreamCamera] = (),
) -> FastAPI:
    """Return the ASGI application of a service, for uvicorn in a single process.

    Args:
        service: The service; its streams are saved when the application shuts down.
        tokens: Bearer tokens; without any, the application must be reachable from this machine only.
        cameras: Cameras that the service reads by itself while the application runs.

    Returns:
        The application.
    """
    readers = CameraReaders(service, cameras)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        autosave = asyncio.create_task(service.store.autosave_loop())
        try:
            async with readers.running():
                yield
        finally:
            autosave.cancel()
            await asyncio.wait({autosave})
            try:
                await service.store.close()
            finally:
                service.release()

    app = FastAPI(title="ctta serve", version=ctta.__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    auth, read_body = Authenticator(tokens), BodyReader(service.limits)
    app.include_router(protocol_routes(service, auth, read_body))
    app.include_router(stream_routes(service, auth, read_body))
    app.include_router(page_routes(auth))
    infer = [Depends(auth.require_infer)]

    async def list_cameras() -> list[dict[str, Any]]:
        """List the cameras that the service reads by itself: their health, and the last answer of each."""
        return [reader.describe() for reader in readers.readers]

    if readers.readers:
        app.get("/cameras", dependencies=infer, responses=error_responses(), tags=["cameras"])(list_cameras)

    @app.get("/metrics", dependencies=infer, responses=error_responses(), response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    add_error_handlers(app, service.metrics.count_failure)
    app.add_middleware(MetricsMiddleware, metrics=service.metrics)
    _remove_status_422(app)
    return app


def add_error_handlers(app: FastAPI, on_failure: Callable[[str], None]) -> None:
    """Let an application answer every error in the form of the Open Inference Protocol.

    ``on_failure`` is called with the cause of each failure that is not the client's fault.
    """

    async def handle_unexpected_error(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        if is_out_of_memory(error):
            on_failure(OUT_OF_MEMORY)
            headers = {"Retry-After": str(RETRY_AFTER_OUT_OF_MEMORY)}
            return JSONResponse({"error": "the service ran out of memory: see its log"}, 500, headers)
        on_failure(INTERNAL)
        return JSONResponse({"error": "the service failed: see its log"}, 500)

    for kind in (ApiError, InputError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _handle_error)
    app.add_exception_handler(Exception, handle_unexpected_error)


async def _handle_error(request: Request, error: Exception) -> Response:
    """Answer with an error in the form of the Open Inference Protocol."""
    headers: dict[str, str] = {}
    match error:
        case ApiError():
            status, message = error.status, error.message
            if error.retry_after is not None:
                headers["Retry-After"] = str(error.retry_after)
            if status == 401:
                headers["WWW-Authenticate"] = "Bearer"
        case HTTPException():
            status, message = error.status_code, str(error.detail)
            headers |= dict(error.headers or {})
        case RequestValidationError():
            status = 400
            message = "; ".join(f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}" for each in error.errors())
        case _:  # InputError
            status, message = 400, str(error).strip().splitlines()[0]
    return JSONResponse({"error": message}, status, headers)


def _remove_status_422(app: FastAPI) -> None:
    """Remove the errors that FastAPI describes for invalid parameters: here they are like all others, with 400."""
    schema = app.openapi()
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema.get("components", {}).get("schemas", {}).pop(name, None)
    app.openapi_schema = schema


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a service is reached."""

    host: Annotated[
        str, Option("Listen on this address; any but loopback requires a token.", "ADDRESS", panel=SERVER)
    ] = "127.0.0.1"
    port: Annotated[int, Option("Listen on this port; 0 picks a free one.", "N", min=0, max=65535, panel=SERVER)] = 8000
    tokens: Annotated[Tokens, Doc("Tokens for clients and administrators.")] = field(default_factory=Tokens)
    cameras: Annotated[Sequence[StreamCamera], Doc("Cameras that the service reads by itself.")] = ()
    on_listening: Annotated[Callable[[str], None] | None, Doc("Called with the URL once connections are accepted.")] = (
        None
    )


@takes_options(ServerOptions)
def serve(service: Service, options: ServerOptions) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the requests that were accepted and save every stream.

    Args:
        service: What is served.
        options: The fields of :class:`ServerOptions` as keywords.

    Raises:
        OSError: If the address cannot be used, or if streams could not be saved at the end.
    """
    host, tokens = options.host, options.tokens
    check_host(host, tokens)
    url_host = f"[{host}]" if ":" in host else host
    with open_listener(host, options.port) as listener:
        url = f"http://{url_host}:{listener.getsockname()[1]}"
        app, on_listening = create_app(service, tokens, options.cameras), options.on_listening
        server = StreamServer(app, service.limits, on_started=lambda: on_listening and on_listening(url))
        with handle_signals(server.request_stop):
            server.run(sockets=[listener])
    service.store.check_all_saved()


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; OSError if that cannot be used."""
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Inherited by connections. asyncio sets it only where the socket names its protocol, and without it, an answer on a
    # connection that is kept open waits about 40 ms for the client to acknowledge its header.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class StreamServer(uvicorn.Server):
    """Run an application so that a signal ends it in order at any time, and idle connections shut out no request.

    Args:
        app: The application.
        limits: Of connections, and of the time in which requests must end at a shutdown.
        on_started: Called when connections are accepted and signals are handled.
    """

    def __init__(self, app: ASGIApp, limits: Limits, on_started: Callable[[], object] = lambda: None) -> None:
        self._on_started, max_connections = on_started, find_max_connections(limits.max_connections)
        protocol = partial(LimitedConnection, max_connections=max_connections)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,  # type: ignore[arg-type]  # called like a class
                ws="none",
                log_level="warning",
                backlog=ACCEPTED_AT_ONCE,
                timeout_graceful_shutdown=max(1, round(limits.request_timeout)),
                server_header=False,
                lifespan="on",
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets)
        if self.started:
            for listener in sockets or ():
                listener.listen(MAX_NOT_ACCEPTED)  # uvicorn has told the system the other number
            self._on_started()

    def request_stop(self) -> None:
        """Shut down; asking again does not keep streams from being saved."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down when uvicorn gets a signal."""
        self.request_stop()


def find_max_connections(requested: int) -> int:
    """Return how many connections may be open, so that files can be opened beside them.

    The process may then open as many files as the system lets it.
    """
    if resource is None:
        return requested
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = requested + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            allowed = max(soft - RESERVED_FILES, soft // 4)
            logger.warning("%d files may be open at once, so %d connections are accepted: see ulimit -n", soft, allowed)
            return allowed
    return requested


class LimitedConnection(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """A connection that makes room for a new one while it has no request.

    Those without any request so far go first, and among them the one that was quiet longest.
    """

    def __init__(self, *arguments: Any, max_connections: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._max_connections, self._heard_at = max_connections, time.monotonic()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or bool(getattr(self.cycle, "response_complete", True))

    @property
    def _usefulness(self) -> tuple[bool, float]:
        return self.cycle is not None, self._heard_at

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close a connection that is idle if there are too many; if none is, answer this one with status 503."""
        super().connection_made(transport)
        others = [each for each in self.connections if each is not self and not each.transport.is_closing()]
        if len(others) < self._max_connections:
            return
        if idle := [each for each in others if each._is_idle]:
            min(idle, key=lambda each: each._usefulness).transport.abort()
        else:
            self.transport.write(_BUSY)
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        self._heard_at = time.monotonic()
        super().data_received(data)


@contextmanager
def handle_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Call a function at each SIGTERM or Ctrl-C, which must not end the process before all is saved."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

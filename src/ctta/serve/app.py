"""The service as an ASGI application, and how to run it until it is asked to stop."""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from typing_extensions import Doc

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
from ctta.serve.options import SERVER
from ctta.serve.protocol import protocol_routes
from ctta.serve.routes import page_routes, stream_routes
from ctta.serve.service import Service

logger = logging.getLogger("ctta.serve")


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
    limits = service.limits
    config = uvicorn.Config(
        create_app(service, tokens, options.cameras),
        log_level="warning",
        limit_concurrency=limits.max_connections,
        timeout_graceful_shutdown=max(1, round(limits.request_timeout)),
        server_header=False,
        lifespan="on",
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    url_host = f"[{host}]" if ":" in host else host
    with socket.create_server((host, options.port), family=family, backlog=limits.max_connections) as listener:
        # Inherited by connections. asyncio sets it only where the socket names its protocol, and without it, an answer
        # on a connection that is kept open waits about 40 ms for the client to acknowledge its header.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if options.on_listening:
            options.on_listening(f"http://{url_host}:{listener.getsockname()[1]}")
        with _ignore_repeated_signals():
            uvicorn.Server(config).run(sockets=[listener])
    service.store.check_all_saved()


@contextmanager
def _ignore_repeated_signals() -> Iterator[None]:
    """Ignore the signal that uvicorn raises again after it has stopped: it would end the process before its caller."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

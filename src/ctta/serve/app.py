"""The service as an ASGI application."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import ctta
from ctta.errors import InputError
from ctta.serve.auth import Authenticator, Tokens
from ctta.serve.details import detail_routes
from ctta.serve.errors import INTERNAL, OUT_OF_MEMORY, RETRY_AFTER_OUT_OF_MEMORY, ApiError, is_out_of_memory
from ctta.serve.metrics import ServiceMetrics
from ctta.serve.protocol import protocol_routes
from ctta.serve.routes import page_routes, stream_routes
from ctta.serve.schemas import error_responses
from ctta.serve.service import Service
from ctta.serve.sources import SourcePullers, VideoSource, source_routes

logger = logging.getLogger("ctta.serve")


def create_app(
    service: Service,
    tokens: Tokens = Tokens(),  # noqa: B008  # frozen
    sources: Sequence[VideoSource] = (),
) -> FastAPI:
    """Return the ASGI application of a service, for uvicorn in a single process.

    Args:
        service: The service; its streams are saved when the application shuts down.
        tokens: Bearer tokens; without any, the application must be reachable from this machine only.
        sources: Cameras that the service reads by itself while the application runs.

    Returns:
        The application.
    """
    pullers = SourcePullers(service, sources)
    app = FastAPI(
        title="ctta serve",
        version=ctta.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan(service, pullers),
    )
    auth, read_body = Authenticator(tokens), service.read_body
    app.include_router(protocol_routes(service, auth, read_body))
    app.include_router(stream_routes(service, auth, read_body))
    app.include_router(detail_routes(service, auth))
    app.include_router(page_routes(auth))
    if pullers.pullers:
        app.include_router(source_routes(pullers, auth))

    @app.get(
        "/metrics",
        dependencies=[Depends(auth.require_infer)],
        responses=error_responses(),
        response_class=PlainTextResponse,
    )
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    add_error_handlers(app, service.metrics.count_failure)
    app.add_middleware(_MetricsMiddleware, metrics=service.metrics)
    _remove_status_422(app)
    return app


def add_error_handlers(app: FastAPI, on_failure: Callable[[str], None]) -> None:
    """Let an application answer every error in the form of the Open Inference Protocol.

    Args:
        app: The application.
        on_failure: Called with the cause of each failure that is not the client's fault.
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


def _lifespan(service: Service, pullers: SourcePullers) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        autosave = asyncio.create_task(service.store.autosave_loop())
        try:
            async with pullers.running():
                yield
        finally:
            autosave.cancel()
            await asyncio.wait({autosave})
            try:
                await service.store.close()
            finally:
                service.release()

    return lifespan


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


class _MetricsMiddleware:
    """Count every request by its route, and forbid browsers to guess the type of an answer."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 500

        async def send_and_observe(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-content-type-options", b"nosniff"))
            await send(message)

        try:
            await self.app(scope, receive, send_and_observe)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self.metrics.count_request(scope["method"], route, status, time.monotonic() - started)


def _remove_status_422(app: FastAPI) -> None:
    """Remove the errors that FastAPI describes for invalid parameters: here they are like all others, with 400."""
    schema = app.openapi()
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema.get("components", {}).get("schemas", {}).pop(name, None)
    app.openapi_schema = schema

"""The service as an ASGI application."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import ctta
from ctta.serve.auth import Door, Tokens
from ctta.serve.bodies import Bodies
from ctta.serve.errors import Refusal
from ctta.serve.metrics import Metrics
from ctta.serve.page import page_routes
from ctta.serve.protocol import protocol_routes
from ctta.serve.schemas import problems
from ctta.serve.service import Service
from ctta.serve.stream_routes import stream_routes

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")  # told apart in the metrics

logger = logging.getLogger("ctta.serve")


def application(service: Service, tokens: Tokens = Tokens()) -> FastAPI:  # noqa: B008  # frozen
    """Everything that the service answers to; for uvicorn, in one process.

    Args:
        service: that does the work; its streams are written when the application ends.
        tokens: without any, it must be reachable from this machine only.
    """
    app = FastAPI(title="ctta serve", version=ctta.__version__, docs_url=None, redoc_url=None, lifespan=_life(service))
    door, bodies = Door(tokens), Bodies(service.limits)
    app.include_router(protocol_routes(service, door, bodies))
    app.include_router(stream_routes(service, door, bodies))
    app.include_router(page_routes(door))

    @app.get("/metrics", dependencies=[Depends(door.infer)], responses=problems(), response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(service.store), media_type="text/plain; version=0.0.4")

    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _refused)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(_Measured, metrics=service.metrics)
    _describe_without_422(app)
    return app


def _life(service: Service) -> Any:
    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        saving = asyncio.create_task(service.store.save_now_and_then())
        try:
            yield
        finally:
            saving.cancel()
            with suppress(asyncio.CancelledError):
                await saving
            await service.store.close()
            service.release()

    return life


async def _refused(request: Request, error: Exception) -> Response:
    """Every refusal in the protocol's form."""
    headers: dict[str, str] = {}
    if isinstance(error, Refusal):
        status, reason = error.status, error.reason
        if error.retry_after is not None:
            headers["Retry-After"] = str(error.retry_after)
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, HTTPException):
        status, reason = error.status_code, str(error.detail)
        headers |= dict(error.headers or {})
    else:
        assert isinstance(error, RequestValidationError)
        wrong = [f"{'.'.join(str(part) for part in each['loc'][1:])}: {each['msg']}" for each in error.errors()]
        status, reason = 400, "; ".join(wrong)
    return JSONResponse({"error": reason}, status, headers)


async def _failed(request: Request, error: Exception) -> Response:
    logger.error("a request failed", exc_info=error)
    return JSONResponse({"error": "the service failed; its log says more"}, 500)


class _Measured:
    """Counts every request by the route that answered it, and adds a header to each answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-content-type-options", b"nosniff"))
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.count_request(method, route, status, time.monotonic() - started)


def _describe_without_422(app: FastAPI) -> None:
    """FastAPI describes its own form of refusals for parameters; ours have the form and the status of all others."""
    described = app.openapi()
    for operations in described["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        described.get("components", {}).get("schemas", {}).pop(name, None)
    app.openapi_schema = described

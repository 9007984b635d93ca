"""HTTP requests and answers on their way between the front and a replica."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI


@dataclass(frozen=True)
class HttpRequest:
    """A request on its way from the front to a replica.

    Attributes:
        method: HTTP method.
        path: Path, decoded.
        query: Query string, encoded.
        headers: Names in lower case, and values.
        body: The whole body.
    """

    method: str
    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes | bytearray = b""


@dataclass(frozen=True)
class HttpResponse:
    """An answer on its way back.

    Attributes:
        status: HTTP status.
        headers: Names and values.
        body: The whole body.
    """

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


async def call_app(app: FastAPI, request: HttpRequest) -> HttpResponse:
    """Let an ASGI application answer a request.

    Args:
        app: The application.
        request: The request.

    Returns:
        Its answer.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers),
    }
    messages: list[Any] = [{"type": "http.request", "body": request.body, "more_body": False}]
    start: dict[str, Any] = {}
    body = bytearray()
    answered = asyncio.Event()

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            body.extend(message.get("body", b""))
            if not message.get("more_body"):
                answered.set()

    try:
        await app(scope, receive, send)
    except Exception:
        if not answered.is_set():  # or it is logged, and answered with status 500
            raise
    return HttpResponse(start["status"], start["headers"], bytes(body))

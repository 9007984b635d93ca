"""What every request passes around its route: its token, its body within limits, counts, and answers to errors."""

import asyncio
import ctypes
import hashlib
import hmac
import ipaddress
import logging
import math
import os
import re
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

import torch
from fastapi import Header, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ctta.errors import ConfigError, InputError
from ctta.serve.metrics import ServiceMetrics
from ctta.serve.options import Limits

logger = logging.getLogger("ctta.serve")

#: What a client calls a request that it may have to send again.
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern="^[!-~]{1,255}$",
        description="a name of this request that no other one has; sent again under it, the request counts once",
    ),
]
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
#: A regular expression for Python and for OpenAPI alike.
STREAM_NAME_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
EXAMPLE_STREAM = "camera7"
OUT_OF_MEMORY, DISK, INTERNAL = "out_of_memory", "disk", "internal"  # causes of a failure, as the metrics count them
RETRY_AFTER_OUT_OF_MEMORY, _RETRY_AFTER_DISK_ERROR = 10, 30  # seconds
MIN_TOKEN_LENGTH = 16
TOKEN_VARIABLE, ADMIN_TOKEN_VARIABLE = "CTTA_SERVE_TOKEN", "CTTA_SERVE_ADMIN_TOKEN"
#: Supported values of Content-Encoding, with the format for zlib.
WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
PIECE = 2**20  # bytes that are expanded at once, in a millisecond
TRIM_THRESHOLD = 16 * 2**20  # bytes from which on it is worth a millisecond to return freed memory


class MetricsMiddleware:
    """Count every request by its route, and forbid browsers to guess the type of an answer."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
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
            method = scope["method"] if scope["method"] in METHODS else "other"
            route = getattr(scope.get("route"), "path", "none")  # the template, not the path that the client sent
            self.metrics.requests.labels(method, route, str(status)).inc()
            self.metrics.request_duration.labels(route).observe(time.monotonic() - started)


# ---- errors ----


class ApiError(Exception):
    """An answer with an HTTP error status.

    Args:
        status: HTTP status code.
        message: One sentence for the client that says what is wrong and what to do.
        retry_after: Seconds after which the same request may succeed; None if it will not.
    """

    def __init__(self, status: int, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the machine ran out of memory, also if that is only the cause of an error.

    >>> is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"))
    True
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # On the CPU, and on some accelerators, torch raises a plain RuntimeError.
    text = str(error)
    if isinstance(error, RuntimeError) and ("out of memory" in text.lower() or "DefaultCPUAllocator" in text):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


@contextmanager
def hide_internal_errors(task: str, on_failure: Callable[[str], None]) -> Iterator[None]:
    """Turn errors that are not the client's fault into an :class:`ApiError` that withholds their text.

    ``ApiError`` and ``InputError`` pass. Everything else is logged with its traceback, counted, and answered with
    status 500; if memory ran out, the answer says that the same request may succeed later.
    """
    try:
        yield
    except (ApiError, InputError):
        raise
    except Exception as error:
        logger.error("%s failed", task, exc_info=error)
        if is_out_of_memory(error):
            on_failure(OUT_OF_MEMORY)
            message = "the service ran out of memory; nothing was changed: send the request again later"
            raise ApiError(500, message, retry_after=RETRY_AFTER_OUT_OF_MEMORY) from error
        on_failure(INTERNAL)
        raise ApiError(500, "the network or the service failed; nothing was changed: see the service's log") from error


@contextmanager
def report_disk_errors(task: str, on_failure: Callable[[str], None]) -> Iterator[None]:
    """Turn errors of the disk into an :class:`ApiError` with status 503: they may be temporary, such as a full disk.

    Only for blocks in which an ``OSError`` comes from the service's own files, and not from a network.
    """
    try:
        yield
    except OSError as error:
        logger.error("%s failed", task, exc_info=error)
        on_failure(DISK)
        reason = error.strerror or "disk error"  # the whole text may contain paths
        raise ApiError(
            503,
            f"{task} failed ({reason}); nothing was changed: send the request again later",
            retry_after=_RETRY_AFTER_DISK_ERROR,
        ) from error


def validate_stream_name(name: str) -> str:
    """Return the name of a stream, which becomes part of paths and URLs, or raise :class:`ApiError`."""
    if not re.fullmatch(STREAM_NAME_PATTERN, name):
        raise ApiError(
            400,
            "a stream name starts with a letter or digit and has up to 64 letters, digits, dots, dashes or underscores",
        )
    return name


# ---- descriptions in /openapi.json ----


class ErrorResponse(BaseModel):
    """Body of every answer with an error status."""

    error: str


_ERRORS = {
    400: "malformed request",
    401: "missing or unknown token",
    403: "token without permission, or cross-origin request",
    404: "not found",
    408: "the body arrived too slowly",
    409: "conflict with the state of the stream",
    413: "body or images too large",
    415: "unsupported Content-Encoding",
    429: "too many requests; see Retry-After",
    500: "the network or the service failed; the stream is unchanged",
    503: "temporarily unavailable; see Retry-After",
    504: "timeout; the update continues and will count",
}
#: Statuses of a request that has a body and waits for a stream.
STREAM_ERRORS = (408, 409, 413, 415, 429, 500, 503, 504)


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the error statuses of a route; those of authentication are always among them."""
    return {status: {"model": ErrorResponse, "description": _ERRORS[status]} for status in (*statuses, 401, 403)}


def describe_body(*media_types: str, schema: Any = None, examples: Any = None) -> dict[str, Any]:
    """Describe a request body of one of several media types; binary without a schema. Examples are of the first."""
    content = {name: {"schema": schema or {"type": "string", "format": "binary"}} for name in media_types}
    if examples:
        content[media_types[0]]["examples"] = examples
    return {"requestBody": {"required": True, "content": content}}


def path_example(value: str) -> dict[str, Any]:
    """Return the example of a parameter, for ``openapi_examples``."""
    return {value: {"value": value}}


# ---- who may send requests ----


@dataclass(frozen=True)
class Tokens:
    """Bearer tokens of a service; false if there are none.

    Attributes:
        infer: Token for reading and inference.
        admin: Token for everything.
    """

    infer: str | None = None
    admin: str | None = None

    def __post_init__(self) -> None:
        for name, token in (("infer", self.infer), ("admin", self.admin)):
            if token is not None and (len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()):
                raise ConfigError(f"the {name} token needs at least {MIN_TOKEN_LENGTH} printable ASCII characters")
        if self.infer is not None and self.infer == self.admin:
            raise ConfigError("the infer token and the admin token are the same: give two different ones")

    def __bool__(self) -> bool:
        return self.infer is not None or self.admin is not None


def read_tokens(infer: Path | None, admin: Path | None, environment: Mapping[str, str] | None = None) -> Tokens:
    """Read tokens from files or from the environment, never from arguments, which other users of a machine can see.

    Args:
        infer: File with the infer token; None to read ``CTTA_SERVE_TOKEN``.
        admin: File with the admin token; None to read ``CTTA_SERVE_ADMIN_TOKEN``.
        environment: The environment variables; by default those of the process.

    Returns:
        The tokens that were found.
    """

    def read(file: Path | None, variable: str) -> str | None:
        if file is None:
            return (os.environ if environment is None else environment).get(variable, "").strip() or None
        try:
            token = file.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is not text: write a token of printable ASCII characters to it") from error
        if not token:
            raise ConfigError(f"{file} is empty: write a token to it")
        return token

    return Tokens(read(infer, TOKEN_VARIABLE), read(admin, ADMIN_TOKEN_VARIABLE))


def check_host(host: str, tokens: Tokens) -> None:
    """Raise if a service without tokens would be reachable from other machines.

    Args:
        host: Address to listen on.
        tokens: Tokens of the service.

    Raises:
        ConfigError: If the address is not a loopback address and there are no tokens.
    """
    if not tokens and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, so a token is needed: set {TOKEN_VARIABLE} and "
            f"{ADMIN_TOKEN_VARIABLE} in the environment, or give --token-file and --admin-token-file"
        )


def is_loopback(host: str) -> bool:
    """Return whether an address or host name is this machine's loopback.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "127.0.0.1.example.org")]
    [True, True, True, False, False]
    """
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Authenticator:
    """Check each request before its body is read; the methods are dependencies of routes.

    They are coroutines because FastAPI runs other functions in a thread, which costs more than these checks.

    Without tokens, whoever reaches the port may do everything. The service listens on loopback only then, but a browser
    on the same machine reaches the port on behalf of any page it shows: such requests name a foreign host (DNS
    rebinding) or come from a foreign origin, and are rejected.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    async def allow_anyone(self, request: Request) -> None:
        """Check the origin only, for what is not secret."""
        self._check_origin(request)

    async def require_infer(self, request: Request) -> None:
        """Require a token for reading and inference."""
        self._check_origin(request)
        self._check_token(request, [self.tokens.infer, self.tokens.admin])

    async def require_admin(self, request: Request) -> None:
        """Require the admin token, for whatever changes or copies the state of a stream."""
        self._check_origin(request)
        self._check_token(request, [self.tokens.admin], insufficient=[self.tokens.infer])

    def _check_token(
        self, request: Request, allowed: list[str | None], insufficient: list[str | None] | None = None
    ) -> None:
        if not self.tokens:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Lists, not generators: the time must not depend on which token matches.
        if scheme.lower() == "bearer" and any([_is_same(given.strip(), token) for token in allowed]):
            return
        if scheme.lower() == "bearer" and any([_is_same(given.strip(), token) for token in insufficient or []]):
            raise ApiError(403, "the admin token is required")
        raise ApiError(401, "a valid token is required: send the header Authorization: Bearer TOKEN")

    def _check_origin(self, request: Request) -> None:
        host = request.headers.get("host", "")
        if not self.tokens and not is_loopback(_split_url(f"//{host}").hostname or ""):
            raise ApiError(403, f"a service without tokens can be addressed as localhost only, not as {host[:80]!r}")
        if request.method in ("GET", "HEAD", "OPTIONS"):
            return
        origin = request.headers.get("origin")
        is_foreign = origin is not None and _split_url(origin).netloc.lower() != host.lower()
        if is_foreign or request.headers.get("sec-fetch-site") == "cross-site":
            raise ApiError(403, "cross-origin requests are not allowed")


def _split_url(url: str) -> SplitResult:
    """Split a URL; the parts of an invalid one are empty."""
    try:
        parts = urlsplit(url)
        parts.hostname  # noqa: B018  # raises for some invalid URLs
        return parts
    except ValueError:
        return urlsplit("")


def _is_same(given: str, token: str | None) -> bool:
    """Compare in a time that reveals nothing about the token, not even its length."""
    digests = (hashlib.sha256(text.encode(errors="replace")).digest() for text in (given, token or ""))
    return hmac.compare_digest(*digests) and token is not None


# ---- bodies within the limits ----


class Decompressor:
    """Expand a body piece by piece, so that its reader can stop at a limit.

    >>> import gzip
    >>> decompressor = Decompressor("gzip")
    >>> b"".join(decompressor.expand(gzip.compress(b"body")))
    b'body'
    >>> decompressor.finish()
    """

    def __init__(self, encoding: str) -> None:
        if encoding not in WINDOW_BITS:
            known = ", ".join(WINDOW_BITS)
            raise ApiError(415, f"Content-Encoding {encoding[:40]!r} is not supported: use one of {known}, or none")
        self.encoding = encoding
        self._stream = zlib.decompressobj(WINDOW_BITS[encoding])

    def expand(self, data: bytes) -> Iterator[bytes]:
        """Yield what the next part of a body expands to, in pieces of limited size; ApiError if it is damaged."""
        try:
            while data:
                if self._stream.eof:
                    self._start_next()
                yield self._stream.decompress(data, PIECE)
                data = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
            while piece := self._stream.decompress(b"", PIECE):
                yield piece
        except zlib.error as error:
            raise ApiError(400, f"the body is not valid {self.encoding}: {error}") from error

    def _start_next(self) -> None:
        if self.encoding != "gzip":
            raise ApiError(400, f"there are bytes after the end of the {self.encoding} body")
        self._stream = zlib.decompressobj(WINDOW_BITS[self.encoding])  # a gzip file may have several members

    def finish(self) -> None:
        """Raise ApiError unless the body was complete."""
        if not self._stream.eof:
            raise ApiError(400, f"the {self.encoding} body is truncated")


class BodyReader:
    """Read request bodies within the limits; a dependency of routes, to be resolved after authentication."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self._max_total = limits, limits.max_total_body_bytes
        self._num_bytes = 0  # of the requests that have not been answered yet

    async def __call__(self, request: Request) -> AsyncIterator[bytearray]:
        """Yield the body, expanded if it is compressed; it counts toward the total until the request is answered."""
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        decompressor = None if encoding == "identity" else Decompressor(encoding)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self.limits.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            await self._read_into(body, request, decompressor)
            yield body
        finally:
            self._num_bytes -= len(body)

    async def _read_into(self, body: bytearray, request: Request, decompressor: Decompressor | None) -> None:
        num_received = 0
        try:
            async with asyncio.timeout(self.limits.request_timeout):
                async for chunk in request.stream():
                    num_received += len(chunk)
                    self._check_size(num_received)  # what expands to nothing takes time
                    if decompressor is None:
                        self._append(body, chunk)
                        continue
                    for piece in decompressor.expand(chunk):
                        self._append(body, piece)
                        await asyncio.sleep(0)  # other requests should not have to wait
            if decompressor is not None:
                decompressor.finish()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.limits.request_timeout:g} s") from None
        except ClientDisconnect:
            raise ApiError(400, "the client disconnected before its body was complete") from None

    def _append(self, body: bytearray, piece: bytes) -> None:
        self._num_bytes += len(piece)
        body += piece
        self._check_size(len(body))

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self.limits.max_body_bytes:
            raise self._too_large()
        if self._num_bytes > self._max_total:
            raise ApiError(
                429, "too many request bodies are being handled: send the request again later", retry_after=1
            )

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body exceeds {self.limits.max_body_bytes} bytes, as sent or expanded: send less, or serve with a "
            "larger --body",
        )


class MemoryBudget:
    """Admit requests in the order of their arrival, while the memory that they reserve stays within a limit."""

    def __init__(self, max_bytes: int, timeout: float) -> None:
        self.max_bytes, self.timeout = max_bytes, timeout
        self.num_reserved = 0
        self._head_of_queue = asyncio.Lock()  # fair
        self._released = asyncio.Event()

    @asynccontextmanager
    async def reserve(self, num_bytes: int) -> AsyncIterator[Callable[[int], None]]:
        """Wait until there is memory, and reserve it for the duration of a block.

        Yields:
            A function that releases what exceeds a number of bytes, once the block needs no more than that.

        Raises:
            ApiError: With status 413 if there is never so much, and 503 if there was not in time.
        """
        if num_bytes > self.max_bytes:
            needed, allowed = math.ceil(num_bytes / 2**20), self.max_bytes // 2**20
            raise ApiError(
                413,
                f"decoding the request may take {needed} MB of memory, and {allowed} MB are allowed: send a smaller "
                "image or fewer numbers, or serve with a larger --request-memory",
            )
        try:
            async with asyncio.timeout(self.timeout), self._head_of_queue:
                while self.num_reserved + num_bytes > self.max_bytes:
                    self._released.clear()
                    await self._released.wait()
                self.num_reserved += num_bytes
        except TimeoutError:
            message = f"there was no memory for the request within {self.timeout:g} s; nothing was done"
            raise ApiError(503, message, retry_after=1) from None
        num_held = num_bytes

        def shrink(num_needed: int) -> None:
            nonlocal num_held
            released = max(0, num_held - num_needed)
            num_held -= released
            self.num_reserved -= released
            self._released.set()

        try:
            yield shrink
        finally:
            shrink(0)


def return_freed_memory() -> None:
    """Return freed memory to the system: glibc keeps some for each thread that decoded a large request."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)

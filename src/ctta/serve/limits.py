"""Limits of a service, and requests that are read, expanded and decoded within them."""

import asyncio
import ctypes
import math
import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Annotated

from fastapi import Request
from starlette.requests import ClientDisconnect

from ctta.core.options import Option
from ctta.errors import ConfigError
from ctta.serve.api import ApiError

TRIM_THRESHOLD = 16 * 2**20  # bytes from which on it is worth a millisecond to return freed memory
LIMITS = "Limits"  # a section of ``ctta serve --help``
#: Supported values of Content-Encoding, with the format for zlib.
WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
PIECE = 2**20  # bytes that are expanded at once, in a millisecond


class Decompressor:
    """Expand a body piece by piece, so that its reader can stop at a limit.

    Args:
        encoding: Value of the header Content-Encoding.

    Raises:
        ApiError: With status 415 if the encoding is not supported.

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
        """Yield what a part of the body expands to, in pieces of limited size.

        Args:
            data: The next part.

        Raises:
            ApiError: With status 400 if the body is damaged.
        """
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
        """Raise unless the body was complete.

        Raises:
            ApiError: With status 400.
        """
        if not self._stream.eof:
            raise ApiError(400, f"the {self.encoding} body is truncated")


@dataclass(frozen=True)
class Limits:
    """Limits beyond which requests are rejected; the defaults suit one machine.

    The others have options of the command.

    Attributes:
        max_live_bytes: Memory of all live streams, without the source network that they share.
        max_total_queue: Requests that wait for any stream.
        max_body_bytes: Size of a request body.
        max_side: Height and width of an image in pixels, for a service without an image size.
        max_image_pixels: Pixels of an image file before it is resized.
        max_request_bytes: Memory of all requests that are being handled: their bodies, and what is decoded from them.
        max_connections: Open connections.
    """

    max_live_streams: Annotated[
        int,
        Option("Keep at most N streams in memory; others wait on disk.", "N", "--live-streams", min=1, panel=LIMITS),
    ] = 64
    max_streams: Annotated[
        int, Option("Accept at most N streams in memory and on disk.", "N", "--streams", min=1, panel=LIMITS)
    ] = 10_000
    max_live_bytes: int = 3 * 2**30
    max_queue: Annotated[
        int, Option("Let at most N requests wait for one stream.", "N", "--queue", min=1, panel=LIMITS)
    ] = 16
    max_total_queue: int = 256
    max_body_bytes: int = 16 * 2**20
    max_batch: Annotated[int, Option("Accept at most N images per request.", "N", "--batch", min=1, panel=LIMITS)] = 256
    max_side: int = 2048
    max_image_pixels: int = 32_000_000
    max_request_bytes: int = 2**30
    request_timeout: Annotated[
        float, Option("Give up on a request after this time.", "SECONDS", "--timeout", min=0.01, panel=LIMITS)
    ] = 60.0
    max_connections: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"the limit {field.name} must be positive, got {value!r}")
        if self.max_live_streams > self.max_streams:
            raise ConfigError(
                f"max_live_streams must not exceed max_streams, got {self.max_live_streams} and {self.max_streams}"
            )
        if 2 * self.max_body_bytes > self.max_request_bytes:
            raise ConfigError(
                f"max_request_bytes must be at least twice max_body_bytes, {2 * self.max_body_bytes}, for a body and "
                f"what is decoded from it; got {self.max_request_bytes}"
            )

    @property
    def max_total_body_bytes(self) -> int:
        """Size of all request bodies that are being handled; a single one of the allowed size always fits."""
        return max(self.max_request_bytes // 4, self.max_body_bytes)

    @property
    def max_decoded_bytes(self) -> int:
        """Memory for what is decoded from bodies."""
        return self.max_request_bytes - self.max_total_body_bytes


class BodyReader:
    """Read request bodies within the limits; a dependency of routes, to be resolved after authentication.

    Args:
        limits: Of one body, of all bodies at once, and of the time that reading may take.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._num_bytes = 0  # of the requests that have not been answered yet

    async def __call__(self, request: Request) -> AsyncIterator[bytearray]:
        """Yield the body of a request, which counts toward the total until the request has been answered.

        Args:
            request: The request.

        Yields:
            The whole body; what a compressed one expands to, within the same limits.
        """
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
        if self._num_bytes > self.limits.max_total_body_bytes:
            raise ApiError(
                429, "too many request bodies are being handled: send the request again later", retry_after=1
            )

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body exceeds {self.limits.max_body_bytes} bytes, as sent or expanded: send less, or serve with a "
            "larger --body",
        )


class Reservation:
    """Memory that a request has reserved.

    Args:
        budget: What it is part of.
        num_bytes: Its size.
    """

    def __init__(self, budget: "MemoryBudget", num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._budget = budget

    def shrink(self, num_bytes: int) -> None:
        """Release what exceeds a number of bytes.

        Args:
            num_bytes: What is still needed.
        """
        released = max(0, self.num_bytes - num_bytes)
        self.num_bytes -= released
        self._budget.release(released)


class MemoryBudget:
    """Admit requests in the order of their arrival, while the memory that they reserve stays within a limit.

    Args:
        max_bytes: The limit.
        timeout: Seconds after which a request that waits is given up.
    """

    def __init__(self, max_bytes: int, timeout: float) -> None:
        self.max_bytes, self.timeout = max_bytes, timeout
        self.num_reserved = 0
        self._head_of_queue = asyncio.Lock()  # fair
        self._released = asyncio.Event()

    @asynccontextmanager
    async def reserve(self, num_bytes: int) -> AsyncIterator[Reservation]:
        """Wait until there is memory, and reserve it for the duration of a block.

        Args:
            num_bytes: Bytes that the block needs at most.

        Yields:
            The reservation, which the block may shrink.

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
        reservation = Reservation(self, num_bytes)
        try:
            yield reservation
        finally:
            reservation.shrink(0)

    def release(self, num_bytes: int) -> None:
        """Return memory to the budget.

        Args:
            num_bytes: Bytes that are no longer needed.
        """
        self.num_reserved -= num_bytes
        self._released.set()


def return_freed_memory() -> None:
    """Return freed memory to the system: glibc keeps some for each thread that decoded a large request."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)

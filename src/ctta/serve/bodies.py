"""Bodies of requests, no longer than allowed, one by one and all together."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from ctta.serve.errors import Refusal
from ctta.serve.limits import Limits


class Bodies:
    """Reads them; as a dependency of a route, after its door."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self._num_bytes = limits, 0  # of those that are not answered yet

    async def __call__(self, request: Request) -> AsyncIterator[bytes]:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refusal(415, "compressed bodies are not read: send it as it is")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self.limits.body:
            raise self._too_large()
        body = bytearray()
        try:
            await self._read_into(body, request)
            yield bytes(body)
        finally:
            self._num_bytes -= len(body)

    async def _read_into(self, body: bytearray, request: Request) -> None:
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for chunk in request.stream():
                    self._num_bytes += len(chunk)
                    body += chunk
                    self._check(len(body))
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {self.limits.seconds:g} s") from None
        except ClientDisconnect:
            raise Refusal(400, "the client left before its body was there") from None

    def _check(self, length: int) -> None:
        if length > self.limits.body:
            raise self._too_large()
        if self._num_bytes > max(self.limits.bodies, self.limits.body):
            raise Refusal(429, "too many bytes are under way: send again later", retry_after=1)

    def _too_large(self) -> Refusal:
        return Refusal(
            413,
            f"the body is longer than the {self.limits.body} bytes allowed: send less, or serve with a larger --body",
        )

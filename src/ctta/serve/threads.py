"""Threads that work for an event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Threads:
    """As many as told, each with as many of torch's own as the thread that makes them."""

    def __init__(self, number: int) -> None:
        of_torch = torch.get_num_threads()  # each has to be told
        self._pool = ThreadPoolExecutor(number, "stream", initializer=lambda: torch.set_num_threads(of_torch))

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Wait for it, cancelled or not: a thread cannot be called off, and needs the caller's locks to its end."""
        job = asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            await asyncio.wait({job})
            raise

    def end(self) -> None:
        """When nothing is left to do."""
        self._pool.shutdown()

"""Run the service: listen, serve until asked to stop, save every stream."""

import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import uvicorn

from ctta.serve.app import create_app
from ctta.serve.auth import Tokens, check_host
from ctta.serve.service import Service
from ctta.serve.sources import VideoSource


def serve(
    service: Service,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    tokens: Tokens = Tokens(),  # noqa: B008  # frozen
    sources: Sequence[VideoSource] = (),
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the requests that were accepted and save every stream.

    Args:
        service: What is served.
        host: Address to listen on; any other than loopback needs a token.
        port: Port to listen on; 0 for any that is free.
        tokens: Tokens for clients and administrators.
        sources: Cameras that the service reads by itself.
        on_listening: Called with the URL once connections are accepted.

    Raises:
        OSError: If the address cannot be used, or if streams could not be saved at the end.
    """
    check_host(host, tokens)
    limits = service.limits
    config = uvicorn.Config(
        create_app(service, tokens, sources),
        log_level="warning",
        limit_concurrency=limits.max_connections,
        timeout_graceful_shutdown=max(1, round(limits.request_timeout)),
        server_header=False,
        lifespan="on",
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    url_host = f"[{host}]" if ":" in host else host
    with socket.create_server((host, port), family=family, backlog=limits.max_connections) as listener:
        # Inherited by connections. asyncio sets it only where the socket names its protocol, and without it, an answer
        # on a connection that is kept open waits about 40 ms for the client to acknowledge its header.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if on_listening:
            on_listening(f"http://{url_host}:{listener.getsockname()[1]}")
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

"""Listen, serve until asked to stop, write every stream."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from ctta.serve.app import application
from ctta.serve.auth import Tokens, is_loopback
from ctta.serve.service import Service

TOKEN, ADMIN_TOKEN = "CTTA_SERVE_TOKEN", "CTTA_SERVE_ADMIN_TOKEN"


def read_tokens(infer: Path | None, admin: Path | None, environment: Mapping[str, str] = os.environ) -> Tokens:
    """Tokens from files, or else from the environment; never from arguments, which every user of a machine can see."""

    def token(file: Path | None, variable: str) -> str | None:
        return (file.read_text(encoding="utf-8") if file else environment.get(variable, "")).strip() or None

    for file in (infer, admin):
        if file is not None and not file.read_text(encoding="utf-8").strip():
            raise ValueError(f"{file} is empty, and should hold a token")
    return Tokens(token(infer, TOKEN), token(admin, ADMIN_TOKEN))


def check_address(host: str, tokens: Tokens) -> None:
    """Only this machine may reach a service that asks for no token."""
    if not tokens and not is_loopback(host):
        raise ValueError(
            f"{host} can be reached from other machines, so a token is needed: set {TOKEN} and {ADMIN_TOKEN} in the "
            "environment, or give --token-file and --admin-token-file"
        )


def serve(
    service: Service,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    tokens: Tokens = Tokens(),  # noqa: B008  # frozen
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what has begun and write every stream.

    Args:
        service: what is served.
        host: to listen on; others than loopback need a token.
        port: 0 for any that is free.
        tokens: for clients and administrators.
        on_listening: told the address once connections are taken.
    """
    check_address(host, tokens)
    limits = service.limits
    config = uvicorn.Config(
        application(service, tokens),
        log_level="warning",
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=max(1, round(limits.seconds)),
        server_header=False,
        lifespan="on",
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=limits.connections) as listener:
        shown = f"[{host}]" if ":" in host else host
        if on_listening:
            on_listening(f"http://{shown}:{listener.getsockname()[1]}")
        with _ending_quietly():
            uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def _ending_quietly() -> Iterator[None]:
    """uvicorn stops on a signal and then sends it again, which would end the process before its caller can tidy up."""
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

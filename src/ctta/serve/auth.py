"""Authentication: bearer tokens of two scopes, or loopback only for a service without tokens."""

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from fastapi import Request

from ctta.errors import ConfigError
from ctta.serve.api import ApiError

MIN_TOKEN_LENGTH = 16
TOKEN_VARIABLE, ADMIN_TOKEN_VARIABLE = "CTTA_SERVE_TOKEN", "CTTA_SERVE_ADMIN_TOKEN"


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


def read_tokens(infer: Path | None, admin: Path | None, environment: Mapping[str, str] = os.environ) -> Tokens:
    """Read tokens from files or from the environment, never from arguments, which other users of a machine can see.

    Args:
        infer: File with the infer token; None to read ``CTTA_SERVE_TOKEN``.
        admin: File with the admin token; None to read ``CTTA_SERVE_ADMIN_TOKEN``.
        environment: The environment variables.

    Returns:
        The tokens that were found.
    """

    def read(file: Path | None, variable: str) -> str | None:
        if file is None:
            return environment.get(variable, "").strip() or None
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

    Args:
        tokens: Tokens of the service.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    async def allow_anyone(self, request: Request) -> None:
        """Check the origin only, for what is not secret.

        Args:
            request: The request.
        """
        self._check_origin(request)

    async def require_infer(self, request: Request) -> None:
        """Require a token for reading and inference.

        Args:
            request: The request.
        """
        self._check_origin(request)
        self._check_token(request, [self.tokens.infer, self.tokens.admin])

    async def require_admin(self, request: Request) -> None:
        """Require the admin token, for whatever changes or copies the state of a stream.

        Args:
            request: The request.
        """
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

"""Who may come in: bearer tokens of two scopes, and for a service without tokens only this machine's own programs."""

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from fastapi import Request

from ctta.serve.errors import Refusal

SHORTEST_TOKEN = 16  # characters


@dataclass(frozen=True)
class Tokens:
    """What opens what; a token for administrators opens everything."""

    infer: str | None = None
    admin: str | None = None

    def __post_init__(self) -> None:
        for name, token in (("infer", self.infer), ("admin", self.admin)):
            if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
                raise ValueError(f"the {name} token needs at least {SHORTEST_TOKEN} printable ASCII characters")
        if self.infer is not None and self.infer == self.admin:
            raise ValueError("the infer and the admin token are the same, so one of them has no use: give two")

    def __bool__(self) -> bool:
        return self.infer is not None or self.admin is not None


class Door:
    """Checks every request before its body is read.

    Without tokens whoever reaches the port may do everything. It is bound to this machine then, but a browser on it
    reaches the port too, for any page it shows: such requests name a foreign host (DNS rebinding) or come from a
    foreign origin, and are refused.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    def anyone(self, request: Request) -> None:
        """For what is no secret."""
        self._check_origin(request)

    def infer(self, request: Request) -> None:
        """For reading and for images."""
        self._check_origin(request)
        self._check_token(request, [self.tokens.infer, self.tokens.admin])

    def admin(self, request: Request) -> None:
        """For whatever changes or copies the state of a stream."""
        self._check_origin(request)
        self._check_token(request, [self.tokens.admin], known=[self.tokens.infer])

    def _check_token(self, request: Request, allowed: list[str | None], known: list[str | None] | None = None) -> None:
        if not self.tokens:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and any([_same(given.strip(), token) for token in allowed]):
            return
        if scheme.lower() == "bearer" and any([_same(given.strip(), token) for token in known or []]):
            raise Refusal(403, "this needs the admin token")
        raise Refusal(401, "send the header Authorization: Bearer TOKEN with a token that this service knows")

    def _check_origin(self, request: Request) -> None:
        host = request.headers.get("host", "")
        if not self.tokens and not is_loopback(_split(f"//{host}").hostname or ""):
            raise Refusal(403, f"the service has no tokens, so it answers to localhost only, not to {host[:80]!r}")
        if request.method in ("GET", "HEAD", "OPTIONS"):
            return
        origin = request.headers.get("origin")
        foreign = origin is not None and _split(origin).netloc.lower() != host.lower()
        if foreign or request.headers.get("sec-fetch-site") == "cross-site":
            raise Refusal(403, "a page of another origin cannot change anything here")


def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine's own.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "127.0.0.1.example.org")]
    [True, True, True, False, False]
    """
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _split(address: str) -> SplitResult:
    """Its parts; none of something that is no address."""
    try:
        parts = urlsplit(address)
        parts.hostname  # noqa: B018  # may raise, too
        return parts
    except ValueError:
        return urlsplit("")


def _same(given: str, token: str | None) -> bool:
    """Compared in a time that tells nothing about the token, not even its length."""
    digests = (hashlib.sha256(text.encode(errors="replace")).digest() for text in (given, token or ""))
    return hmac.compare_digest(*digests) and token is not None

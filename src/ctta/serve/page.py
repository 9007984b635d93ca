"""The live page: three files of this package, which ask for nothing but this service."""

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Depends, Response

from ctta.serve.auth import Door

#: Nothing from elsewhere, nothing inline, in nobody's frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}


def page_routes(door: Door) -> APIRouter:
    """``/`` and the two files that it needs; no secret, as the data comes from routes with a door of their own."""
    router = APIRouter(include_in_schema=False, dependencies=[Depends(door.anyone)])
    for path, (name, media_type) in FILES.items():
        router.add_api_route(path, _sender(name, media_type), methods=["GET"])
    return router


def _sender(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    content = (files("ctta.serve") / name).read_bytes()

    async def send() -> Response:
        headers = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        return Response(content, media_type=media_type, headers=headers)

    return send

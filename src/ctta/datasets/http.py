"""Ask a server for a file from some byte on, and refuse every answer that is not that file."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ctta.datasets.catalog import Dataset
from ctta.datasets.errors import DownloadError
from ctta.datasets.google_drive import confirmed_url, title_of
from ctta.datasets.verification import HTML_INSTEAD

if TYPE_CHECKING:
    from requests import Response, Session

TIMEOUT = 60.0  # seconds of silence, not of the whole download
_LARGEST_PAGE = 1 << 20


@contextmanager
def answer_from(source: Dataset, start: int, by_hand: str) -> Iterator["Response"]:
    """The server's answer with the file from byte `start` on, with all of it, or 416: there is nothing from there on.

    Args:
        source: what to ask for.
        start: how many bytes there are already.
        by_hand: what to tell the user to do if the file cannot be had.
    """
    import requests

    with requests.Session() as session:
        url: str | None = source.url
        pages_to_pass = 1 if source.asks_to_confirm else 0
        while url is not None:
            with _ask(session, url, start) as response:
                nothing_beyond = start > 0 and response.status_code == 416  # many servers decorate it with a page
                if not (response.status_code in (200, 206) or nothing_beyond):  # 202 is a gatekeeper's "not yet"
                    raise DownloadError(f"{source.file}: {_refusal(response, url)}. {by_hand}")
                if nothing_beyond or not _is_html(response):
                    yield response
                    return
                page = _text_of(response)
                url = confirmed_url(page, response.url) if pages_to_pass else None
                pages_to_pass -= 1
        raise DownloadError(f"{source.file}: {html_instead(source.url, title_of(page))}. {by_hand}")


def html_instead(url: str, title: str = "") -> str:
    named = f" titled '{title}'" if title else ""
    return f"{url} answered with a page{named}: {HTML_INSTEAD}. Nothing of it was saved"


def begin_and_total(response: "Response") -> tuple[int, int | None]:
    """From which byte on the answer gives the file (-1: it does not say), and how long the whole file is, if known."""
    if response.status_code in (206, 416):
        found = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", response.headers.get("Content-Range", "").strip())
        begin, total = found.groups() if found else (None, "*")
        return -1 if begin is None else int(begin), None if total == "*" else int(total)
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _ask(session: "Session", url: str, start: int) -> "Response":
    headers = {"Accept-Encoding": "identity"}  # lengths and ranges must count the bytes of the file itself
    if start:
        headers["Range"] = f"bytes={start}-"
    return session.get(url, headers=headers, stream=True, timeout=TIMEOUT)


def _is_html(response: "Response") -> bool:
    return "html" in response.headers.get("Content-Type", "").lower()


def _text_of(page: "Response") -> str:
    content: bytes = page.raw.read(_LARGEST_PAGE, decode_content=True)
    return content.decode(errors="replace")


def _refusal(response: "Response", url: str) -> str:
    status = f"{url} answered {response.status_code} {response.reason}"
    if response.status_code in (404, 410):
        return f"{status}: the link is dead"
    if response.status_code >= 500 or response.status_code == 429:
        return f"{status}: the server is busy or down, so try again later"
    return f"{status} instead of the file"

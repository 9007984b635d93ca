"""HTTP requests for a file or the rest of one; every response that is not that file is refused."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urljoin, urlsplit

from typing_extensions import override

from ctta.data.datasets.catalog import Dataset
from ctta.errors import DownloadError

if TYPE_CHECKING:
    from requests import Response, Session

TIMEOUT = 60.0  # seconds without any data, not for the whole download
_MAX_PAGE_BYTES = 1 << 20
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


@contextmanager
def request_file(dataset: Dataset, start: int, hint: str) -> Iterator["Response"]:
    """Request a file from a byte onward, passing a page on which the host asks for confirmation.

    Args:
        dataset: The file to request.
        start: Number of bytes that are there already.
        hint: What the user can do if the file cannot be downloaded; part of every error message.

    Yields:
        The response with the rest of the file (206), with all of it (200), or 416 if nothing is left after ``start``.

    Raises:
        DownloadError: The server answered with an error status or a web page, or redirects to plain HTTP.
    """
    import requests

    with requests.Session() as session:
        url: str | None = dataset.url
        num_confirmations = 1 if dataset.needs_confirmation else 0
        while url is not None:
            with _get(session, url, start) as response:
                is_complete = start > 0 and response.status_code == 416  # many servers send it with a page
                if not (response.status_code in (200, 206) or is_complete):  # 202 means "not ready yet"
                    raise DownloadError(f"{dataset.file}: {_describe_status(response, url)}. {hint}")
                if is_complete or not _is_html(response):
                    yield response
                    return
                page = _read_page(response)
                url = find_confirmation_url(page, response.url) if num_confirmations else None
                num_confirmations -= 1
        raise DownloadError(f"{dataset.file}: {describe_html(dataset.url, _parse(page).title)}. {hint}")


def parse_content_range(response: "Response") -> tuple[int | None, int | None]:
    """Return the offset of the response's first byte in the file and the length of the file, each None if unknown."""
    if response.status_code in (206, 416):
        found = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", response.headers.get("Content-Range", "").strip())
        offset, total = found.groups() if found else (None, "*")
        return None if offset is None else int(offset), None if total == "*" else int(total)
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def looks_like_html(first_bytes: bytes) -> bool:
    """Return whether a file starts with a tag, as web pages and XML errors do, and archives and checkpoints do not."""
    return first_bytes.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<")


def describe_html(url: str, title: str = "") -> str:
    """Return the sentence that reports a web page in place of a file."""
    titled = f" titled '{title}'" if title else ""
    return f"{url} returned a web page (HTML){titled} instead of the file; nothing was saved"


def find_confirmation_url(page: str, page_url: str) -> str | None:
    """Return the address behind the download form of a confirmation page, or None without such a form.

    Google Drive shows such a page for files that are too large for its virus scan.
    """
    for action, fields in _parse(page).forms:
        if "confirm" in fields:  # other forms on the page search or sign in
            target = urljoin(page_url, action)
            return f"{target}{'&' if '?' in target else '?'}{urlencode(fields)}"
    return None


def _get(session: "Session", url: str, start: int) -> "Response":
    _check_encrypted(url)
    headers = {"Accept-Encoding": "identity"}  # lengths and ranges must count the bytes of the file itself
    if start:
        headers["Range"] = f"bytes={start}-"
    return session.get(url, headers=headers, stream=True, timeout=TIMEOUT, hooks={"response": _check_redirect})


def _check_redirect(response: "Response", **_: Any) -> None:
    """Refuse a redirect before it is followed."""
    if response.is_redirect:
        target = urljoin(response.url, response.headers["Location"])
        _check_encrypted(target, origin=response.url)


def _check_encrypted(url: str, origin: str | None = None) -> None:
    """Raise unless an address uses HTTPS, or HTTP on this machine all along."""
    parts = urlsplit(url)
    is_local = parts.scheme == "http" and parts.hostname in _LOCAL_HOSTS
    if parts.scheme == "https" or (is_local and not (origin or "").startswith("https:")):
        return
    source = f"{origin} redirects to {url}" if origin else url
    raise DownloadError(f"{source}, which is not encrypted (https); nothing was downloaded from there")


def _is_html(response: "Response") -> bool:
    return "html" in response.headers.get("Content-Type", "").lower()


def _read_page(response: "Response") -> str:
    content: bytes = response.raw.read(_MAX_PAGE_BYTES, decode_content=True)
    return content.decode(errors="replace")


def _describe_status(response: "Response", url: str) -> str:
    status = f"{url} returned {response.status_code} {response.reason}"
    if response.status_code in (404, 410):
        return f"{status}: the link is dead"
    if response.status_code >= 500 or response.status_code == 429:
        return f"{status}: the server is busy or down, try again later"
    return f"{status} instead of the file"


def _parse(page: str) -> "_FormParser":
    parser = _FormParser()
    with suppress(AssertionError):  # html.parser stops at some broken markup with it
        parser.feed(page)
    return parser


class _FormParser(HTMLParser):
    """Collects the title of a page, and the action and named fields of each form."""

    def __init__(self) -> None:
        super().__init__()
        self.forms: list[tuple[str, dict[str, str]]] = []
        self._title = ""
        self._in_form = self._in_title = False

    @property
    def title(self) -> str:
        return " ".join(self._title.split())

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if tag == "form":
            self.forms.append((attributes.get("action", ""), {}))
            self._in_form = True
        elif tag == "input" and self._in_form and "name" in attributes:
            self.forms[-1][1][attributes["name"]] = attributes.get("value", "")
        self._in_title = tag == "title"

    @override
    def handle_endtag(self, tag: str) -> None:
        self._in_title = False
        if tag == "form":
            self._in_form = False

    @override
    def handle_data(self, data: str) -> None:
        if self._in_title:
            self._title += data

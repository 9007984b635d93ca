"""Download one file over HTTP: resumed where it broke off, verified, and under its final name only when complete.

pooch, the usual library for this, cannot resume: it requests no ranges and writes to a temporary file of a random name
that the next run cannot find. For 20 GB (ImageNet-C) on a slow line resuming matters most, and what would be left for
pooch (a checksum and a rename) is in the standard library.
"""

import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urljoin, urlsplit

from typing_extensions import override

from ctta.data.datasets.catalog import Dataset
from ctta.errors import DownloadError
from ctta.io.atomic import NO_SPACE_ERRNOS
from ctta.io.progress import show_progress

if TYPE_CHECKING:
    from requests import Response, Session

TIMEOUT = 60.0  # seconds without any data, not for the whole download
_MAX_PAGE_BYTES = 1 << 20
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


@contextmanager
def request_file(dataset: Dataset, start: int, hint: str) -> Iterator["Response"]:
    """Request a file from byte ``start`` onward, passing a page on which the host asks for confirmation.

    The response has the rest of the file (206), all of it (200), or nothing (416) if nothing is left after ``start``.
    An error status, a web page or a redirect to plain HTTP is a DownloadError, which includes the ``hint``.
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
                if is_complete or "html" not in response.headers.get("Content-Type", "").lower():
                    yield response
                    return
                page = response.raw.read(_MAX_PAGE_BYTES, decode_content=True).decode(errors="replace")
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
    titled = f" titled '{' '.join(title.split())}'" if title.strip() else ""
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
    refused = f"{origin} redirects to {url}" if origin else url
    raise DownloadError(f"{refused}, which is not encrypted (https); nothing was downloaded from there")


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
        self.title = ""
        self._in_form = self._in_title = False

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
            self.title += data


MISSING_EXTRA = "downloads need the extra 'data': pip install 'ctta[data]'"
_CHUNK_BYTES = 1 << 16
_HASHED_BYTES = 1 << 20  # at a time


def fetch_file(dataset: Dataset, target: Path, *, progress: bool) -> None:
    """Download a file to ``target``, continuing what an earlier run left in ``<target>.part``; needs the extra data."""
    transfer = _Transfer(dataset, target, progress)
    part = transfer.part
    try:
        if dataset.size is None or transfer.num_bytes != dataset.size:
            transfer.fetch_remainder()
        with part.open("rb+") as file:
            os.fsync(file.fileno())  # after a power failure no truncated file has the final name
    except OSError as error:
        if error.errno in NO_SPACE_ERRNOS:
            raise transfer.full_disk(str(error.strerror)) from error
        raise
    if defect := find_defect(part, dataset, progress=progress):
        part.unlink()
        raise transfer.error(f"{defect}. The downloaded data was deleted; run again to start over")
    os.replace(part, target)


def find_defect(path: Path, dataset: Dataset, *, progress: bool) -> str | None:
    """Return in words what is wrong with a file (a web page, its length, its checksum), or None."""
    with path.open("rb") as file:
        if looks_like_html(file.read(1024)):
            return "it is a web page (HTML), not the file"
    length = path.stat().st_size
    if length == 0:
        return "it is empty"
    if dataset.size is not None and length != dataset.size:
        return f"wrong length: expected {dataset.size} bytes, found {length}"
    known = {name: value for name, value in (("sha256", dataset.sha256), ("md5", dataset.md5)) if value is not None}
    digests = {algorithm: hashlib.new(algorithm, usedforsecurity=False) for algorithm in known}
    if digests:
        title = f"verify {path.name.removesuffix('.part')}"
        with path.open("rb") as file, show_progress(title, enabled=progress, num_bytes=length) as advance:
            while chunk := file.read(_HASHED_BYTES):
                for digest in digests.values():
                    digest.update(chunk)
                advance(len(chunk))
    for algorithm, digest in digests.items():
        if (found := digest.hexdigest()) != known[algorithm]:
            return f"wrong checksum: expected {algorithm} {known[algorithm]}, found {found}"
    return None


@dataclass(frozen=True)
class _Transfer:
    """The download of a file of the catalog to ``target``."""

    dataset: Dataset
    target: Path
    progress: bool

    @property
    def part(self) -> Path:
        return self.target.with_name(f"{self.target.name}.part")

    @property
    def num_bytes(self) -> int:
        """Length of the part."""
        return self.part.stat().st_size if self.part.exists() else 0

    @property
    def hint(self) -> str:
        return f"To download it manually, open {self.dataset.url} in a browser and save the file as {self.target}"

    def error(self, problem: str) -> DownloadError:
        return DownloadError(f"{self.target.name}: {problem}. {self.hint}")

    def broken(self, reason: str) -> DownloadError:
        kept = f"{self.num_bytes} bytes are kept in {self.part}; run again to resume" if self.num_bytes else "Run again"
        return self.error(f"the connection to {self.dataset.url} failed ({reason}). {kept}")

    def full_disk(self, reason: str) -> DownloadError:
        return DownloadError(
            f"{self.target.name}: no space in {self.part.parent}: {reason}. {self.num_bytes} bytes are kept; "
            "free some space and run again to resume, or set CTTA_CACHE to a folder on a larger disk"
        )

    def fetch_remainder(self) -> None:
        """Request and write what is missing of the part."""
        try:
            import requests
            import urllib3
        except ImportError as error:
            raise ImportError(MISSING_EXTRA) from error
        try:
            with request_file(self.dataset, self.num_bytes, self.hint) as response:
                is_written = self._write_response(response)
            if not is_written and not self.num_bytes:
                raise self.error(f"{self.dataset.url} returned only a part of the file")
            if not is_written:
                self.part.unlink()
                self.fetch_remainder()
        # urllib3's errors too: the body is read below requests, which would decompress a .tar.gz on the way.
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise self.broken(str(error)) from error

    def _write_response(self, response: "Response") -> bool:
        """Append the response to the part, or replace the part if the response is the whole file.

        Return whether the part is complete; False if the response fits neither way, so that it has to start over.
        """
        offset, reported_total = parse_content_range(response)
        total = self.dataset.size if reported_total is None else reported_total
        num_present = self.num_bytes
        if response.status_code == 416:
            return reported_total == num_present  # complete but not renamed, or else a part that is too long
        if offset is None or offset not in (0, num_present):
            return False
        self._check_headers(response, total)
        num_missing = 0 if total is None else total - offset
        num_free = shutil.disk_usage(self.part.parent).free + (num_present if offset == 0 else 0)
        if num_missing > num_free:
            raise self.full_disk(f"{num_missing} bytes are needed and {num_free} are free")
        chunks = response.raw.stream(_CHUNK_BYTES, decode_content=False)
        first = next(chunks, b"")
        if offset == 0 and looks_like_html(first):  # before the part is overwritten
            raise self.error(describe_html(self.dataset.url))
        with (
            self.part.open("ab" if offset else "wb") as file,
            show_progress(self.target.name, enabled=self.progress, num_bytes=total, initial=offset) as advance,
        ):
            for chunk in itertools.chain([first], chunks):
                file.write(chunk)
                advance(len(chunk))
        num_received = self.num_bytes
        if total is not None and num_received < total:  # older versions of urllib3 do not report it
            raise self.broken(f"received only {num_received} of {total} bytes")
        if total is not None and num_received > total:  # a remainder that does not belong to this part
            self.part.unlink()
            raise self.error(
                f"received {num_received} bytes instead of {total}. They were deleted; run again to start over"
            )
        return True

    def _check_headers(self, response: "Response", total: int | None) -> None:
        """Refuse a response that could not be verified once it is written."""
        dataset = self.dataset
        encoding = response.headers.get("Content-Encoding", "identity").lower()
        is_chunked = response.headers.get("Transfer-Encoding", "").lower() == "chunked"
        if total is not None and dataset.size is not None and total != dataset.size:
            raise self.error(
                f"wrong length: expected {dataset.size} bytes, but {dataset.url} offers {total}; "
                "the file may have been replaced"
            )
        if not dataset.has_checksum and total is None and not is_chunked:
            raise self.error(
                f"{dataset.url} does not report the length of the file, so a truncated copy would go unnoticed"
            )
        if not dataset.has_checksum and encoding != "identity":
            # Some servers claim an encoding for a .gz that they send unchanged; a checksum settles it.
            raise self.error(f"{dataset.url} sends the file encoded ({encoding}) and no checksum is known to verify it")

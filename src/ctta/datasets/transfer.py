"""Fetch one file: resumed where it broke off, verified, and under its final name only when whole.

pooch, the usual library for this, does not resume: it asks for no range and writes to a temporary file of a random name
that the next run cannot find. Over 20 GB (ImageNet-C) or a slow line that is what matters most, and what pooch would be
left with (a checksum and a rename) the standard library does.
"""

import itertools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ctta.datasets.catalog import Dataset
from ctta.datasets.errors import MISSING_EXTRA, NO_SPACE, DownloadError
from ctta.datasets.http import answer_from, begin_and_total, html_instead
from ctta.datasets.progress import progress_bar
from ctta.datasets.verification import looks_like_html, problem_with

if TYPE_CHECKING:
    from requests import Response

_CHUNK = 1 << 16


def fetch_file(source: Dataset, target: Path, *, progress: bool) -> None:
    """Make `target` from what the source's address gives; a part of it stays in ``<target>.part`` for the next run."""
    part = target.with_name(f"{target.name}.part")
    try:
        if source.size is None or _length(part) != source.size:
            _fetch_rest(source, part, target, progress)
        with part.open("rb+") as file:
            os.fsync(file.fileno())  # a power cut must not leave a hollow file under the final name
    except OSError as error:
        if error.errno in NO_SPACE:
            raise DownloadError(_no_space(part, target, str(error.strerror))) from error
        raise
    if problem := problem_with(part, source):
        part.unlink()
        raise DownloadError(
            f"{target.name}: {problem}. What came was deleted; run again to start over. {_by_hand(source, target)}"
        )
    os.replace(part, target)


def _fetch_rest(source: Dataset, part: Path, target: Path, progress: bool) -> None:
    try:
        import requests
        import urllib3
    except ImportError as error:
        raise ImportError(MISSING_EXTRA) from error
    try:
        with answer_from(source, _length(part), _by_hand(source, target)) as response:
            starts_over = not _continue_with(response, source, part, target, progress)
        if starts_over and not _length(part):
            raise DownloadError(
                f"{target.name}: {source.url} gave only a piece of the file. {_by_hand(source, target)}"
            )
        if starts_over:
            part.unlink()
            _fetch_rest(source, part, target, progress)
    # urllib3's errors too, because the body is read below requests, which would unpack a .tar.gz on the way.
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise DownloadError(_broken(source, part, target, str(error))) from error


def _continue_with(response: "Response", source: Dataset, part: Path, target: Path, progress: bool) -> bool:
    """Write the answer behind the part, or over it if it is the whole file; False if it fits neither way."""
    begin, told = begin_and_total(response)
    total = source.size if told is None else told
    have = _length(part)
    if response.status_code == 416:
        return told == have  # killed between the last byte and the rename, or a part that is too long
    if begin not in (0, have):
        return False
    _check_promises(response, source, total, target)
    remaining = 0 if total is None else total - begin
    if remaining > (free := shutil.disk_usage(part.parent).free + (have if begin == 0 else 0)):
        raise DownloadError(_no_space(part, target, f"{remaining} bytes are needed and {free} are free"))
    chunks = response.raw.stream(_CHUNK, decode_content=False)
    first = next(chunks, b"")
    if begin == 0 and looks_like_html(first):  # before the part is overwritten
        raise DownloadError(f"{target.name}: {html_instead(source.url)}. {_by_hand(source, target)}")
    with (
        part.open("ab" if begin else "wb") as file,
        progress_bar(target.name, wanted=progress, unit="B", total=total, done=begin) as advance,
    ):
        for chunk in itertools.chain([first], chunks):
            file.write(chunk)
            advance(len(chunk))
    came = _length(part)
    if total is not None and came < total:  # older versions of urllib3 do not tell
        raise DownloadError(_broken(source, part, target, f"only {came} of {total} bytes came"))
    if total is not None and came > total:  # a rest that does not fit to the part
        part.unlink()
        raise DownloadError(
            f"{target.name}: {came} bytes came instead of {total}. They were deleted; run again to start over. "
            f"{_by_hand(source, target)}"
        )
    return True


def _check_promises(response: "Response", source: Dataset, total: int | None, target: Path) -> None:
    """Refuse what could not be told from the whole file later on."""
    problem = None
    encoding = response.headers.get("Content-Encoding", "identity").lower()
    is_chunked = response.headers.get("Transfer-Encoding", "").lower() == "chunked"
    if total is not None and source.size is not None and total != source.size:
        problem = (
            f"wrong length: expected {source.size} bytes, and {source.url} offers {total}. "
            "Another file may have taken its place"
        )
    elif source.md5 is None and total is None and not is_chunked:
        problem = (
            f"{source.url} does not tell the file's length, so a file that broke off could not be told from a whole one"
        )
    elif source.md5 is None and encoding != "identity":
        # Some servers only say so of a .gz that they send as it is, which a checksum tells.
        problem = f"{source.url} sends it encoded ({encoding}), though asked not to, and no checksum could tell"
    if problem:
        raise DownloadError(f"{target.name}: {problem}. {_by_hand(source, target)}")


def _length(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _broken(source: Dataset, part: Path, target: Path, why: str) -> str:
    kept = f"{_length(part)} bytes are kept in {part}; run again to resume" if _length(part) else "run again"
    return f"{target.name}: the connection to {source.url} broke or failed ({why}). {kept}. {_by_hand(source, target)}"


def _no_space(part: Path, target: Path, why: str) -> str:
    return (
        f"{target.name}: no space in {part.parent}: {why}. {_length(part)} bytes are kept; "
        "free some space and run again to resume, or set CTTA_CACHE to a folder on a larger disk"
    )


def _by_hand(source: Dataset, target: Path) -> str:
    return f"To do it by hand, download {source.url} in a browser and put the file at {target}"

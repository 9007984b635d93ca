"""Whether a file is what it should be."""

import hashlib
from pathlib import Path

from ctta.datasets.catalog import Dataset

HTML_INSTEAD = "it is a web page (HTML), not the file"


def looks_like_html(first_bytes: bytes) -> bool:
    """Archives and checkpoints never start with a tag; pages and XML error messages always do."""
    return first_bytes.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<")


def problem_with(path: Path, source: Dataset) -> str | None:
    """What is wrong with a file, or None."""
    with path.open("rb") as file:
        if looks_like_html(file.read(1024)):
            return HTML_INSTEAD
        length = path.stat().st_size
        if length == 0:
            return "it is empty"
        if source.size is not None and length != source.size:
            return f"wrong length: expected {source.size} bytes, found {length}"
        if source.md5 is not None:
            file.seek(0)
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            if found != source.md5:
                return f"wrong checksum: expected md5 {source.md5}, found {found}"
    return None

"""Files that are complete or absent, also when the process is killed or the power fails."""

import errno
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ctta.errors import ConfigError

#: A full disk, and an exhausted quota as home folders on clusters have it.
NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


def parse_local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path, or raise ConfigError for a URL, which would become a folder of that name.

    >>> parse_local_path("streams")
    PosixPath('streams')
    >>> parse_local_path(Path("s3://bucket/streams"))
    Traceback (most recent call last):
    ctta.errors.ConfigError: expected a path, got the URL s3:/bucket/streams: mount the store as a folder
    """
    if re.match("[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):  # a Path has dropped the second slash
        raise ConfigError(f"expected a path, got the URL {path}: mount the store as a folder")
    return Path(path)


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, durable: bool = False, unique: bool = True) -> Iterator[Path]:
    """Give a temporary file to write to that replaces ``path`` if the block ends without an error.

    The temporary file lies beside ``path``, as ``.<name>.<id>.tmp``, and is removed after an error. A killed process
    leaves it behind. The final file gets the default permissions, whichever library wrote it.

    Args:
        path: File to create or replace; its directory must exist.
        durable: Whether to wait until the file and its name would survive a power failure.
        unique: Whether several writers may be active at once. If False, the temporary file has a fixed name,
            ``<name>.partial``, so that the next attempt overwrites what a killed process left behind.

    Yields:
        The temporary path.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp" if unique else f"{path.name}.partial")
    try:
        temporary.touch(exist_ok=not unique)
        default_mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(default_mode)
        if durable:
            fsync_file(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        fsync_directory(path.parent)


def fsync_file(path: str | os.PathLike[str]) -> None:
    """Wait until the content of a file would survive a power failure."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Wait until the names in a directory would survive a power failure, where directories can be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

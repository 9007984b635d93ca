"""File systems without space, for tests of what happens on a full disk."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILLER = "filler"
PAGE = 4096
AS_ROOT = [] if os.geteuid() == 0 else ["sudo", "--non-interactive"]


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[Path]:
    """Mount a file system of a given size on a new folder; only root may do that.

    It is unmounted lazily, as a tensor that was read from it may still be mapped.
    """
    path.mkdir()
    options = f"size={num_bytes},uid={os.geteuid()}"
    subprocess.run([*AS_ROOT, "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run([*AS_ROOT, "umount", "--lazy", str(path)], check=True)


def fill(disk: Path, num_free_pages: int = 0) -> None:
    """Fill a disk until only some pages are free."""
    with (disk / FILLER).open("wb", buffering=0) as file:
        try:
            while file.write(bytes(PAGE)):
                pass
        except OSError:
            file.truncate(file.tell() - num_free_pages * PAGE)


def make_space(disk: Path) -> None:
    """Undo :func:`fill`."""
    (disk / FILLER).unlink()

"""Disks that are really full: a small file system of its own, or a limit on the files that a process may write."""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

FILLER = "filler"
PAGE = 4096
AS_ROOT = [] if os.geteuid() == 0 else ["sudo", "--non-interactive"]


@contextmanager
def mounted_disk(path: Path, num_bytes: int) -> Iterator[Path]:
    """Mount a file system of a given size on a new folder; only root may do that.

    It is unmounted lazily, as a tensor that was read from it may still be mapped.
    """
    path.mkdir()
    subprocess.run(_mount_command(path, num_bytes), check=True)
    try:
        yield path
    finally:
        subprocess.run([*AS_ROOT, "umount", "--lazy", str(path)], check=True)


def _mount_command(path: Path, num_bytes: int) -> list[str]:
    options = f"size={num_bytes},uid={os.geteuid()}"
    return [*AS_ROOT, "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Mount a folder on itself, read-only, as a system does with a disk that has errors; only root may do that."""
    subprocess.run([*AS_ROOT, "mount", "--bind", str(path), str(path)], check=True)
    subprocess.run([*AS_ROOT, "mount", "-o", "remount,bind,ro", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run([*AS_ROOT, "umount", "--lazy", str(path)], check=True)


def can_mount(folder: Path) -> bool:
    """Return whether file systems can be mounted in a folder."""
    if not all(map(shutil.which, ["mount", *AS_ROOT[:1]])):
        return False
    with TemporaryDirectory(dir=folder) as path:
        if subprocess.run(_mount_command(Path(path), PAGE), capture_output=True, check=False).returncode:
            return False
        subprocess.run([*AS_ROOT, "umount", path], check=True)
    return True


def fill(disk: Path, num_free_pages: int = 0) -> None:
    """Fill a mounted disk until only some pages are free."""
    with (disk / FILLER).open("wb", buffering=0) as file:
        try:
            while file.write(bytes(PAGE)):
                pass
        except OSError:
            file.truncate(file.tell() - num_free_pages * PAGE)


def make_space(disk: Path) -> None:
    """Undo :func:`fill`."""
    (disk / FILLER).unlink()


class SmallDisk:
    """A folder that can be full for another process.

    Either it is a mounted disk, and writes fail with ENOSPC, or the kernel limits the size of the files that the
    process writes, and they fail with EFBIG.
    """

    def __init__(self, path: Path, *, is_mounted: bool) -> None:
        self.path, self.is_mounted = path, is_mounted

    def fill(self, process: subprocess.Popen[str]) -> None:
        """Leave no room for the files of a process."""
        if self.is_mounted:
            fill(self.path)
        else:
            self._limit(process, is_full=True)

    def free(self, process: subprocess.Popen[str]) -> None:
        """Make room again."""
        if self.is_mounted:
            make_space(self.path)
        elif process.poll() is None:
            self._limit(process, is_full=False)

    @staticmethod
    def _limit(process: subprocess.Popen[str], *, is_full: bool) -> None:
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0 if is_full else hard, hard))


@contextmanager
def small_disk(path: Path, *, is_mounted: bool | None = None, num_bytes: int = 4 << 20) -> Iterator[SmallDisk]:
    """Create a folder that can be full for another process; mounted, by default, wherever that is possible."""
    if can_mount(path.parent) if is_mounted is None else is_mounted:
        with mounted_disk(path, num_bytes):
            yield SmallDisk(path, is_mounted=True)
    else:
        path.mkdir()
        yield SmallDisk(path, is_mounted=False)

"""Disks that are really full: a small file system of its own, or a limit on what a process may write."""

import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILLER = "filler"


class SmallDisk:
    """A folder that can be filled, so that a process cannot write to it.

    If file systems may be mounted here, the folder is one in memory, and writes fail with ENOSPC once it is full.
    Otherwise the kernel limits the size of the files that the process writes, and its writes fail with EFBIG.
    """

    def __init__(self, path: Path, *, is_mounted: bool) -> None:
        self.path, self.is_mounted = path, is_mounted

    def fill(self, process: subprocess.Popen[str]) -> None:
        """Leave no room for the files of a process."""
        if not self.is_mounted:
            _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))
            return
        with (self.path / FILLER).open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError:
                    return

    def free(self, process: subprocess.Popen[str]) -> None:
        """Make room again."""
        if self.is_mounted:
            (self.path / FILLER).unlink()
        elif process.poll() is None:
            _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))


@contextmanager
def small_disk(path: Path, *, num_megabytes: int = 4) -> Iterator[SmallDisk]:
    """Create a small disk at a path."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_megabytes}m", "tmpfs", str(path)]
    is_mounted = bool(shutil.which("mount")) and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield SmallDisk(path, is_mounted=is_mounted)
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)

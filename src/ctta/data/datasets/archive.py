"""Unpack tar archives: completely or not at all, and never outside the target folder."""

import errno
import gzip
import os
import shutil
import tarfile
import zlib
from pathlib import Path, PureWindowsPath

from ctta.data.datasets.progress import show_progress
from ctta.errors import DownloadError

#: A full disk, and an exhausted quota as home folders on clusters have it.
NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


def unpack(archive: Path, folder: Path, *, progress: bool) -> None:
    """Unpack a tar archive into a new folder, without the single folder that may wrap all of its members.

    Args:
        archive: The archive; it is kept.
        folder: The folder to create. It appears only when everything is unpacked.
        progress: Whether to show the progress on standard error.

    Raises:
        DownloadError: The archive is damaged or has unsafe members, the disk is full, or this Python is too old.
    """
    if not hasattr(tarfile, "data_filter"):
        raise DownloadError(f"cannot unpack {archive} safely with this Python: use Python 3.11.4 or newer")
    # Next to the target, so that the last step is a rename; with a fixed name, so that what a killed run left behind
    # is replaced.
    temporary = folder.with_name(f".{folder.name}.unpacking")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _extract_members(archive, temporary, progress)
        os.replace(_skip_wrapper(temporary), folder)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        reason = str(error).partition("\n")[0].rstrip(":")  # tarfile lists every compression that it tried
        raise DownloadError(f"{archive} is damaged ({reason}): delete it and run again") from error
    except OSError as error:
        if error.errno in NO_SPACE_ERRNOS:
            raise DownloadError(
                f"no space left to unpack {archive} (kept) into {folder}: free some space and run again, "
                "or set CTTA_CACHE to a folder on a larger disk"
            ) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _extract_members(archive: Path, folder: Path, progress: bool) -> None:
    title, num_bytes, position = f"unpack {archive.name.removesuffix('.fetched')}", archive.stat().st_size, 0
    with (
        archive.open("rb") as file,
        tarfile.open(fileobj=file) as tar,
        show_progress(title, enabled=progress, num_bytes=num_bytes) as advance,
    ):
        for member in tar:
            if reason := _find_risk(member):
                raise DownloadError(
                    f"refusing to unpack {archive}: its member '{member.name}' {reason}, which the published archives "
                    "never do. Delete the file and download it from its authors"
                )
            tar.extract(member, folder, filter="data")
            advance(file.tell() - position)
            position = file.tell()


def _find_risk(member: tarfile.TarInfo) -> str | None:
    """Return why a member must not be extracted, or None.

    The data filter strips leading slashes and continues, but an archive that has them is not the published one. Links
    are not needed either, and the filters of several Python versions misjudge where they lead (CVE-2025-4517: through
    paths too long to resolve); without links, files are written where their names say.
    """
    if not (member.isreg() or member.isdir()):
        return "is a link, device or pipe"
    windows_path = PureWindowsPath(member.name)  # understands both kinds of slashes
    if member.name.startswith(("/", "\\")) or windows_path.drive or ".." in windows_path.parts:
        return "lies outside the folder"
    return None


def _skip_wrapper(folder: Path) -> Path:
    """Return the only folder within ``folder``, or ``folder`` itself if it contains anything else."""
    children = list(folder.iterdir())
    return children[0] if len(children) == 1 and children[0].is_dir() else folder

"""Unpack an archive, all of it or nothing, and never outside its folder."""

import errno
import gzip
import os
import posixpath
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath, PureWindowsPath

from ctta.data.errors import DownloadError
from ctta.data.progress import progress_bar


def unpack(archive: Path, folder: Path, *, progress: bool) -> None:
    """Make `folder` from a tar archive; a lone folder that wraps all of its content is left out."""
    if not hasattr(tarfile, "data_filter"):
        raise DownloadError(f"{archive} is not unpacked: doing so safely needs Python 3.11.4 or newer")
    # Beside the target, so that the last step is a rename; of a fixed name, so that what a killed run left is replaced.
    temporary = folder.with_name(f".{folder.name}.unpacking")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _unpack_into(temporary, archive, progress)
        os.replace(_without_wrapper(temporary), folder)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        reason = str(error).partition("\n")[0].rstrip(":")  # tarfile lists every compression that it is not
        raise DownloadError(f"{archive} is damaged ({reason}): delete it and run again") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DownloadError(
                f"no space left to unpack {archive} (kept) into {folder}: free some and run again, "
                "or set CTTA_CACHE to a folder on a larger disk"
            ) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unpack_into(folder: Path, archive: Path, progress: bool) -> None:
    with (
        tarfile.open(archive) as tar,
        progress_bar(f"unpack {archive.name}", wanted=progress, unit=" files") as advance,
    ):
        for member in tar:
            try:
                if reason := _reason_to_refuse(member):
                    raise DownloadError(_refusal(archive, member, reason))
                tar.extract(member, folder, filter="data")
            except tarfile.FilterError as error:
                raise DownloadError(_refusal(archive, member, str(error))) from error
            advance(1)


def _reason_to_refuse(member: tarfile.TarInfo) -> str | None:
    """The data filter strips leading slashes and goes on; an archive that has them is not the one we want."""
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return "is a device or pipe"
    if _leaves(member.name):
        return "lies outside the folder"
    if member.islnk() and _leaves(member.linkname):
        return f"links to {member.linkname}, outside the folder"
    if member.issym() and (_is_absolute(member.linkname) or _climbs(f"{member.name}/../{member.linkname}")):
        return f"links to {member.linkname}, outside the folder"
    return None


def _leaves(path: str) -> bool:
    return _is_absolute(path) or ".." in PurePosixPath(path.replace("\\", "/")).parts


def _is_absolute(path: str) -> bool:
    return path.startswith(("/", "\\")) or bool(PureWindowsPath(path).drive)


def _climbs(path: str) -> bool:
    return posixpath.normpath(path.replace("\\", "/")).split("/")[0] == ".."


def _refusal(archive: Path, member: tarfile.TarInfo, reason: str) -> str:
    return (
        f"{archive} is not unpacked: its member '{member.name}' {reason}. An honest archive has none such: "
        "delete this one and fetch it from its authors"
    )


def _without_wrapper(folder: Path) -> Path:
    content = list(folder.iterdir())
    is_wrapped = len(content) == 1 and content[0].is_dir() and not content[0].is_symlink()
    return content[0] if is_wrapped else folder

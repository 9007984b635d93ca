"""Unpack an archive, all of it or nothing, and never outside its folder."""

import gzip
import os
import shutil
import tarfile
import zlib
from pathlib import Path, PureWindowsPath

from ctta.datasets.errors import NO_SPACE, DownloadError
from ctta.datasets.progress import progress_bar


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
        if error.errno in NO_SPACE:
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
            if reason := _reason_to_refuse(member):
                raise DownloadError(
                    f"{archive} is not unpacked: its member '{member.name}' {reason}. An honest archive has none such: "
                    "delete this one and fetch it from its authors"
                )
            tar.extract(member, folder, filter="data")
            advance(1)


def _reason_to_refuse(member: tarfile.TarInfo) -> str | None:
    """The data filter strips leading slashes and goes on; an archive that has them is not the one we want.

    Nor are links needed. The filter of many a Python misjudges where they lead (CVE-2025-4517: through paths too long
    to resolve), and without any, files go where their names say.
    """
    if not (member.isreg() or member.isdir()):
        return "is a link, device or pipe"
    windows_path = PureWindowsPath(member.name)  # which knows both slashes
    if member.name.startswith(("/", "\\")) or windows_path.drive or ".." in windows_path.parts:
        return "lies outside the folder"
    return None


def _without_wrapper(folder: Path) -> Path:
    content = list(folder.iterdir())
    return content[0] if len(content) == 1 and content[0].is_dir() else folder

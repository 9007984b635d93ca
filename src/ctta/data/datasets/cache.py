"""The cache folder: where downloads are kept and unpacked, and how a name becomes a path."""

import gzip
import os
import shutil
import tarfile
import zlib
from pathlib import Path, PureWindowsPath

from ctta.data.datasets.catalog import DATASETS, Dataset
from ctta.data.datasets.transfer import MISSING_EXTRA, fetch_file, find_defect
from ctta.errors import ConfigError, DownloadError, did_you_mean
from ctta.io.atomic import NO_SPACE_ERRNOS
from ctta.io.progress import print_line, show_progress


def cache_dir() -> Path:
    """Return the cache folder: ``$CTTA_CACHE``, else ``$XDG_CACHE_HOME/ctta``, else ``~/.cache/ctta``."""
    if path := os.environ.get("CTTA_CACHE"):
        return Path(path).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ctta"


def download(
    name: str, *, cache: str | os.PathLike[str] | None = None, progress: bool = True, insecure: bool = False
) -> Path:
    """Return the path of a public dataset or checkpoint, downloading it on first use.

    Archives are unpacked and then deleted; checkpoints stay single files. Nothing is requested from the network for
    what is in the cache. An interrupted download resumes where it stopped. A file that you put into the cache folder
    yourself, as ``DATASETS[name].file``, is used instead of downloading, and is kept::

        folder = ctta.data.datasets.download("cifar10-c")
        images = numpy.load(folder / "gaussian_noise.npy", mmap_mode="r")

    Args:
        name: A key of ``ctta.data.datasets.DATASETS``, such as "cifar10-c", "imagenet-c/noise" or "wrn28-10-standard".
        cache: The cache folder; :func:`cache_dir` by default.
        progress: Whether to show the progress on standard error: a bar on a terminal, else a line at intervals.
        insecure: Whether to download a file of which no SHA-256 is known, so that nobody can tell whether it is the
            one that its authors published.

    Returns:
        The unpacked folder, or the file if it is not an archive.

    Raises:
        ConfigError: The name is unknown.
        DownloadError: The file cannot be downloaded, verified or unpacked; or no SHA-256 of it is known.
        ImportError: The extra ``data`` is not installed.
    """
    dataset, file, folder = _locate(name, cache)
    return _find_existing(dataset, file, folder, progress=progress) or _create(
        dataset, file, folder, progress, insecure
    )


def find(name: str, *, cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the path of what :func:`download` has downloaded before, without using the network.

    Args:
        name: A key of ``ctta.data.datasets.DATASETS``.
        cache: The cache folder; :func:`cache_dir` by default.

    Returns:
        The unpacked folder, or the file if it is not an archive.

    Raises:
        ConfigError: The name is unknown.
        DownloadError: It is not in the cache, or damaged.
    """
    dataset, file, folder = _locate(name, cache)
    if path := _find_existing(dataset, file, folder, progress=False):
        return path
    missing = folder if dataset.is_archive else file
    raise DownloadError(f"{_with_size(name)} is not in the cache ({missing} is missing); run: ctta data get {name}")


def suggest_download(folder: Path, name: str) -> str:
    """Return the advice for a folder of a public dataset that is missing or incomplete."""
    # What exists is not downloaded again; but a typo in a path must not suggest to delete an unrelated folder.
    delete = f"; if it is correct, delete {folder}" if folder.is_dir() else ""
    return f"check the path{delete} and run: ctta data get {_with_size(name)}"


def _with_size(name: str) -> str:
    """Return the name of a dataset with the size of its download, where known."""
    size = DATASETS[name].size_text
    return f"{name} ({size})" if size else name


def _locate(name: str, cache: str | os.PathLike[str] | None) -> tuple[Dataset, Path, Path]:
    """Return the catalog entry of a name, the path of its file and the path of its unpacked folder."""
    if name not in DATASETS:
        raise ConfigError(
            f"unknown dataset '{name}'{did_you_mean(name, DATASETS)}; expected one of {', '.join(DATASETS)}"
        )
    root = (Path(cache) if cache is not None else cache_dir()).expanduser().absolute()
    return DATASETS[name], root / DATASETS[name].file, root / name


def _find_existing(dataset: Dataset, file: Path, folder: Path, *, progress: bool) -> Path | None:
    if dataset.is_archive:
        return folder if folder.is_dir() else None
    return _verify(file, dataset, progress=progress) if file.is_file() else None


def _create(dataset: Dataset, file: Path, folder: Path, progress: bool, insecure: bool) -> Path:
    try:
        from filelock import FileLock, Timeout
    except ImportError as error:
        raise ImportError(MISSING_EXTRA) from error

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file.with_name(f"{file.name}.lock"))  # two processes must not append to one part
        try:
            held = lock.acquire(timeout=1)
        except Timeout:
            if progress:
                print_line(f"{file.name}: waiting for another process that is downloading it")
            held = lock.acquire()
    except OSError as error:
        raise DownloadError(
            f"cannot write to the cache folder {file.parent} ({error}): set CTTA_CACHE to a writable folder"
        ) from error
    with held:
        if dataset.is_archive and folder.is_dir():  # created by another process while this one waited
            return folder
        if file.is_file():  # put there by the user, who keeps it
            _verify(file, dataset, progress=progress)
            if dataset.is_archive:
                unpack(file, folder, progress=progress)
            return folder if dataset.is_archive else file
        if dataset.sha256 is None and not insecure:
            weaker = "only an MD5, which can be forged" if dataset.md5 else "no checksum at all"
            raise DownloadError(
                f"{file.name}: no SHA-256 is known ({weaker}), so a download cannot be verified. To accept what "
                f"{dataset.url} sends, add --insecure to the command or insecure=True to the call, or save a copy that "
                f"you trust as {file}"
            )
        if not dataset.is_archive:
            fetch_file(dataset, file, progress=progress)
            return file
        # A name that no user would choose: after a failed unpacking, the next run knows that it may delete the archive.
        fetched = file.with_name(f"{file.name}.fetched")
        if not fetched.is_file():
            fetch_file(dataset, file, progress=progress)
            os.replace(file, fetched)
        unpack(fetched, folder, progress=progress)
        fetched.unlink()
        return folder


def _verify(file: Path, dataset: Dataset, *, progress: bool) -> Path:
    """Return the file, or raise if it is not the expected one."""
    if defect := find_defect(file, dataset, progress=progress):
        raise DownloadError(
            f"{file} cannot be used: {defect}. Delete it and run again, or replace it with a copy from {dataset.url}"
        )
    return file


def unpack(archive: Path, folder: Path, *, progress: bool) -> None:
    """Unpack a tar archive into a new folder, without the single folder that may wrap all of its members.

    The folder appears only when everything is unpacked; the archive is kept. A damaged archive, an unsafe member or a
    full disk is a DownloadError.
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
        children = list(temporary.iterdir())
        os.replace(children[0] if len(children) == 1 and children[0].is_dir() else temporary, folder)
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

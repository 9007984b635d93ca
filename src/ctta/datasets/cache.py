"""The cache folder, and how a name becomes a path in it."""

import os
from pathlib import Path

from ctta.datasets.archive import unpack
from ctta.datasets.catalog import DATASETS, Dataset
from ctta.datasets.errors import MISSING_EXTRA, DownloadError
from ctta.datasets.transfer import fetch_file
from ctta.datasets.verification import problem_with


def cache_dir() -> Path:
    """Where files are kept: ``$CTTA_CACHE``, else ``$XDG_CACHE_HOME/ctta``, else ``~/.cache/ctta``."""
    if own := os.environ.get("CTTA_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ctta"


def download(name: str, *, cache: str | os.PathLike[str] | None = None, progress: bool = True) -> Path:
    """The path of a public dataset or checkpoint, fetched on first use.

    Archives are unpacked and then deleted; checkpoints stay one file. What is there already is returned without asking
    the network. A download that broke off goes on where it stopped. A file that you put into the cache folder by hand,
    under the name that ``DATASETS[name].file`` says, is used instead of downloading, and is kept. Whatever cannot
    be fetched, verified or unpacked is a :class:`DownloadError` that says what to do::

        folder = ctta.datasets.download("cifar10-c")
        images = numpy.load(folder / "gaussian_noise.npy", mmap_mode="r")

    Args:
        name: a key of ``ctta.datasets.DATASETS``, such as "cifar10-c", "imagenet-c/noise" or "wrn28-10-standard".
        cache: the folder to keep it in; by default :func:`cache_dir`.
        progress: show a bar, if a person is watching (standard error is a terminal).
    """
    source, file, folder = _places(name, cache)
    return _present(source, file, folder) or _make(source, file, folder, progress)


def find(name: str, *, cache: str | os.PathLike[str] | None = None) -> Path:
    """The path of what :func:`download` has fetched before; never asks the network.

    Args:
        name: a key of ``ctta.datasets.DATASETS``.
        cache: the folder it is kept in; by default :func:`cache_dir`.
    """
    source, file, folder = _places(name, cache)
    if path := _present(source, file, folder):
        return path
    place = folder if source.returns == "folder" else file
    raise DownloadError(f"{name} is not in the cache ({place} is missing); run: ctta data get {name}")


def _places(name: str, cache: str | os.PathLike[str] | None) -> tuple[Dataset, Path, Path]:
    """What a name stands for, its file and its folder."""
    if name not in DATASETS:
        raise ValueError(f"there is no dataset '{name}'; there are {', '.join(DATASETS)}")
    root = (Path(cache) if cache is not None else cache_dir()).expanduser().absolute()
    return DATASETS[name], root / DATASETS[name].file, root / name


def _present(source: Dataset, file: Path, folder: Path) -> Path | None:
    if source.returns == "folder":
        return folder if folder.is_dir() else None
    return _checked(file, source) if file.is_file() else None


def _make(source: Dataset, file: Path, folder: Path, progress: bool) -> Path:
    try:
        from filelock import FileLock
    except ImportError as error:
        raise ImportError(MISSING_EXTRA) from error

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file.with_name(f"{file.name}.lock")).acquire()  # two processes must not append to one part
    except OSError as error:
        raise DownloadError(
            f"cannot keep anything in {file.parent} ({error}): set CTTA_CACHE to a folder that you may write to"
        ) from error
    with lock:
        if source.returns == "folder" and folder.is_dir():  # made by another process while this one waited
            return folder
        if file.is_file():  # what a user put there is the user's, and stays
            _checked(file, source)
            if source.returns == "folder":
                unpack(file, folder, progress=progress)
        elif source.returns == "file":
            fetch_file(source, file, progress=progress)
        else:
            _fetch_and_unpack(source, file, folder, progress)
        return folder if source.returns == "folder" else file


def _fetch_and_unpack(source: Dataset, file: Path, folder: Path, progress: bool) -> None:
    """Under a name that no user gives, so that a run after a failed unpacking knows that it may delete the archive."""
    fetched = file.with_name(f"{file.name}.fetched")
    if not fetched.is_file():
        fetch_file(source, file, progress=progress)
        os.replace(file, fetched)
    unpack(fetched, folder, progress=progress)
    fetched.unlink()


def _checked(file: Path, source: Dataset) -> Path:
    if problem := problem_with(file, source):
        raise DownloadError(
            f"{file} cannot be used: {problem}. Delete it and run again, or put a good copy there from {source.url}"
        )
    return file

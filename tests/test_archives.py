"""Tests of unpacking: archives are unpacked completely or not at all, and never outside their folder."""

import errno
import random
import tarfile
from pathlib import Path

import pytest
from tar_archives import Member, archive, link, member

from ctta.data.datasets import DATASETS, Dataset, DownloadError, download

LONG_NAME = "d" * 247
TOP = "/".join(map(str, range(16))) + "/" + "l" * 250  # through one link per level


def deep(levels: int) -> str:
    return f"{LONG_NAME}/" * levels


def folder(name: str) -> Member:
    return member(name, b"", type=tarfile.DIRTYPE, mode=0o755)


#: Python's own filter has accepted some of these: realpath gives up on paths that are too long.
UNSAFE = {
    "parent": [member("../out")],
    "hidden parent": [member("a/../../out")],
    "absolute": [member("/tmp/ctta-out")],
    "drive letter": [member("C:\\out")],
    "symbolic link": [link("a/b", "../../out")],
    "absolute link": [link("a", "/etc/passwd")],
    "hard link": [link("a", "../out", tarfile.LNKTYPE)],
    "absolute hard link": [link("a", "/etc/passwd", tarfile.LNKTYPE)],
    "chain of links": [member("d/e/1"), link("d/up", "e/../.."), link("x", "d/up/../.."), member("x/out")],
    "links too deep to resolve": [
        *(step for level in range(16) for step in (folder(deep(level + 1)), link(f"{deep(level)}{level}", LONG_NAME))),
        link(TOP, "../" * 16),
        link("x", f"{TOP}/.."),
        member("x/out"),
    ],
    "link within": [link("a", "good.npy")],
    "hard link within": [link("a", "good.npy", tarfile.LNKTYPE)],
    "device": [member("null", b"", type=tarfile.CHRTYPE)],
    "pipe": [member("pipe", b"", type=tarfile.FIFOTYPE)],
}


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path where a user can put an archive; its address is unreachable, so nothing is downloaded."""
    monkeypatch.setenv("CTTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(DATASETS, "images/a", Dataset("http://127.0.0.1:1/", "images/a.tar"))
    (tmp_path / "cache" / "images").mkdir(parents=True)
    return tmp_path / "cache" / "images" / "a.tar"


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} - {"a.tar.lock"}


@pytest.mark.parametrize("compressed", [False, True])
def test_archive_provided_by_the_user_is_unpacked_and_kept(placed: Path, compressed: bool) -> None:
    placed.write_bytes(
        archive(member("fog/1.npy"), member("fog/2.npy", b"cold"), member("snow.npy"), compressed=compressed)
    )
    (placed.parent / ".a.unpacking" / "left by a killed run").mkdir(parents=True)
    folder = download("images/a")
    assert names_in(folder) == {"fog", "fog/1.npy", "fog/2.npy", "snow.npy"}
    assert (folder / "fog" / "2.npy").read_bytes() == b"cold"
    assert names_in(placed.parent) == {"a.tar", "a"} | {f"a/{name}" for name in names_in(folder)}


@pytest.mark.parametrize("members", UNSAFE.values(), ids=list(UNSAFE))
def test_unsafe_archive_is_refused(placed: Path, tmp_path: Path, members: list[Member]) -> None:
    placed.write_bytes(archive(member("good.npy"), *members))
    with pytest.raises(DownloadError, match="refusing to unpack"):
        download("images/a")
    assert names_in(tmp_path) == {"cache", "cache/images", "cache/images/a.tar", "cache/images/a.tar.lock"}
    assert not Path("/tmp/ctta-out").exists()


@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_archive(placed: Path, compressed: bool) -> None:
    whole = archive(member("a.npy", random.Random(0).randbytes(100_000)), compressed=compressed)
    for damaged in (whole[:50_000], b"damage" * 200, b"short"):
        placed.write_bytes(damaged)
        with pytest.raises(DownloadError, match="damaged"):
            download("images/a")
        assert names_in(placed.parent) == {"a.tar"}


def test_archive_provided_by_the_user_is_verified(placed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "images/a", Dataset("http://127.0.0.1:1/", "images/a.tar", md5="0" * 32))
    placed.write_bytes(archive(member("a.npy")))
    with pytest.raises(DownloadError, match="checksum"):
        download("images/a")
    assert names_in(placed.parent) == {"a.tar"}


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_to_unpack(placed: Path, monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    placed.write_bytes(archive(member("a.npy")))

    def full(*_: object, **__: object) -> None:
        raise OSError(reason, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "extract", full)
    with pytest.raises(DownloadError, match="CTTA_CACHE"):
        download("images/a")
    assert names_in(placed.parent) == {"a.tar"}

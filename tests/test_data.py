"""Downloads against a server on loopback: whole and verified, or a clear error and no file under its final name."""

import errno
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from archives import archive, member
from download_server import CONFIRMED, DownloadServer, serving

from ctta.datasets import DATASETS, Dataset, DownloadError, cache_dir, download

CONTENT = bytes(hashlib.shake_256(b"ctta").digest(400_000))
HALF = 200_000


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[DownloadServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(CONTENT) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CTTA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def weights(server: DownloadServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the dataset 'weights', a file with a checksum, is to arrive."""
    md5 = hashlib.md5(CONTENT).hexdigest()
    monkeypatch.setitem(DATASETS, "weights", Dataset(server.url, "weights.pt", md5, len(CONTENT), "file"))
    return cache / "weights.pt"


def change(monkeypatch: pytest.MonkeyPatch, **fields: object) -> None:
    monkeypatch.setitem(DATASETS, "weights", replace(DATASETS["weights"], **fields))


def part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def put_part(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    part_of(path).write_bytes(content)


def failure(path: Path, *words: str) -> str:
    """The message of the error that fetching the weights ends with; nothing may be left under the final name."""
    with pytest.raises(DownloadError) as caught:
        download("weights")
    assert not path.exists()
    message = str(caught.value)
    for word in ("weights.pt", *words):
        assert word in message
    return message


def test_a_file_arrives_whole_and_only_once(weights: Path, server: DownloadServer) -> None:
    assert download("weights") == weights
    assert weights.read_bytes() == CONTENT
    assert download("weights") == weights
    assert server.asked == [("/file", None)]
    assert not part_of(weights).exists()


def test_a_break_is_told_and_resumed_with_only_the_rest(weights: Path, server: DownloadServer) -> None:
    server.manner = "breaks off"
    failure(weights, "broke", "run again to resume", str(part_of(weights)))
    kept = part_of(weights).stat().st_size
    assert 0 < kept <= HALF
    server.manner = "well"
    assert download("weights").read_bytes() == CONTENT
    assert server.asked == [("/file", None), ("/file", f"bytes={kept}-")]


def test_a_killed_download_is_resumed(weights: Path, server: DownloadServer) -> None:
    server.manner = "stalls"
    script = (
        "from ctta.datasets import DATASETS, Dataset, download\n"
        f"DATASETS['weights'] = {DATASETS['weights']!r}\ndownload('weights')\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment)
    deadline = time.monotonic() + 60
    while not (part_of(weights).exists() and part_of(weights).stat().st_size > 100_000):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = part_of(weights).stat().st_size
    assert not weights.exists()
    server.manner = "well"
    assert download("weights").read_bytes() == CONTENT
    assert server.asked[-1] == ("/file", f"bytes={kept}-")


@pytest.mark.parametrize("manner", ["ignores ranges", "nonsense range", "another range"])
def test_a_server_without_ranges_makes_it_start_over(weights: Path, server: DownloadServer, manner: str) -> None:
    put_part(weights, CONTENT[:HALF])
    server.manner = manner
    assert download("weights").read_bytes() == CONTENT
    assert server.asked[0] == ("/file", f"bytes={HALF}-")


def test_a_part_that_is_complete_asks_for_nothing(weights: Path, server: DownloadServer) -> None:
    put_part(weights, CONTENT)
    assert download("weights").read_bytes() == CONTENT
    assert server.asked == []


@pytest.mark.parametrize(("part", "questions"), [(CONTENT, 1), (CONTENT + b"more", 2)], ids=["complete", "too long"])
def test_nothing_beyond_the_part(weights: Path, server: DownloadServer, monkeypatch, part, questions) -> None:
    change(monkeypatch, size=None)
    put_part(weights, part)
    assert download("weights").read_bytes() == CONTENT
    assert len(server.asked) == questions


def test_wrong_content_is_deleted(weights: Path, server: DownloadServer) -> None:
    server.content = CONTENT[::-1]
    found = hashlib.md5(server.content).hexdigest()
    failure(weights, "wrong checksum", DATASETS["weights"].md5 or "", found, "start over", server.url)
    assert not part_of(weights).exists()


def test_a_part_of_another_file_is_found_out(weights: Path, server: DownloadServer) -> None:
    put_part(weights, b"x" * HALF)
    failure(weights, "wrong checksum")
    assert download("weights").read_bytes() == CONTENT


def test_wrong_lengths(weights: Path, server: DownloadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.manner = "says too little"
    failure(weights, "wrong length", f"expected {len(CONTENT)}", f"offers {len(CONTENT) - 7}", server.url)
    change(monkeypatch, size=None)
    failure(weights, "wrong checksum")
    server.manner = "tells no length"
    assert download("weights").read_bytes() == CONTENT
    weights.unlink()
    change(monkeypatch, md5=None)
    failure(weights, "does not tell the file's length")
    server.manner, server.content = "well", b""
    failure(weights, "it is empty")


def test_bytes_are_kept_as_they_are_sent(weights: Path, server: DownloadServer) -> None:
    server.manner = "claims an encoding"
    assert download("weights").read_bytes() == CONTENT


def test_an_encoding_that_nobody_asked_for(weights: Path, server: DownloadServer, monkeypatch) -> None:
    """Compressed bytes are not the file, and without a checksum they would be taken for it."""
    server.manner = "compresses"
    failure(weights, "wrong length")
    change(monkeypatch, size=None)
    failure(weights, "wrong checksum")
    change(monkeypatch, md5=None)
    failure(weights, "encoded (gzip)", "by hand")
    assert not part_of(weights).exists()


def test_a_break_without_a_told_length_is_resumed_too(weights: Path, server: DownloadServer) -> None:
    server.manner = "tells no length and breaks off"
    failure(weights, f"only {HALF} of {len(CONTENT)} bytes came", "run again to resume")
    server.manner = "well"
    assert download("weights").read_bytes() == CONTENT
    assert server.asked[-1] == ("/file", f"bytes={HALF}-")


def test_a_rest_that_is_longer_than_it_may_be(weights: Path, server: DownloadServer, monkeypatch) -> None:
    change(monkeypatch, md5=None, size=None)
    put_part(weights, CONTENT[:HALF])
    server.manner = "gives too much"
    failure(weights, f"{len(CONTENT) + 4} bytes came instead of {len(CONTENT)}", "start over")
    assert not part_of(weights).exists()


@pytest.mark.parametrize("kept", [0, HALF])
def test_redirects_are_followed(weights: Path, server: DownloadServer, kept: int) -> None:
    put_part(weights, CONTENT[:kept])
    server.manner = "redirects"
    assert download("weights").read_bytes() == CONTENT
    assert server.asked[-1] == ("/elsewhere", f"bytes={kept}-" if kept else None)
    weights.unlink()
    server.manner = "redirects forever"
    failure(weights, "redirects", "by hand")


@pytest.mark.parametrize("manner", ["drive, over quota", "page without a type", "broken page"])
@pytest.mark.parametrize("asks", [True, False])
def test_a_page_is_never_saved(weights: Path, server: DownloadServer, monkeypatch, manner: str, asks: bool) -> None:
    change(monkeypatch, md5=None, size=None, asks_to_confirm=asks)
    put_part(weights, CONTENT[:HALF])
    server.manner = manner
    message = failure(weights, "HTML", "by hand", server.url, str(weights))
    assert ("Quota exceeded" in message) == (manner == "drive, over quota")
    assert "Nothing of it was saved" in message
    assert part_of(weights).read_bytes() == CONTENT[:HALF]


@pytest.mark.parametrize("kept", [0, HALF])
def test_google_drive_is_confirmed(weights: Path, server: DownloadServer, monkeypatch, kept: int) -> None:
    change(monkeypatch, md5=None, size=None, asks_to_confirm=True)
    if kept:
        put_part(weights, CONTENT[:kept])
    server.manner = "drive"
    assert download("weights").read_bytes() == CONTENT
    assert server.asked[-1] == (CONFIRMED, f"bytes={kept}-" if kept else None)


def test_only_a_host_that_asks_to_confirm_is_confirmed(weights: Path, server: DownloadServer) -> None:
    server.manner = "drive"
    failure(weights, "HTML", "Virus scan warning")
    assert server.asked == [("/file", None)]


@pytest.mark.parametrize(
    ("status", "words"), [(404, ": the link is dead"), (403, " instead of the file"), (503, ", so try again later")]
)
def test_refusals(weights: Path, server: DownloadServer, status: int, words: str) -> None:
    server.manner = status
    failure(weights, f"{status} ", words, server.url, str(weights))


@pytest.mark.parametrize("kept", [0, HALF])
def test_only_the_file_is_the_file(weights: Path, server: DownloadServer, monkeypatch, kept: int) -> None:
    """Gatekeepers answer 202 while they make up their mind."""
    change(monkeypatch, md5=None, size=None)
    put_part(weights, CONTENT[:kept])
    server.manner = "not ready"
    failure(weights, "answered 202", "instead of the file")
    assert part_of(weights).read_bytes() == CONTENT[:kept]


@pytest.mark.parametrize("kept", [0, HALF])
def test_a_server_that_only_gives_a_piece(weights: Path, server: DownloadServer, monkeypatch, kept: int) -> None:
    change(monkeypatch, md5=None, size=None)
    put_part(weights, CONTENT[:kept])
    server.manner = "only a piece"
    failure(weights, "gave only a piece")


def test_no_connection(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, url="http://127.0.0.1:1/file")
    failure(weights, "broke or failed", "run again", str(weights))


def test_silence_is_a_break(weights: Path, server: DownloadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctta.datasets.http.TIMEOUT", 0.2)
    server.manner = "stalls"
    failure(weights, "broke or failed", "timed out", "run again to resume")
    assert part_of(weights).stat().st_size > 0


def test_no_space(weights: Path, server: DownloadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    weights.parent.mkdir()
    part_of(weights).symlink_to("/dev/full")
    failure(weights, "no space", "No space left on device", "CTTA_CACHE")
    part_of(weights).unlink()
    usage = shutil.disk_usage(weights.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    failure(weights, "no space", f"{len(CONTENT)} bytes are needed and 1000 are free")


def test_a_quota_that_is_used_up(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As home folders on clusters have it; network disks tell only when the file is written out."""

    def refuse(_: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        failure(weights, "no space", "Disk quota exceeded", "CTTA_CACHE")
    assert download("weights").read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DownloadError, match=r"cannot keep anything in .*file/cache .*CTTA_CACHE"):
        download("weights", cache=tmp_path / "file" / "cache")


def test_a_file_put_there_by_hand(weights: Path, server: DownloadServer) -> None:
    weights.parent.mkdir()
    weights.write_bytes(CONTENT)
    assert download("weights") == weights
    for content, problem in [(b"<!DOCTYPE html><html>", "HTML"), (CONTENT[1:], "length"), (CONTENT[::-1], "checksum")]:
        weights.write_bytes(content)
        with pytest.raises(DownloadError, match=rf"weights\.pt cannot be used: .*{problem}.* Delete it"):
            download("weights")
        assert weights.read_bytes() == content, "a user's file was touched"
    assert server.asked == []


def test_two_at_once_fetch_once(weights: Path, server: DownloadServer) -> None:
    threads = [threading.Thread(target=download, args=("weights",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert weights.read_bytes() == CONTENT
    assert len(server.asked) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
@pytest.mark.parametrize("progress", [True, False])
def test_the_bar_is_for_terminals(weights: Path, monkeypatch: pytest.MonkeyPatch, stream, progress: bool) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    download("weights", progress=progress)
    assert ("weights.pt: 100%" in sys.stderr.getvalue()) == (progress and stream is Terminal)


@pytest.mark.parametrize("wrapper", ["", "CIFAR-10-C/"])
def test_an_archive_becomes_a_folder(server: DownloadServer, cache: Path, monkeypatch, wrapper: str) -> None:
    server.content = archive(member(f"{wrapper}fog/1.npy"), member(f"{wrapper}snow.npy"))
    monkeypatch.setitem(DATASETS, "images/a", Dataset(server.url, "images/a.tar"))
    folder = download("images/a")
    assert folder == cache / "images" / "a"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == {"fog", "fog/1.npy", "snow.npy"}
    assert not (cache / "images" / "a.tar").exists(), "an unpacked archive takes its space twice"
    assert download("images/a") == folder
    assert len(server.asked) == 1


@pytest.mark.parametrize("reason", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_fetched_archive_survives_a_failed_unpacking(
    server: DownloadServer, cache: Path, monkeypatch, reason
) -> None:
    """It is not fetched again, and it is deleted in the end, since nobody put it there by hand."""
    server.content = archive(member("a.npy"), member("b.npy"))
    monkeypatch.setitem(DATASETS, "images", Dataset(server.url, "images.tar"))

    def fail(*_: object, **__: object) -> None:
        raise reason

    with monkeypatch.context() as patched:
        patched.setattr(tarfile.TarFile, "extract", fail)
        with pytest.raises((DownloadError, KeyboardInterrupt)):
            download("images")
    assert not (cache / "images").exists()
    assert {path.name for path in download("images").iterdir()} == {"a.npy", "b.npy"}
    assert len(server.asked) == 1
    assert {path.name for path in cache.iterdir()} == {"images", "images.tar.lock"}


def test_where_the_cache_is(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == weights.parent
    assert download("weights", cache=tmp_path / "other") == tmp_path / "other" / "weights.pt"
    monkeypatch.delenv("CTTA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "ctta"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "ctta"

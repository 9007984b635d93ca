"""The catalog of downloads, and downloads from a local server: a complete, verified file or an error and no file."""

import errno
import hashlib
import io
import os
import re
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
from typing import Any

import pytest
from download_server import CONFIRMED, DownloadServer, serving
from tar_archives import archive, member

from ctta.data.datasets import DATASETS, Dataset, cache_dir, download
from ctta.errors import ConfigError, DownloadError

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
    """Return the path where the dataset 'weights', a file with a checksum, is downloaded to."""
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    dataset = Dataset(server.url, "weights.pt", sha256, size=len(CONTENT), is_archive=False)
    monkeypatch.setitem(DATASETS, "weights", dataset)
    return cache / "weights.pt"


def change(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    monkeypatch.setitem(DATASETS, "weights", replace(DATASETS["weights"], **fields))


def part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def put_part(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    part_of(path).write_bytes(content)


def failure(path: Path, *words: str) -> str:
    """Download the weights and return the error message, checking that no file has the final name."""
    with pytest.raises(DownloadError) as caught:
        download("weights", insecure=True)
    assert not path.exists()
    message = str(caught.value)
    for word in ("weights.pt", *words):
        assert word in message
    return message


def test_file_is_downloaded_once(weights: Path, server: DownloadServer) -> None:
    assert download("weights") == weights
    assert weights.read_bytes() == CONTENT
    assert download("weights") == weights
    assert server.requests == [("/file", None)]
    assert not part_of(weights).exists()


def test_interrupted_download_is_reported_and_resumed(weights: Path, server: DownloadServer) -> None:
    server.behavior = "disconnects"
    failure(weights, "failed", "run again to resume", str(part_of(weights)))
    kept = part_of(weights).stat().st_size
    assert 0 < kept <= HALF
    server.behavior = "normal"
    assert download("weights").read_bytes() == CONTENT
    assert server.requests == [("/file", None), ("/file", f"bytes={kept}-")]


def test_killed_download_is_resumed(weights: Path, server: DownloadServer) -> None:
    server.behavior = "stalls"
    script = (
        "from ctta.data.datasets import DATASETS, Dataset, download\n"
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
    server.behavior = "normal"
    assert download("weights").read_bytes() == CONTENT
    assert server.requests[-1] == ("/file", f"bytes={kept}-")


@pytest.mark.parametrize("behavior", ["ignores ranges", "malformed range", "wrong range"])
def test_server_without_ranges_restarts_the_download(weights: Path, server: DownloadServer, behavior: str) -> None:
    put_part(weights, CONTENT[:HALF])
    server.behavior = behavior
    assert download("weights").read_bytes() == CONTENT
    assert server.requests[0] == ("/file", f"bytes={HALF}-")


def test_complete_part_sends_no_request(weights: Path, server: DownloadServer) -> None:
    put_part(weights, CONTENT)
    assert download("weights").read_bytes() == CONTENT
    assert server.requests == []


@pytest.mark.parametrize(("part", "num_requests"), [(CONTENT, 1), (CONTENT + b"more", 2)], ids=["complete", "too long"])
def test_range_beyond_the_end(
    weights: Path, server: DownloadServer, monkeypatch: pytest.MonkeyPatch, part: bytes, num_requests: int
) -> None:
    change(monkeypatch, size=None)
    put_part(weights, part)
    assert download("weights").read_bytes() == CONTENT
    assert len(server.requests) == num_requests


def test_wrong_content_is_deleted(weights: Path, server: DownloadServer) -> None:
    server.content = CONTENT[::-1]
    found = hashlib.sha256(server.content).hexdigest()
    failure(weights, "wrong checksum", DATASETS["weights"].sha256 or "", found, "start over", server.url)
    assert not part_of(weights).exists()


def test_part_of_another_file_is_detected(weights: Path, server: DownloadServer) -> None:
    put_part(weights, b"x" * HALF)
    failure(weights, "wrong checksum")
    assert download("weights").read_bytes() == CONTENT


def test_wrong_lengths(weights: Path, server: DownloadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.behavior = "understated length"
    failure(weights, "wrong length", f"expected {len(CONTENT)}", f"offers {len(CONTENT) - 7}", server.url)
    change(monkeypatch, size=None)
    failure(weights, "wrong checksum")
    server.behavior = "no length"
    assert download("weights").read_bytes() == CONTENT
    weights.unlink()
    change(monkeypatch, sha256=None)
    failure(weights, "does not report the length")
    server.behavior, server.content = "normal", b""
    failure(weights, "it is empty")


def test_bytes_are_stored_as_sent(weights: Path, server: DownloadServer) -> None:
    server.behavior = "claimed encoding"
    assert download("weights").read_bytes() == CONTENT


def test_unrequested_encoding(weights: Path, server: DownloadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed bytes are not the file, and without a checksum they would be mistaken for it."""
    server.behavior = "compressed"
    failure(weights, "wrong length")
    change(monkeypatch, size=None)
    failure(weights, "wrong checksum")
    change(monkeypatch, sha256=None)
    failure(weights, "encoded (gzip)", "manually")
    assert not part_of(weights).exists()


def test_interruption_without_content_length_is_resumed(weights: Path, server: DownloadServer) -> None:
    server.behavior = "no length, disconnects"
    failure(weights, f"received only {HALF} of {len(CONTENT)} bytes", "run again to resume")
    server.behavior = "normal"
    assert download("weights").read_bytes() == CONTENT
    assert server.requests[-1] == ("/file", f"bytes={HALF}-")


def test_remainder_that_is_too_long(weights: Path, server: DownloadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, sha256=None, size=None)
    put_part(weights, CONTENT[:HALF])
    server.behavior = "too long"
    failure(weights, f"received {len(CONTENT) + 4} bytes instead of {len(CONTENT)}", "start over")
    assert not part_of(weights).exists()


@pytest.mark.parametrize("kept", [0, HALF])
def test_redirects_are_followed(weights: Path, server: DownloadServer, kept: int) -> None:
    put_part(weights, CONTENT[:kept])
    server.behavior = "redirects"
    assert download("weights").read_bytes() == CONTENT
    assert server.requests[-1] == ("/elsewhere", f"bytes={kept}-" if kept else None)
    weights.unlink()
    server.behavior = "endless redirects"
    failure(weights, "redirects", "manually")


@pytest.mark.parametrize("behavior", ["drive over quota", "page without a type", "broken page"])
@pytest.mark.parametrize("needs_confirmation", [True, False])
def test_web_page_is_never_saved(
    weights: Path,
    server: DownloadServer,
    monkeypatch: pytest.MonkeyPatch,
    behavior: str,
    needs_confirmation: bool,
) -> None:
    change(monkeypatch, sha256=None, size=None, needs_confirmation=needs_confirmation)
    put_part(weights, CONTENT[:HALF])
    server.behavior = behavior
    message = failure(weights, "HTML", "manually", server.url, str(weights))
    assert ("Quota exceeded" in message) == (behavior == "drive over quota")
    assert "nothing was saved" in message
    assert part_of(weights).read_bytes() == CONTENT[:HALF]


@pytest.mark.parametrize("kept", [0, HALF])
def test_google_drive_is_confirmed(
    weights: Path, server: DownloadServer, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    change(monkeypatch, sha256=None, size=None, needs_confirmation=True)
    if kept:
        put_part(weights, CONTENT[:kept])
    server.behavior = "confirmation page"
    assert download("weights", insecure=True).read_bytes() == CONTENT
    assert server.requests[-1] == (CONFIRMED, f"bytes={kept}-" if kept else None)


def test_confirmation_is_sent_only_where_expected(weights: Path, server: DownloadServer) -> None:
    server.behavior = "confirmation page"
    failure(weights, "HTML", "Virus scan warning")
    assert server.requests == [("/file", None)]


@pytest.mark.parametrize(
    ("status", "words"), [(404, ": the link is dead"), (403, " instead of the file"), (503, ", try again later")]
)
def test_error_status(weights: Path, server: DownloadServer, status: int, words: str) -> None:
    server.behavior = status
    failure(weights, f"{status} ", words, server.url, str(weights))


@pytest.mark.parametrize("kept", [0, HALF])
def test_response_202_is_not_the_file(
    weights: Path, server: DownloadServer, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    change(monkeypatch, sha256=None, size=None)
    put_part(weights, CONTENT[:kept])
    server.behavior = "not ready"
    failure(weights, "returned 202", "instead of the file")
    assert part_of(weights).read_bytes() == CONTENT[:kept]


@pytest.mark.parametrize("kept", [0, HALF])
def test_server_that_returns_only_a_part(
    weights: Path, server: DownloadServer, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    change(monkeypatch, sha256=None, size=None)
    put_part(weights, CONTENT[:kept])
    server.behavior = "partial only"
    failure(weights, "returned only a part")


def test_no_connection(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, url="http://127.0.0.1:1/file")
    failure(weights, "connection to http://127.0.0.1:1/file failed", "Run again", str(weights))


def test_timeout_is_an_interruption(weights: Path, server: DownloadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctta.data.datasets.transfer.TIMEOUT", 0.2)
    server.behavior = "stalls"
    failure(weights, "failed", "timed out", "run again to resume")
    assert part_of(weights).stat().st_size > 0


def test_no_space(weights: Path, server: DownloadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    weights.parent.mkdir()
    part_of(weights).symlink_to("/dev/full")
    failure(weights, "no space", "No space left on device", "CTTA_CACHE")
    part_of(weights).unlink()
    usage = shutil.disk_usage(weights.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    failure(weights, "no space", f"{len(CONTENT)} bytes are needed and 1000 are free")


def test_exhausted_quota(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Home folders on clusters have quotas; network disks report them only when the file is flushed."""

    def refuse(_: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        failure(weights, "no space", "Disk quota exceeded", "CTTA_CACHE")
    assert download("weights").read_bytes() == CONTENT


def test_cache_folder_that_cannot_be_written(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DownloadError, match="CTTA_CACHE"):
        download("weights", cache=tmp_path / "file" / "cache")


def test_file_provided_by_the_user(weights: Path, server: DownloadServer) -> None:
    weights.parent.mkdir()
    weights.write_bytes(CONTENT)
    assert download("weights") == weights
    for content, problem in [(b"<!DOCTYPE html><html>", "HTML"), (CONTENT[1:], "length"), (CONTENT[::-1], "checksum")]:
        weights.write_bytes(content)
        with pytest.raises(DownloadError, match=problem):
            download("weights")
        assert weights.read_bytes() == content, "the file of a user was changed"
    assert server.requests == []


def test_concurrent_calls_download_once(weights: Path, server: DownloadServer) -> None:
    threads = [threading.Thread(target=download, args=("weights",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert weights.read_bytes() == CONTENT
    assert len(server.requests) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
@pytest.mark.parametrize("progress", [True, False])
def test_progress_bar_needs_a_terminal(
    weights: Path, monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], progress: bool
) -> None:
    stderr = stream()
    monkeypatch.setattr(sys, "stderr", stderr)
    download("weights", progress=progress)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stderr.getvalue())  # without colors and cursor movements
    assert ("weights.pt: 100%" in shown) == (progress and stream is Terminal)
    assert shown == "" or stream is Terminal


def test_progress_is_printed_in_lines_without_a_terminal(
    server: DownloadServer, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Downloading, verifying and unpacking each say how far they are; a line is due with every chunk here."""
    monkeypatch.setattr("ctta.io.progress.SECONDS_BEFORE_FIRST_LINE", 0.0)
    monkeypatch.setattr("ctta.io.progress.SECONDS_BETWEEN_LINES", 0.0)
    server.content = archive(member("fog.npy", bytes(3_000_000)), member("snow.npy", bytes(1_000_000)))
    sha256 = hashlib.sha256(server.content).hexdigest()
    monkeypatch.setitem(DATASETS, "images/a", Dataset(server.url, "a.tar", sha256, size=len(server.content)))
    download("images/a", progress=False)
    shutil.rmtree(cache / "images")
    assert capsys.readouterr().err == ""
    download("images/a")
    lines = capsys.readouterr().err.splitlines()
    for title in ("a.tar", "verify a.tar", "unpack a.tar"):
        about = [line for line in lines if line.startswith(f"{title}: ")]
        assert len(about) > 2 and re.fullmatch(rf"{title}: 0 kB of 4 MB \(0 %\) after 0:00:00", about[0])
        assert re.fullmatch(rf"{title}: 4 MB of 4 MB \((99|100) %\) after .*", about[-1]), about
    assert any("left" in line for line in lines)


@pytest.mark.parametrize("wrapper", ["", "CIFAR-10-C/"])
def test_archive_becomes_a_folder(
    server: DownloadServer, cache: Path, monkeypatch: pytest.MonkeyPatch, wrapper: str
) -> None:
    server.content = archive(member(f"{wrapper}fog/1.npy"), member(f"{wrapper}snow.npy"))
    monkeypatch.setitem(DATASETS, "images/a", Dataset(server.url, "images/a.tar"))
    folder = download("images/a", insecure=True)
    assert folder == cache / "images" / "a"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == {"fog", "fog/1.npy", "snow.npy"}
    assert not (cache / "images" / "a.tar").exists(), "an archive and its content need twice the space"
    assert download("images/a") == folder
    assert len(server.requests) == 1


@pytest.mark.parametrize("reason", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_downloaded_archive_survives_failed_unpacking(
    server: DownloadServer, cache: Path, monkeypatch: pytest.MonkeyPatch, reason: BaseException
) -> None:
    """It is not downloaded again, and it is deleted in the end, since no user put it there."""
    server.content = archive(member("a.npy"), member("b.npy"))
    monkeypatch.setitem(DATASETS, "images", Dataset(server.url, "images.tar"))

    def fail(*_: object, **__: object) -> None:
        raise reason

    with monkeypatch.context() as patched:
        patched.setattr(tarfile.TarFile, "extract", fail)
        with pytest.raises((DownloadError, KeyboardInterrupt)):
            download("images", insecure=True)
    assert not (cache / "images").exists()
    assert {path.name for path in download("images", insecure=True).iterdir()} == {"a.npy", "b.npy"}
    assert len(server.requests) == 1
    assert {path.name for path in cache.iterdir()} == {"images", "images.tar.lock"}


def test_location_of_the_cache(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == weights.parent
    assert download("weights", cache=tmp_path / "other") == tmp_path / "other" / "weights.pt"
    monkeypatch.delenv("CTTA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "ctta"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "ctta"


#: As published by the hosts of the files.
PUBLISHED_MD5 = {
    "cifar10-c": "56bf5dcef84df0e2308c6dcbcbbd8499",
    "cifar100-c": "11f0ed0f1191edbf9fa23466ae6021d3",
    "imagenet-c/noise": "e80562d7f6c3f8834afb1ecf27252745",
    "imagenet-c/blur": "2d8e81fdd8e07fef67b9334fa635e45c",
    "imagenet-c/weather": "33ffea4db4d93fe4a428c40a6ce0c25d",
    "imagenet-c/digital": "89157860d7b10d5797849337ca2e5c03",
    "imagenet-c/extra": "d492dfba5fc162d8ec2c3cd8ee672984",
    "cifar10": "c58f30108f718f92721af3b95e74349a",
    "cifar100": "eb9058c3a382ffc7106e4002c42a8d85",
}


#: As TensorFlow Datasets and Keras have them.
KNOWN_SHA256 = {
    "cifar10-c": "c72763e101c723b7c507b96205f7e938912a5d587376173b825850cf3cb876a7",
    "cifar10": "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    "cifar100": "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
}


def test_entries() -> None:
    parts = [f"imagenet-c/{part}" for part in ("noise", "blur", "weather", "digital", "extra")]
    checkpoints = ["wrn28-10-standard", "resnext29-augmix"]
    assert list(DATASETS) == ["cifar10-c", "cifar100-c", *parts, "cifar10", "cifar100", *checkpoints]
    assert (
        len({dataset.file for dataset in DATASETS.values()})
        == len({dataset.url for dataset in DATASETS.values()})
        == 11
    )
    assert {name: dataset.md5 for name, dataset in DATASETS.items() if dataset.md5} == PUBLISHED_MD5
    assert {name: dataset.sha256 for name, dataset in DATASETS.items() if dataset.sha256} == KNOWN_SHA256
    for name, dataset in DATASETS.items():
        assert dataset.url.startswith("https://")
        assert (dataset.md5 is None) == (not dataset.is_archive) == (name in checkpoints)
        assert dataset.md5 is None or re.fullmatch("[0-9a-f]{32}", dataset.md5)
    with pytest.raises(ConfigError, match="did you mean 'cifar10'"):
        download("cifar-10")


def test_what_cannot_be_verified_is_not_requested(tmp_path: Path) -> None:
    for name, dataset in DATASETS.items():
        if dataset.sha256 is None:
            with pytest.raises(DownloadError):
                download(name, cache=tmp_path)


def test_import_needs_neither_network_nor_extra(tmp_path: Path) -> None:
    script = """if True:
        import sys
        def refuse(event, _):
            assert not event.startswith(("socket.connect", "socket.getaddrinfo")), event
        sys.addaudithook(refuse)
        sys.modules["requests"] = sys.modules["rich"] = None
        import ctta.data.datasets
        try:
            ctta.data.datasets.download("cifar10-c")
        except ImportError as error:
            sys.exit(0 if "pip install 'ctta[data]'" in str(error) else 1)
        sys.exit(2)"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CTTA_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)

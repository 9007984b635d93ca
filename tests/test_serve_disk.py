"""Disks that are full, and files that cannot be opened, for a while: the service keeps serving, and recovers."""

import asyncio
import errno
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from serving import TIMEOUT, Client, ServerProcess, infer_request, make_images, make_png, make_tent, serve_in_thread
from small_disk import read_only, small_disk

from ctta.errors import ConfigError
from ctta.serve import Limits, Service
from ctta.serve.audit import AuditLog

OPTIONS = ("--method", "tent", "--no-guard", "--window", 0, "--workers", 1)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def metric(client: Client, name: str) -> float:
    lines = client.call("GET", "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def is_ready(client: Client) -> bool:
    return client.call("GET", "/v2/health/ready").status_code == 200


def num_updates(client: Client) -> int:
    return int(client.json("GET", "/streams/a")["updates"])


@pytest.mark.parametrize("is_mounted", [True, pytest.param(False, marks=pytest.mark.long)], ids=["full", "limited"])
def test_a_full_disk_loses_nothing_once_there_is_room_again(tmp_path: Path, is_mounted: bool) -> None:
    with small_disk(tmp_path / "disk", is_mounted=is_mounted) as disk:
        options = (*OPTIONS, "--snapshot-every", 0.2, "--unready-after", 0.8)
        server = ServerProcess(disk.path / "state", *options)
        with server as client:
            for step in range(3):
                client.infer("a", make_images(4, step))
            wait_until(lambda: metric(client, "ctta_unsaved_seconds ") == 0)
            disk.fill(server.process)
            for step in range(3, 9):
                client.infer("a", make_images(4, step))
            wait_until(lambda: not is_ready(client))
            response = client.call("GET", "/v2/health/ready")
            assert (
                response.status_code == 503 and response.headers["Retry-After"] and "saved" in response.json()["error"]
            )
            assert client.call("GET", "/v2/models/ctta/ready").status_code == 503
            assert client.call("GET", "/v2/health/live").status_code == 200
            assert metric(client, "ctta_snapshot_failures_total ") >= 2
            assert metric(client, "ctta_unsaved_seconds ") > 0.8
            disk.free(server.process)
            wait_until(lambda: is_ready(client))
            wait_until(lambda: metric(client, "ctta_unsaved_seconds ") == 0)
            assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        with server as client:
            assert num_updates(client) == 9
            disk.fill(server.process)
            client.infer("a", make_images(4, 9))
            assert server.stop(signal.SIGTERM) == 1  # the final save was attempted, and failed
            disk.free(server.process)
        with server as client:
            assert num_updates(client) == 9
            client.infer("a", make_images(4, 9))
            assert server.stop(signal.SIGTERM) == 0
        assert len(list((disk.path / "state/streams/a").iterdir())) == 1


def test_requests_on_a_full_disk(tmp_path: Path) -> None:
    """Only what needs the disk fails, with 503, until there is room again; the audit log has whole lines."""
    with small_disk(tmp_path / "disk") as disk:
        temporary = disk.path / "tmp"
        temporary.mkdir()
        options = (*OPTIONS, "--live-streams", 2, "--snapshot-every", 3600)
        server = ServerProcess(disk.path / "state", *options, environment={**os.environ, "TMPDIR": str(temporary)})
        with server as client:
            state = b""
            for name in ("a", "b"):
                client.infer(name, make_images(4))
                state = client.state(name)
            disk.fill(server.process)
            assert client.infer("a", make_images(4, 1))["update"] == 2
            for method, path, body in (
                ("POST", "/streams/c/image", make_png()),  # another stream has to make room
                ("GET", "/streams/a/state", None),
                ("PUT", "/streams/a/state", state),
            ):
                response = client.call(method, path, data=body)
                assert response.status_code == 503 and response.headers["Retry-After"], response.text
                assert str(disk.path) not in response.text
            assert client.call("GET", "/streams/c").status_code == 404
            assert metric(client, 'ctta_failures_total{cause="disk"}') == 3
            num_resets = 0
            while metric(client, "ctta_audit_failures_total ") < 20:  # the last block of the file had room for some
                assert client.call("POST", "/streams/b/reset").status_code == 200
                num_resets += 1
            disk.free(server.process)
            assert client.infer("a", make_images(4, 2))["update"] == 3
            assert client.infer("c", make_images(4))["update"] == 1
            assert client.call("POST", "/streams/c/reset").status_code == 200
            num_failures = int(metric(client, "ctta_audit_failures_total "))
        assert server.process.returncode == 0
        events = [json.loads(line) for line in (disk.path / "state/audit.jsonl").read_text().splitlines()]
        assert sum(event["kind"] == "reset" for event in events) == num_resets + 1 - num_failures
        assert events[-1]["stream"] == "c" and events[-1]["kind"] == "reset"


@contextmanager
def few_files(number: int) -> Iterator[None]:
    """Let this process open so many files more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        limit = max(stack.enter_context(open(os.devnull, "rb")).fileno() for _ in range(number + 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_file_that_cannot_be_opened_is_not_damaged(tmp_path: Path) -> None:
    """Whichever of the files that are open at once while a stream is read or saved is one too many."""
    service = Service(make_tent(tmp_path), tmp_path / "state")
    snapshots = service.factory.snapshots
    snapshots.write(service.factory.create("a"))
    stream = service.factory.read("a")
    works: list[Callable[[], object]] = [
        lambda: service.factory.read("a"),
        lambda: snapshots.read_summary("a"),
        lambda: snapshots.write(stream),
    ]
    for work in works:
        for number in range(8):
            try:
                with few_files(number):
                    work()
                break
            except OSError as error:
                assert error.errno == errno.EMFILE
        assert number in range(1, 7)
    assert service.factory.read("a").num_updates == 0
    service.release()


def test_connections_that_use_up_all_files_cost_no_stream_and_shut_out_no_request(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of 128 files that the process may open; all but two of the streams are read from the disk again and again."""
    names = [f"s{number}" for number in range(6)]
    server = ServerProcess(tmp_path / "state", *OPTIONS, "--live-streams", 2, num_files=128)
    with server as client, ExitStack() as stack:
        address = ("127.0.0.1", int(client.address.rpartition(":")[2]))
        for name in names:
            client.infer(name, make_images(4))
        known = stack.enter_context(closing(HTTPConnection(*address, timeout=TIMEOUT)))
        for update in (2, 3):
            known.request("GET", "/v2/health/live")  # a connection that is kept, as the others have sent nothing
            assert json.loads(known.getresponse().read())["live"]
            server.process.send_signal(signal.SIGSTOP)  # so that all arrive at once
            for _ in range(150):
                silent = stack.enter_context(socket.create_connection(address, timeout=TIMEOUT))
                silent.sendall(b"POST /streams/")
            server.process.send_signal(signal.SIGCONT)
            for name in names:
                fresh = Client(client.address)
                assert fresh.infer(name, make_images(4, update))["update"] == update
                fresh.session.close()
        assert metric(client, 'ctta_events_total{kind="damaged"}') == 0
        assert server.stop(signal.SIGTERM) == 0
    assert not list((tmp_path / "state/streams").glob(".damaged*")) and "out of system" not in capfd.readouterr().err
    with server as client:
        assert [client.json("GET", f"/streams/{name}")["updates"] for name in names] == [3] * len(names)


def test_more_requests_than_connections_get_a_503(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "state", *OPTIONS, num_files=72)  # 18 connections, beside 64 other files at most
    with server as client, ExitStack() as stack:
        address = ("127.0.0.1", int(client.address.rpartition(":")[2]))
        head = b"POST /streams/a/image HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
        for _ in range(18):  # none of them is idle
            busy = stack.enter_context(socket.create_connection(address, timeout=TIMEOUT))
            busy.sendall(head)
            assert busy.recv(100).startswith(b"HTTP/1.1 100 ")
        with socket.create_connection(address, timeout=TIMEOUT) as further, further.makefile("rb") as answer:
            status, text = answer.readline(), answer.read().lower()
        assert status.startswith(b"HTTP/1.1 503 ") and b"retry-after" in text and b"too many connections" in text


def test_a_folder_that_cannot_be_flushed_is_moved_or_deleted_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the client and the log are told is what happened."""

    def fail(_path: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    service = Service(make_tent(tmp_path), tmp_path / "state", window_size=0)
    for name in ("a", "b"):
        service.factory.snapshots.write(service.factory.create(name))
    service.release()
    service = Service(make_tent(tmp_path), tmp_path / "state", window_size=0)
    (tmp_path / "state/streams/a/1/state.safetensors").write_bytes(b"damaged")
    with serve_in_thread(service) as client:
        with monkeypatch.context() as patched:
            patched.setattr("ctta.serve.persistence.fsync_directory", fail)
            assert client.infer("a", make_images(4))["update"] == 1
            assert client.call("DELETE", "/streams/b").status_code == 200
            assert client.call("GET", "/streams/b").status_code == 404
        (event,) = [
            each
            for each in map(json.loads, (tmp_path / "state/audit.jsonl").read_text().splitlines())
            if each["kind"] == "damaged"
        ]
        (moved,) = (tmp_path / "state/streams").glob(".damaged-*")
        assert f"moved to {moved}, and the stream starts over" in event["cause"]


def test_a_damaged_stream_that_cannot_be_moved_stays(tmp_path: Path) -> None:
    service = Service(make_tent(tmp_path), tmp_path / "state", window_size=0)
    service.factory.snapshots.write(service.factory.create("a"))
    service.release()
    service = Service(make_tent(tmp_path), tmp_path / "state", window_size=0)
    (tmp_path / "state/streams/a/1/state.safetensors").write_bytes(b"damaged")
    with serve_in_thread(service) as client, read_only(tmp_path / "state/streams"):
        response = client.call("POST", "/v2/models/ctta/infer", json=infer_request("a", make_images(4)))
        assert response.status_code == 503 and "nothing was changed" in response.json()["error"]
        assert [path.name for path in (tmp_path / "state/streams").iterdir()] == ["a"]
        assert "damaged" not in (tmp_path / "state/audit.jsonl").read_text()


def test_a_disk_that_becomes_read_only_loses_nothing_once_it_can_be_written(tmp_path: Path) -> None:
    service = Service(make_tent(tmp_path), tmp_path / "state", window_size=0, snapshot_interval=0.1, unready_after=0.3)
    with serve_in_thread(service) as client:
        client.infer("a", make_images(4))
        wait_until(lambda: metric(client, "ctta_unsaved_seconds ") == 0)
        with read_only(tmp_path / "state"):
            for update in (2, 3):
                assert client.infer("a", make_images(4, update))["update"] == update
            assert client.infer("b", make_images(4))["update"] == 1
            wait_until(lambda: not is_ready(client))
            assert metric(client, "ctta_snapshot_failures_total ") >= 1
            assert client.call("DELETE", "/streams/a").status_code == 503
        wait_until(lambda: is_ready(client) and metric(client, "ctta_unsaved_seconds ") == 0)
    again = Service(make_tent(tmp_path), tmp_path / "state", window_size=0)
    assert (again.factory.read("a").num_updates, again.factory.read("b").num_updates) == (3, 1)
    again.release()


def test_a_disk_that_flushes_slowly_delays_only_the_stream_that_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_flushing, may_go_on = threading.Event(), threading.Event()

    def fsync(_file: int) -> None:
        is_flushing.set()
        may_go_on.wait(TIMEOUT)

    service = Service(make_tent(tmp_path), tmp_path / "state", window_size=0, num_workers=2)

    async def run() -> None:
        for name in "ab":
            await service.infer(name, make_images(4), adapt=True)
        slots = service.store.slots
        assert slots["b"].stream is not None
        slots["b"].num_saved_changes = slots["b"].stream.num_changes  # only "a" is saved
        monkeypatch.setattr("ctta.io.atomic.os.fsync", fsync)
        saving = asyncio.create_task(service.store.save_all())
        assert await asyncio.to_thread(is_flushing.wait, TIMEOUT)
        assert (await service.infer("b", make_images(4, 1), adapt=True)).num_updates == 2
        waiting = asyncio.create_task(service.infer("a", make_images(4, 1), adapt=True))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        may_go_on.set()
        await saving
        assert (await waiting).num_updates == 2
        await service.store.close()

    asyncio.run(run())
    service.release()


def test_a_clock_that_jumps_changes_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the wall clock: what is due is measured with a clock that does not jump."""
    now = time.time()
    service = Service(make_tent(tmp_path), tmp_path / "state", window_size=0, snapshot_interval=0.05)
    with serve_in_thread(service) as client:
        for update, jump in enumerate((0, -1e9, 1e9, -now, 0), start=1):
            monkeypatch.setattr("time.time", lambda jump=jump: now + jump)
            monkeypatch.setattr("time.time_ns", lambda jump=jump: int((now + jump) * 1e9))
            for name in ("a", "b"):
                assert client.infer(name, make_images(4, update))["update"] == update
            wait_until(lambda: metric(client, "ctta_unsaved_seconds ") == 0)
            assert client.json("GET", "/streams?order=recent")["total"] == 2
    again = Service(make_tent(tmp_path), tmp_path / "state", window_size=0)
    assert [again.factory.read(name).num_updates for name in ("a", "b")] == [5, 5]
    again.release()


def test_links_in_the_state_folder(tmp_path: Path) -> None:
    """A stream that somebody has moved to another disk is served."""
    service = Service(make_tent(tmp_path), tmp_path / "state", window_size=0)
    for name in ("a", "b", "c"):
        service.factory.snapshots.write(service.factory.create(name))
    service.release()
    streams, other = tmp_path / "state/streams", tmp_path / "other"
    other.mkdir()
    for name in ("a", "b"):
        (streams / name).rename(other / name)
        (streams / name).symlink_to(other / name)
    (other / "1").mkdir()
    (streams / "c/2").symlink_to(other / "1")  # an older snapshot is a link in the end
    (streams / "c/1").rename(streams / "c/3")
    (streams / ".deleted-f").symlink_to(other)
    service = Service(make_tent(tmp_path), tmp_path / "state", window_size=0)
    with serve_in_thread(service) as client:
        assert sorted(service.store.slots) == ["a", "b", "c"]
        for name in ("a", "b", "c"):
            assert client.infer(name, make_images(4))["update"] == 1
        assert client.call("DELETE", "/streams/b").status_code == 200
        assert client.infer("b", make_images(4))["update"] == 1
    assert (other / "b").exists(), "what a link leads to is not deleted"
    again = Service(make_tent(tmp_path), tmp_path / "state", window_size=0)
    assert [again.factory.read(name).num_updates for name in ("a", "b", "c")] == [1, 1, 1]
    assert (streams / "a").is_symlink() and len(list((other / "a").iterdir())) == 1
    again.release()


def test_links_that_lead_nowhere_are_not_damage(tmp_path: Path) -> None:
    """Such as those to a disk that is not mounted: their streams wait for it, and the others are served."""
    options: dict[str, Any] = {"window_size": 0, "num_workers": 1, "limits": Limits(max_live_streams=1)}
    service, names = Service(make_tent(tmp_path), tmp_path / "state", **options), ("stream", "snapshot", "file")
    for name in names:
        service.factory.snapshots.write(service.factory.create(name))
    service.release()
    streams, disk, hidden = tmp_path / "state/streams", tmp_path / "disk", tmp_path / "hidden"
    disk.mkdir()
    paths = [streams / path for path in ("stream", "snapshot/1", "file/1/state.safetensors")]
    for name, path in zip(names, paths, strict=True):
        path.rename(disk / name)
        path.symlink_to(disk / name)
    (streams / "loop").symlink_to(streams / "loop")

    def check_unreadable(client: Client, *names: str) -> None:
        for name in (*names, "loop"):
            for _ in range(2):
                response = client.call("POST", "/v2/models/ctta/infer", json=infer_request(name, make_images(4)))
                assert response.status_code == 503 and response.headers["Retry-After"], response.text
            assert client.call("GET", f"/streams/{name}").status_code in (200, 503)  # 200 if its summary is known
        assert client.infer("other", make_images(4))["update"] >= 1

    service = Service(make_tent(tmp_path), tmp_path / "state", **options)
    with serve_in_thread(service) as client:
        disk.rename(hidden)
        check_unreadable(client, *names)
        hidden.rename(disk)
        assert [client.infer(name, make_images(4))["update"] for name in names] == [1, 1, 1]
    disk.rename(hidden)
    service = Service(make_tent(tmp_path), tmp_path / "state", **options)
    with serve_in_thread(service) as client:
        assert sorted(service.store.slots) == ["file", "loop", "other", "snapshot", "stream"]
        assert client.call("GET", "/streams/stream").status_code == 503
        check_unreadable(client, "stream")
        hidden.rename(disk)
        assert [client.infer(name, make_images(4))["update"] for name in names] == [2, 2, 2]
        assert client.call("DELETE", "/streams/loop").status_code == 200
        assert client.infer("loop", make_images(4))["update"] == 1
    assert not list(streams.glob(".damaged*")) and (streams / "stream").is_symlink()


def test_a_line_that_a_killed_process_left_unfinished_stays_on_its_own(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"kind": "ne')
    log = AuditLog(path, lambda _kind: None, lambda: None)
    log.append("a", "new", "first use")
    log.append("a", "reset", "requested")
    unfinished, *lines = path.read_text().splitlines()
    assert unfinished == '{"kind": "ne' and [json.loads(line)["kind"] for line in lines] == ["new", "reset"]


def test_the_audit_log_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctta.serve.audit.MAX_BYTES", 300)
    log = AuditLog(tmp_path / "audit.jsonl", lambda _kind: None, lambda: None)
    for number in range(10):
        log.append("a", "new", str(number))
    assert len(list(tmp_path.iterdir())) <= 2
    log.append("a", "new", "10")
    older, newer = (tmp_path / name for name in ("audit.jsonl.1", "audit.jsonl"))
    lines = [path.read_text().splitlines() for path in (older, newer) if path.exists()]
    causes = [int(json.loads(line)["cause"]) for part in lines for line in part]
    assert 300 < older.stat().st_size < 500 and causes == list(range(causes[0], 11))


def test_a_limit_that_every_change_would_exceed_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least two snapshot intervals, 60 s"):
        Service(make_tent(tmp_path), tmp_path / "state", unready_after=59)

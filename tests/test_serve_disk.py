"""Disks that are full for a while: the service keeps serving, and recovers by itself."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import TIMEOUT, Client, ServerProcess, make_images, make_png, make_tent
from small_disk import small_disk

from ctta.errors import ConfigError
from ctta.serve import Service
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

"""The service on a local Ray cluster: a replica is killed under load, one is added under load, and all is saved."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest
from clusters import History, make_batch
from serving import TIMEOUT, Client, ServerProcess, infer_request

from ctta import models
from ctta.errors import DamagedCheckpointError
from ctta.serve import Service, build_method
from ctta.serve.cluster import RayService
from ctta.serve.cluster.actors import NAMESPACE, import_ray
from ctta.serve.cluster.snapshots import FencedSnapshots
from ctta.serve.persistence import Snapshots

ray = import_ray()

STREAMS = [f"camera{number}" for number in range(4)]
PATIENCE = 600.0  # seconds; each replica that is started imports torch in a process of its own
OPTIONS = ("--method", "tent", "--set", "lr=0.01", "--no-guard", "--window", "0", "--snapshot-every", "0.3")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Start a cluster; Ray writes a token into the home folder, and looks for it there as long as the process lives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path / "home"))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        (tmp_path / "home").mkdir()
        ray.init(
            num_cpus=2,
            object_store_memory=80 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            namespace=NAMESPACE,
        )
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


class Load:
    """Clients that send batch after batch to every stream, one thread each."""

    def __init__(self, address: str, first: int) -> None:
        self.address, self.first = address, first
        self.records: dict[str, list[tuple[int, int, Any]]] = {stream: [] for stream in STREAMS}
        self._threads = [threading.Thread(target=self._drive, args=[stream]) for stream in STREAMS]
        self._stopped = threading.Event()
        for thread in self._threads:
            thread.start()

    def _drive(self, stream: str) -> None:
        client, number = Client(self.address), self.first
        while not self._stopped.is_set():
            request = infer_request(stream, make_batch(stream, number))
            response = client.call("POST", "/v2/models/ctta/infer", json=request)
            self.records[stream].append((number, response.status_code, response.json()))
            number += 1
            time.sleep(0.02)

    def count(self, stream: str) -> int:
        return sum(status == 200 for _, status, _ in self.records[stream])

    def wait_for_more(self, number: int) -> None:
        """Wait until every stream has had so many more answers."""
        before = {stream: self.count(stream) for stream in STREAMS}
        until(lambda: all(self.count(stream) >= before[stream] + number for stream in STREAMS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(TIMEOUT)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def find_free_port() -> int:
    """Return a port below those that the system gives to others meanwhile."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def test_replicas_die_and_come_under_load(address: str, tmp_path: Path) -> None:
    port = find_free_port()
    options = (*OPTIONS, "--ray", address, "--replicas", 3, "--replica-cpus", 0.1, "--port", port)
    server = ServerProcess(tmp_path / "state", *options)
    with server as client:
        template = build_method(models.load(server.spec), "tent", ["lr=0.01"])
        histories = {stream: History(template, stream) for stream in STREAMS}
        service = RayService()
        assert client.json("GET", "/cluster")["replicas"] == [f"ctta-replica-{number}" for number in range(3)]
        num_sent = kill_one(service, client, histories, tmp_path / "state")
        add_one(service, client, histories, num_sent, server)
        assert server.stop(signal.SIGTERM) == 0
    check_saved(histories, template, tmp_path)


def kill_one(service: RayService, client: Client, histories: dict[str, History], folder: Path) -> int:
    with Load(client.address, 0) as load:
        load.wait_for_more(5)
        until(lambda: all(count_saved(folder, stream) >= 5 for stream in STREAMS))
        before = service.view
        victim = before.owner(STREAMS[0])
        orphans = [stream for stream in STREAMS if before.owner(stream) == victim]
        owners = [before.owner(stream) for stream in STREAMS]
        assert victim and len(set(owners)) > 1
        actor = ray.get_actor(victim, namespace=NAMESPACE)
        os.kill(ray.get(actor.get_pid.remote()), signal.SIGKILL)
        # Its streams are elsewhere, unless Ray has restarted it already.
        until(lambda: service.view.members.get(victim) != before.members[victim])
        load.wait_for_more(3)
        until(lambda: victim in service.view.members)  # and its streams come back
        load.wait_for_more(3)
    for stream, records in load.records.items():
        for number, status, answer in records:
            assert status == 200 or (stream in orphans and status == 503), answer
            if status == 200:
                histories[stream].check(number, answer)
            else:
                histories[stream].fail(number)
        assert stream in orphans or histories[stream].num_lost == 0
        assert len(histories[stream].batches) >= 8
    return max(number for records in load.records.values() for number, _, _ in records) + 1


def count_saved(folder: Path, stream: str) -> int:
    """Return the number of updates in the newest snapshot of a stream; 0 if there is none, or it is being replaced."""
    snapshots = FencedSnapshots(folder / "streams", owns=lambda _: True, may_write=lambda: False)
    try:
        return int(Snapshots.read_summary(snapshots, stream)["updates"])  # without claiming it
    except DamagedCheckpointError:
        return 0


def add_one(
    service: RayService, client: Client, histories: dict[str, History], first: int, server: ServerProcess
) -> None:
    with Load(client.address, first) as load:
        load.wait_for_more(2)
        before = service.view
        arguments = ["serve", *map(str, server.options), "--replicas", "4"]  # the last one counts
        command = [sys.executable, "-c", "from ctta.cli import main; main()", *arguments]
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout
        assert "3 replicas before, 4 now" in output
        after = service.view
        assert len(after.members) == 4 and dict(before.members).items() <= dict(after.members).items()
        load.wait_for_more(3)
    assert any(before.owner(stream) != after.owner(stream) for stream in STREAMS)
    for stream, records in load.records.items():
        num_lost = histories[stream].num_lost
        for number, status, answer in records:
            assert status == 200, answer
            histories[stream].check(number, answer)
        assert histories[stream].num_lost == num_lost
        shown = client.json("GET", f"/streams/{stream}")
        assert shown["updates"] == len(histories[stream].batches)


def check_saved(histories: dict[str, History], template: Any, tmp_path: Path) -> None:
    """One process continues with what the replicas have saved."""
    service = Service(template, tmp_path / "state", image_size=(16, 16), window_size=0)
    try:
        assert sorted(service.store.slots) == STREAMS
        for stream, history in histories.items():
            assert service.factory.snapshots.read_summary(stream)["updates"] == len(history.batches)
    finally:
        service.release()

"""The service on a Ray cluster of several nodes: actors and nodes die, come and pause under load, and all is saved."""

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pytest
import requests
from clusters import History, make_batch
from serving import TIMEOUT, Client, ServerProcess, infer_request

from ctta import models
from ctta.serve import Service, build_method
from ctta.serve.ray import NAMESPACE, import_ray
from ctta.serve.shards import find_shard, read_slots

ray = import_ray()
cluster_utils = import_ray("ray.cluster_utils")

NUM_SHARDS = 8
STREAMS = ["camera0", "camera1", "camera3"]
PATIENCE = 600.0  # seconds; the process of each shard imports torch
OPTIONS = ("--method", "tent", "--set", "lr=0.01", "--no-guard", "--window", "0", "--snapshot-every", "0.3")
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
#: Declare a node dead after three seconds without an answer.
HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 1000}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    """Start a cluster of two nodes; Ray writes a token into the home folder, and looks for it as long as it runs."""
    with (
        tempfile.TemporaryDirectory(
            prefix="ray-", dir="/tmp", ignore_cleanup_errors=True
        ) as folder,  # short, for sockets
        pytest.MonkeyPatch.context() as patch,
    ):
        (tmp_path / "home").mkdir()
        patch.setenv("HOME", str(tmp_path / "home"))
        patch.setenv("TMPDIR", folder)  # of Ray, and of the processes of shards
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        system = {**HEALTH, "health_check_failure_threshold": 3}
        head = {**NODE, "include_dashboard": False, "_system_config": system}
        started = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        started.add_node(**NODE)
        ray.init(started.address, namespace=NAMESPACE, log_to_driver=False)
        yield started
        ray.shutdown()
        started.shutdown()


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
            try:
                response = client.call("POST", "/v2/models/ctta/infer", json=request)
                status, answer = response.status_code, response.json() if response.ok else response.text
            except requests.RequestException as error:
                status, answer = 0, str(error)
            self.records[stream].append((number, status, answer))
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


class Deployment:
    """A service on a cluster, with the history of its streams."""

    def __init__(self, client: Client, template: Any, state: Path) -> None:
        self.client, self.state = client, state
        self.histories = {stream: History(template, stream) for stream in STREAMS}
        self.num_sent = 0

    def process(self, stream: str) -> dict[str, Any]:
        """Return the shard of a stream, its incarnation and its process; incarnation 0 if there is none."""
        shard = find_shard(stream, NUM_SHARDS)
        with suppress(requests.RequestException, AssertionError):  # the front may be being restarted
            for each in self.client.json("GET", "/cluster")["running"]:
                if each["shard"] == shard:
                    return dict(each)
        return {"incarnation": 0, "pid": 0}

    def on(self, node: Any) -> set[str]:
        """Return the streams whose processes run on a node."""
        (raylet,) = node.all_processes["raylet"]
        return {stream for stream in STREAMS if find_parent(self.process(stream)["pid"]) == raylet.process.pid}

    def disturb(self, disturb: Callable[[], set[str]], *, interrupts_all: bool = False) -> None:
        """Disturb the service under load, once some updates are saved, and check every answer.

        The disturbance returns the streams that may lose updates: of those, none that was saved before.
        """
        with Load(self.client.address, self.num_sent) as load:
            load.wait_for_more(3)
            until(lambda: all(self.count_saved(stream) >= self.num_known(stream) + 3 for stream in STREAMS))
            saved = {stream: self.num_known(stream) + 3 for stream in STREAMS}
            disturbed = disturb()
            load.wait_for_more(3)
        for stream, records in load.records.items():
            history, num_lost = self.histories[stream], self.histories[stream].num_lost
            for number, status, answer in records:
                if status == 200:
                    history.check(number, answer)
                else:
                    assert interrupts_all or (stream in disturbed and status == 503), answer
                    history.fail(number)
                assert len(history.batches) >= min(saved[stream], number - self.num_sent), "older than a snapshot"
            assert stream in disturbed or history.num_lost == num_lost
        self.num_sent = max(number for records in load.records.values() for number, _, _ in records) + 1

    def num_known(self, stream: str) -> int:
        return len(self.histories[stream].batches)

    def count_saved(self, stream: str) -> int:
        """Return the number of updates in the newest snapshot of a stream; 0 if it is just being replaced."""
        slot = read_slots(str(self.state)).get(stream)
        return int((slot.last_summary or {})["updates"]) if slot else 0


def find_parent(pid: int) -> int:
    with suppress(FileNotFoundError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))
    return 0


def kill_process(service: Deployment) -> set[str]:
    before = service.process(STREAMS[0])
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: service.process(STREAMS[0])["incarnation"] > before["incarnation"])
    return {STREAMS[0]}


def pause_process(service: Deployment) -> set[str]:
    """Ray waits for a process that is paused: nobody else gets its streams, and nothing is lost."""
    before = service.process(STREAMS[0])
    os.kill(before["pid"], signal.SIGSTOP)
    time.sleep(3.0)
    os.kill(before["pid"], signal.SIGCONT)
    until(lambda: service.process(STREAMS[0])["pid"] == before["pid"])
    assert service.process(STREAMS[0]) == before
    return set()


def replace_node(service: Deployment, cluster: Any) -> set[str]:
    """Add a node and kill another one, whose streams go on elsewhere."""
    (victim,) = cluster.worker_nodes
    added, orphans = cluster.add_node(**NODE), service.on(victim)
    assert orphans
    before = {stream: service.process(stream) for stream in orphans}
    cluster.remove_node(victim, allow_graceful=False)
    until(lambda: all(service.process(each)["incarnation"] > before[each]["incarnation"] for each in orphans))
    number = 10
    while not service.on(added):  # a shard that is restarted, or started, may be on any node
        service.client.infer(f"extra{number}", make_batch("extra", number))
        number += 1
    return orphans


def pause_node(service: Deployment, cluster: Any) -> set[str]:
    """Pause a node until Ray has started its shards elsewhere: when it comes back, its processes end."""
    (victim,) = cluster.worker_nodes
    orphans = service.on(victim)
    assert orphans
    before = {stream: service.process(stream) for stream in orphans}
    pids = [*(each["pid"] for each in before.values()), victim.all_processes["raylet"][0].process.pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: all(service.process(each)["incarnation"] > before[each]["incarnation"] for each in orphans))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not any(find_parent(each["pid"]) for each in before.values()))
    return orphans


@pytest.mark.long
def test_paused_nodes_that_come_back_and_many_deaths(cluster: Any, tmp_path: Path) -> None:
    with deploy(cluster, tmp_path) as service:
        for _ in range(3):
            service.disturb(lambda: kill_process(service))
        service.disturb(lambda: pause_node(service, cluster), interrupts_all=True)
        service.disturb(lambda: pause_process(service))


@pytest.mark.long
def test_processes_and_nodes_die_come_and_pause_under_load(cluster: Any, tmp_path: Path) -> None:
    with deploy(cluster, tmp_path) as service:
        service.disturb(lambda: kill_process(service))
        service.disturb(lambda: pause_process(service))
        service.disturb(lambda: replace_node(service, cluster), interrupts_all=True)


@contextmanager
def deploy(cluster: Any, tmp_path: Path) -> Iterator[Deployment]:
    """Serve on a cluster; at the end, stop the service and check what it has saved."""
    options = (*OPTIONS, "--ray", cluster.address, "--shards", NUM_SHARDS, "--port", find_free_port())
    server = ServerProcess(tmp_path / "state", *options)
    with server as client:
        template = build_method(models.load(server.spec), "tent", ["lr=0.01"])
        service = Deployment(client, template, tmp_path / "state")
        yield service
        assert server.stop(signal.SIGTERM) == 0
    check_saved(service.histories, template, tmp_path)


def check_saved(histories: dict[str, History], template: Any, tmp_path: Path) -> None:
    """One process continues with what the shards have saved."""
    service = Service(template, tmp_path / "state", image_size=(16, 16), window_size=0)
    try:
        assert set(service.store.slots) >= set(STREAMS)
        for stream, history in histories.items():
            assert service.factory.snapshots.read_summary(stream)["updates"] == len(history.batches)
    finally:
        service.release()

"""The service on a Ray cluster of several nodes: actors and nodes die, come and pause under load, and all is saved."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pytest
import requests
from clusters import History, make_batch
from serving import TIMEOUT, Client, ServerProcess, infer_request

from ctta import models
from ctta.serve import Service, build_method
from ctta.serve.ray import NAMESPACE, find_shard, import_ray, read_slots

ray = import_ray()
cluster_utils = import_ray("ray.cluster_utils")

STREAMS = ["camera0", "camera1", "camera3"]  # of the long forms, in three of eight shards
STREAM = "camera0"
TWO_STREAMS = ["camera0", "camera1"]  # in both of two shards
PATIENCE = 600.0  # seconds; the process of each shard imports torch
OPTIONS = ("--method", "tent", "--set", "lr=0.01", "--no-guard", "--window", "0", "--snapshot-every", "0.3")
SHARD_CPUS = 0.05  # so that shards are on the nodes with CPUs only, which the tests kill, and not on the head
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
SYSTEM = {
    # Declare a node dead after some seconds without an answer: at once if its process is gone, else three times.
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
    # Ray runs workers at niceness 15: beside other tests, importing torch would take them minutes.
    "worker_niceness": 0,
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    """Start a head, which has no shards, and a node; Ray looks for a token in the home folder as long as it runs."""
    folder = tempfile.mkdtemp(prefix="r")  # short, for the paths of sockets
    with pytest.MonkeyPatch.context() as patch:
        (tmp_path / "home").mkdir()
        patch.setenv("HOME", str(tmp_path / "home"))
        patch.setenv("TMPDIR", folder)  # of Ray, and of the processes of shards
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        head = {**NODE, "num_cpus": 0, "include_dashboard": False, "_system_config": SYSTEM}
        started = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        started.add_node(**NODE)
        ray.init(started.address, namespace=NAMESPACE, log_to_driver=False)
        yield started
        ray.shutdown()
        started.shutdown()
    until(lambda: remove_folder(folder))


def remove_folder(folder: str) -> bool:
    """Return whether a folder is gone, to which processes that are ending may still write."""
    shutil.rmtree(folder, ignore_errors=True)
    return not Path(folder).exists()


class Load:
    """Clients that send batch after batch to every stream, one thread each."""

    def __init__(self, address: str, streams: Sequence[str], first: int) -> None:
        self.address, self.first = address, first
        self.records: dict[str, list[tuple[int, int, Any]]] = {stream: [] for stream in streams}
        self._threads = [threading.Thread(target=self._drive, args=[stream]) for stream in streams]
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
        before = {stream: self.count(stream) for stream in self.records}
        until(lambda: all(self.count(stream) >= before[stream] + number for stream in self.records))

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

    def __init__(self, client: Client, template: Any, state: Path, streams: Sequence[str], num_shards: int) -> None:
        self.client, self.state, self.num_shards = client, state, num_shards
        self.histories = {stream: History(template, stream) for stream in streams}
        self.num_sent = 0

    def running(self) -> dict[int, dict[str, Any]]:
        """Return the process and the incarnation of each running shard; none if the front is being restarted."""
        with suppress(requests.RequestException, AssertionError):
            return {each["shard"]: each for each in self.client.json("GET", "/cluster")["running"]}
        return {}

    def process(self, stream: str) -> dict[str, Any]:
        """Return the process and the incarnation of the shard of a stream; incarnation 0 if there is none."""
        return self.running().get(find_shard(stream, self.num_shards), {"incarnation": 0, "pid": 0})

    def on(self, node: Any) -> set[int]:
        """Return the shards whose processes run on a node."""
        (raylet,) = node.all_processes["raylet"]
        running = self.running().items()
        return {shard for shard, each in running if find_parent(each["pid"]) == raylet.process.pid}

    def streams_on(self, node: Any) -> set[str]:
        """Return the streams with a history whose shards run on a node."""
        shards = self.on(node)
        return {stream for stream in self.histories if find_shard(stream, self.num_shards) in shards}

    def disturb(self, disturb: Callable[[], set[str]], *, interrupts_all: bool = False) -> None:
        """Disturb the service under load, once some updates are saved, and check every answer.

        The disturbance returns the streams that may lose updates: of those, none that was saved before.
        """
        with Load(self.client.address, list(self.histories), self.num_sent) as load:
            load.wait_for_more(3)
            saved = {stream: len(history.batches) + 3 for stream, history in self.histories.items()}
            until(lambda: all(self.count_saved(stream) >= saved[stream] for stream in saved))
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

    def count_saved(self, stream: str) -> int:
        """Return the number of updates in the newest snapshot of a stream; 0 if it is just being replaced."""
        slot = read_slots(str(self.state)).get(stream)
        return int((slot.last_summary or {})["updates"]) if slot else 0


def find_parent(pid: int) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))
    return 0


def find_children(pid: int) -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if find_parent(int(path.name)) == pid]


def kill_process(service: Deployment) -> set[str]:
    stream = next(iter(service.histories))
    before = service.process(stream)
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: service.process(stream)["incarnation"] > before["incarnation"])
    return {stream}


def pause_process(service: Deployment) -> set[str]:
    """Ray waits for a process that is paused: nobody else gets its streams, nothing is lost, and others are served."""
    stream = next(iter(service.histories))
    before = service.process(stream)
    os.kill(before["pid"], signal.SIGSTOP)
    try:
        for path in ("/metrics", "/v2/health/ready", "/streams", "/cluster"):
            assert service.client.call("GET", path).status_code == 200, path
        shard = find_shard(stream, service.num_shards)
        other = next(name for name in map(str, range(100)) if find_shard(name, service.num_shards) != shard)
        assert service.client.call("GET", f"/streams/{other}").status_code == 404
    finally:
        os.kill(before["pid"], signal.SIGCONT)
    until(lambda: service.process(stream)["pid"] == before["pid"])
    assert service.process(stream) == before
    return set()


def kill_process_between_requests(service: Deployment) -> None:
    """Requests wait for the process that Ray starts, but for one that finds out that the former is dead."""
    stream = next(iter(service.histories))
    until(lambda: all(service.count_saved(each) == len(history.batches) for each, history in service.histories.items()))
    os.kill(service.process(stream)["pid"], signal.SIGKILL)
    statuses = list[int]()
    while 200 not in statuses:
        statuses.append(service.client.call("GET", f"/streams/{stream}").status_code)
        assert set(statuses) <= {200, 503} and statuses.count(503) <= 1, statuses


def kill_front(service: Deployment) -> None:
    """Each request whose connection breaks is sent again with its key, until it is answered, and counts once."""
    stream, history = next(iter(service.histories.items()))
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    (name,) = (name for name in names if "-front-" in name)
    pid, client, broken = ray.get(ray.get_actor(name, NAMESPACE).wait_until_listening.remote()), service.client, 0
    for number in range(service.num_sent, service.num_sent + 30):
        request, headers = infer_request(stream, make_batch(stream, number)), {"Idempotency-Key": f"{number}"}
        if number == service.num_sent + 5:
            threading.Timer(0.01, os.kill, (pid, signal.SIGKILL)).start()
        answer = None
        while answer is None:
            try:
                response = client.call("POST", "/v2/models/ctta/infer", json=request, headers=headers)
                assert "error" in response.json() or response.ok
                answer = response.json() if response.ok else None
            except requests.ConnectionError:
                broken += 1
                time.sleep(0.05)
        assert answer["parameters"]["update"] == len(history.batches) + 1
        history.check(number, answer)
    assert broken
    service.num_sent += 30


def find_victim(service: Deployment, cluster: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Return a node that can be lost, and the processes of the streams that are on it."""
    victim = next(node for node in cluster.worker_nodes if service.streams_on(node))
    return victim, {stream: service.process(stream) for stream in service.streams_on(victim)}


def wait_for_successors(service: Deployment, orphans: dict[str, dict[str, Any]]) -> None:
    until(lambda: all(service.process(each)["incarnation"] > orphans[each]["incarnation"] for each in orphans))


def replace_node(service: Deployment, cluster: Any) -> set[str]:
    """Add a node and kill another one, whose streams go on elsewhere."""
    victim, orphans = find_victim(service, cluster)
    added = cluster.add_node(**NODE)
    cluster.remove_node(victim, allow_graceful=False)
    wait_for_successors(service, orphans)
    # If nodes are left, a shard that is restarted or started may be on any of them.
    for number in range(8 * service.num_shards):
        if service.on(added):
            return set(orphans)
        service.client.infer(f"extra{number}", make_batch("extra", number))
    raise AssertionError(f"no shard is on the node that was added: {service.running()}")


def pause_node(service: Deployment, cluster: Any) -> set[str]:
    """Pause a node until Ray has started its shards elsewhere: when it comes back, its processes end."""
    victim, orphans = find_victim(service, cluster)
    raylet = victim.all_processes["raylet"][0].process.pid
    workers = find_children(raylet)  # also a proxy, and maybe the front, which answer until they end
    paused = [*(each["pid"] for each in orphans.values()), raylet]
    for pid in paused:
        os.kill(pid, signal.SIGSTOP)
    wait_for_successors(service, orphans)
    for pid in paused:
        os.kill(pid, signal.SIGCONT)
    assert {each["pid"] for each in orphans.values()} <= set(workers)
    until(lambda: not any(map(find_parent, workers)))
    return set(orphans)


@pytest.mark.long
def test_streams_survive_a_killed_process_and_move_to_a_node_that_replaces_theirs(cluster: Any, tmp_path: Path) -> None:
    with deploy(cluster, tmp_path, TWO_STREAMS, num_shards=2) as service:
        service.disturb(lambda: kill_process(service))
        kill_process_between_requests(service)
        kill_front(service)
        service.disturb(lambda: replace_node(service, cluster), interrupts_all=True)
        (node,) = cluster.worker_nodes
        assert service.on(node) == {0, 1}


@pytest.mark.long
def test_a_request_waits_for_the_node_that_replaces_the_only_one(cluster: Any, tmp_path: Path) -> None:
    """One may get a 503: that which finds out that the process is gone."""
    with deploy(cluster, tmp_path, [STREAM], "--timeout", TIMEOUT - 10, num_shards=1) as service:
        history, statuses = service.histories[STREAM], list[int]()

        def send(number: int) -> None:
            request, headers = infer_request(STREAM, make_batch(STREAM, number)), {"Idempotency-Key": f"{number}"}
            while len(statuses) < 3 and 200 not in statuses:
                response = service.client.call("POST", "/v2/models/ctta/infer", json=request, headers=headers)
                statuses.append(response.status_code)
            history.check(number, response.json())

        send(0)
        until(lambda: service.count_saved(STREAM) == 1)
        before = service.process(STREAM)
        (victim,) = cluster.worker_nodes
        cluster.remove_node(victim, allow_graceful=False)
        until(lambda: not find_parent(before["pid"]))  # it lives on for a moment
        statuses.clear()
        sending = threading.Thread(target=send, args=[1])
        sending.start()
        time.sleep(5)
        assert sending.is_alive(), f"there is no node for the shard: {statuses}"
        cluster.add_node(**NODE)
        sending.join(PATIENCE)
        assert statuses in ([200], [503, 200]), statuses
        assert history.num_lost == 0 and service.process(STREAM)["incarnation"] > before["incarnation"]


@pytest.mark.long
def test_a_service_that_cannot_listen_leaves_no_process(cluster: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = ServerProcess(tmp_path / "state", *OPTIONS, "--ray", cluster.address, "--port", port)
        code = "from ctta.cli import main; main()"
        command = [sys.executable, "-c", code, "serve", *map(str, server.options)]
        result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and "the service could not be started" in result.stderr
    assert "in use" in result.stderr, result.stderr
    assert not ray.util.list_named_actors(all_namespaces=True)


@pytest.mark.long
def test_paused_nodes_that_come_back_and_many_deaths(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(**NODE)
    with deploy(cluster, tmp_path, STREAMS, num_shards=8) as service:
        for _ in range(3):
            service.disturb(lambda: kill_process(service))
        service.disturb(lambda: pause_node(service, cluster), interrupts_all=True)
        service.disturb(lambda: pause_process(service))


@pytest.mark.long
def test_processes_and_nodes_die_come_and_pause_under_load(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(**NODE)
    with deploy(cluster, tmp_path, STREAMS, num_shards=8) as service:
        service.disturb(lambda: kill_process(service))
        service.disturb(lambda: pause_process(service))
        service.disturb(lambda: replace_node(service, cluster), interrupts_all=True)


@pytest.mark.long
def test_a_wrong_token_is_reported_as_such(tmp_path: Path) -> None:
    folder, port = tempfile.mkdtemp(prefix="r"), find_free_port()
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path)}
    places = ["--port", str(port), "--temp-dir", folder, "--object-store-memory", str(80 * 2**20)]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "0", *places]
    given = {**environment, "RAY_AUTH_TOKEN": "right" * 10}
    head = subprocess.Popen(command, env=given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: is_listening(port))
        code = "from ctta.cli import main; main()"
        options = ["--model", "embedded", "--state", str(tmp_path / "state"), "--ray", f"127.0.0.1:{port}"]
        for token in ({"RAY_AUTH_TOKEN": "wrong" * 10}, {}):
            result = subprocess.run(
                [sys.executable, "-c", code, "serve", *options], env=environment | token, capture_output=True, text=True
            )
            assert result.returncode == 1 and "does not accept the token" in result.stderr, result.stderr
    finally:
        head.terminate()
        head.wait(TIMEOUT)
    until(lambda: remove_folder(folder))


def is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextmanager
def deploy(
    cluster: Any, tmp_path: Path, streams: Sequence[str], *options: object, num_shards: int
) -> Iterator[Deployment]:
    """Serve on a cluster; at the end, stop the service and check what it has saved."""
    state = tmp_path / "state"
    placement = ("--ray", cluster.address, "--shards", num_shards, "--shard-cpus", SHARD_CPUS)
    server = ServerProcess(state, *OPTIONS, *placement, *options, "--port", find_free_port())
    with server as client:
        template = build_method(models.load(server.spec), "tent", ["lr=0.01"])
        service = Deployment(client, template, state, streams, num_shards)
        yield service
        assert server.stop(signal.SIGTERM) == 0
    check_saved(service.histories, template, state)


def check_saved(histories: dict[str, History], template: Any, state: Path) -> None:
    """One process continues with what the shards have saved."""
    service = Service(template, state, image_size=(16, 16), window_size=0)
    try:
        assert set(service.store.slots) >= set(histories)
        for stream, history in histories.items():
            assert service.factory.snapshots.read_summary(stream)["updates"] == len(history.batches)
    finally:
        service.release()

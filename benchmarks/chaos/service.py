"""The services that benchmarks/chaos/run.py attacks, their faults, and when each of them was on."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import requests

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from small_disk import SmallDisk, small_disk

from ctta.serve import Limits

INTERVAL = 1.0  # seconds between two snapshots
TIMEOUT = 60.0  # seconds; a request that takes longer hangs
NUM_FILES = 128  # that the process may have open
NUM_SILENT = 200  # connections that send nothing, of which one process with so many files accepts 64 at a time
NUM_SILENT_ON_RAY = Limits().max_connections + 100  # the front may open more files
NUM_SHARDS = 4
NETWORK = """
import os
import torch
from torch import nn

class Faulty(nn.Sequential):
    def forward(self, x):
        if os.getpid() != CLIENT and os.path.exists(FAIL_FILE):
            raise RuntimeError("the network fails")
        return super().forward(x)

def net():
    torch.manual_seed(0)
    return Faulty(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 7 * 7, 5))
"""
Kind = Literal["full disk", "failing network", "down", "silent connections"]


class Timeline:
    """When each fault was on; the service may be blamed only outside of these times."""

    def __init__(self) -> None:
        self._windows: dict[Kind, list[tuple[float, float, int | None]]] = {
            "full disk": [],
            "failing network": [],
            "down": [],
            "silent connections": [],
        }
        self.kills: list[tuple[float, int | None]] = []  # when, and of which shard; None for all
        self._lock = threading.Lock()

    @contextmanager
    def during(self, kind: Kind, shard: int | None = None) -> Iterator[None]:
        """Record a fault, of one shard or of all, from before it begins until after it has ended."""
        with self._lock:
            self._windows[kind].append((time.monotonic(), float("inf"), shard))
            number = len(self._windows[kind]) - 1
        try:
            yield
        finally:
            with self._lock:
                self._windows[kind][number] = (self._windows[kind][number][0], time.monotonic(), shard)

    def was_on(self, kind: Kind, start: float, end: float, shard: int | None = None) -> bool:
        """Return whether a fault was on at any time between two, for a shard or for all."""
        with self._lock:
            return any(
                begun <= end and start <= ended and (of in (None, shard)) for begun, ended, of in self._windows[kind]
            )

    def compute_due(self, acknowledged: float) -> float:
        """Return when an update must be on disk: two intervals after it was acknowledged, or after the disk has space.

        A disk that fills within the two intervals of an update may keep it from being written; once there is space
        again, it is due two intervals later.
        """
        due = acknowledged + 2 * INTERVAL
        with self._lock:
            for begun, ended, _ in sorted(self._windows["full disk"]):
                if begun <= due and acknowledged <= ended:
                    due = max(due, ended + 2 * INTERVAL)
        return due

    def find_kill(self, acknowledged: float, shard: int) -> float | None:
        """Return when the process of a shard was killed first after an update was acknowledged; None if never."""
        with self._lock:
            return min((at for at, of in self.kills if at >= acknowledged and of in (None, shard)), default=None)

    def kill(self, shard: int | None = None) -> None:
        """Record that a process is killed now."""
        with self._lock:
            self.kills.append((time.monotonic(), shard))


class ChaosService:
    """``ctta serve`` in another process, with its state on a small disk.

    Args:
        folder: A new folder.
        disk: Where the streams are saved.
    """

    options: tuple[object, ...] = ()
    may_start_later = False  # whether a request may have to start a process
    longest_wait = 0.0  # seconds of what was asked of others while a process was paused
    num_silent = NUM_SILENT
    num_closed = 0  # of the connections that send nothing, by the service
    prefix: tuple[str, ...] = ("prlimit", f"--nofile={NUM_FILES}:{NUM_FILES}")

    def __init__(self, folder: Path, disk: SmallDisk) -> None:
        self.folder, self.disk, self.address, self.timeline = folder, disk, "", Timeline()
        text = NETWORK.replace("FAIL_FILE", repr(str(folder / "fail"))).replace("CLIENT", str(os.getpid()))
        (folder / "network.py").write_text(text)
        self.spec = f"file:{folder / 'network.py'}:net"
        self.process: subprocess.Popen[str] | None = None
        # A service that is started finds space, and a network that works.
        self._disk_in_use, self._network_in_use = threading.Lock(), threading.Lock()

    @property
    def state(self) -> Path:
        """Where the streams are saved."""
        return self.disk.path / "state"

    def find_shard(self, stream: str) -> int:
        """Return the shard of a stream."""
        return 0

    def start(self, max_live: int = 64) -> None:
        """Start, and wait until it listens.

        Args:
            max_live: Streams in memory; the others are moved to disk and back with each request.
        """
        options = ["--model", self.spec, "--method", "tent", "--no-guard", "--window", "0", "--size", "16", "16"]
        options += ["--state", str(self.state), "--snapshot-every", str(INTERVAL), "--timeout", "30"]
        options += ["--live-streams", str(max_live), *map(str, self.options or ("--port", 0))]
        command = [*self.prefix, sys.executable, "-c", "from ctta.cli import main; main()", "serve", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._disk_in_use, self._network_in_use, (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
            assert self.process.stdout
            line = self.process.stdout.readline()
        assert line.startswith("Listening on "), (self.folder / "log").read_text()[-4000:]
        self.address = line.split()[-1]

    def stop(self, number: signal.Signals) -> int:
        """Send a signal to the command, and return the exit code."""
        assert self.process and self.process.stdout
        if number == signal.SIGKILL:
            self.timeline.kill()
        self.process.send_signal(number)
        code = self.process.wait(300)
        if code != 0:
            self.timeline.kill()  # it could not save everything
        self.process.stdout.close()
        return code

    def end_and_start(self, generator: random.Random, problems: list[str], counts: Counter[str]) -> None:
        """Kill the process or stop it, sometimes just after it was started, and start it again."""
        is_kill = generator.random() >= STOP_PROBABILITY
        begun = time.monotonic()
        with self.timeline.during("down"):
            self._end(signal.SIGKILL if is_kill else signal.SIGTERM, begun, problems, counts)
            self.start(generator.choice(MAX_LIVE))
            if generator.random() < STOP_PROBABILITY:
                counts["SIGTERM just after the start"] += 1
                self._end(signal.SIGTERM, begun, problems, counts)
                self.start()

    def _end(self, number: signal.Signals, begun: float, problems: list[str], counts: Counter[str]) -> None:
        counts["kill -9" if number == signal.SIGKILL else "SIGTERM"] += 1
        code = self.stop(number)
        expected = -number if number == signal.SIGKILL else 0
        if code != expected and not self.timeline.was_on("full disk", begun, time.monotonic()):
            problems.append(f"exit code {code} after {number.name}")

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Leave no space for the files of the process."""
        assert self.process
        with self._disk_in_use, self.timeline.during("full disk"):
            process = self.process
            self.disk.fill(process)
            try:
                yield
            finally:
                self.disk.free(process)

    @contextmanager
    def failing_network(self) -> Iterator[None]:
        """Let the network raise."""
        with self._network_in_use, self.timeline.during("failing network"):
            (self.folder / "fail").touch()
            try:
                yield
            finally:
                (self.folder / "fail").unlink()

    @contextmanager
    def silent_connections(self) -> Iterator[None]:
        """Open more connections than the service accepts, one after the other, and send nothing."""
        url, begun, opened = urlsplit(self.address), time.monotonic(), list[socket.socket]()
        with ExitStack() as stack:
            stack.enter_context(self.timeline.during("silent connections"))
            for _ in range(self.num_silent):
                try:
                    opened.append(socket.create_connection((url.hostname or "", url.port or 0), timeout=TIMEOUT))
                except OSError:
                    break  # the service is down
                stack.enter_context(opened[-1])
            yield
            if not self.timeline.was_on("down", begun, time.monotonic()):
                self.num_closed += sum(map(is_closed, opened))


def is_closed(connection: socket.socket) -> bool:
    """Return whether the other side has closed a connection on which it has sent nothing."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


STOP_PROBABILITY = 0.2  # that the process is stopped and not killed
MAX_LIVE = (2, 64)  # streams in memory, one of these after each start


class ChaosCluster(ChaosService):
    """``ctta serve --ray`` on a cluster of two nodes on this machine; its processes are killed, paused and stopped.

    Args:
        folder: A new folder.
        disk: Where the streams are saved.
        cluster: Address of the cluster, to which this process is connected.
        port: Port of the service.
    """

    prefix = ()
    may_start_later = True
    num_silent = NUM_SILENT_ON_RAY

    def __init__(self, folder: Path, disk: SmallDisk, cluster: str, port: int) -> None:
        super().__init__(folder, disk)
        self.options = ("--ray", cluster, "--shards", NUM_SHARDS, "--shard-cpus", 0.05, "--port", port)

    def find_shard(self, stream: str) -> int:
        """Return the shard of a stream."""
        from ctta.serve.ray import find_shard

        return find_shard(stream, NUM_SHARDS)

    def running(self) -> dict[int, dict[str, Any]]:
        """Return the process and the incarnation of each shard that has one and answers."""
        try:
            response = requests.get(f"{self.address}/cluster", timeout=TIMEOUT)
            return {each["shard"]: each for each in response.json()["running"]} if response.ok else {}
        except requests.RequestException:  # the front is being restarted
            return {}

    def end_and_start(self, generator: random.Random, problems: list[str], counts: Counter[str]) -> None:
        """Kill or pause the process of a shard, kill the front, or stop the service and start it again."""
        kinds = {"kill -9 of a shard": 4, "paused shard": 2, "kill -9 of the front": 3, "SIGTERM": 1}
        (kind,) = generator.choices(list(kinds), weights=list(kinds.values()))
        counts[kind] += 1
        if kind == "SIGTERM":
            begun = time.monotonic()
            with self.timeline.during("down"):
                code = self.stop(signal.SIGTERM)
                if code != 0 and not self.timeline.was_on("full disk", begun, time.monotonic()):
                    problems.append(f"exit code {code} after SIGTERM")
                self.start()
                if generator.random() < 0.5:
                    counts["SIGTERM just after the start"] += 1
                    if self.stop(signal.SIGTERM) != 0:
                        problems.append("the service could not be stopped just after its start")
                    self.start()
        elif kind == "kill -9 of the front":
            with self.timeline.during("down"):
                os.kill(self._find_front(), signal.SIGKILL)
                self._wait(lambda: bool(self.running()), problems, kind)
        elif running := self.running():
            shard, process = generator.choice(sorted(running.items()))
            with self.timeline.during("down", shard):
                if kind == "paused shard":
                    self._pause(
                        shard, process["pid"], generator.uniform(5, 20), problems, others=running.keys() - {shard}
                    )
                else:
                    self.timeline.kill(shard)
                    os.kill(process["pid"], signal.SIGKILL)
                self._wait(
                    lambda: (
                        self.running().get(shard, process)["incarnation"] > process["incarnation"]
                        or (kind == "paused shard" and shard in self.running())
                    ),
                    problems,
                    kind,
                )

    def _pause(self, shard: int, pid: int, seconds: float, problems: list[str], others: Any) -> None:
        os.kill(pid, signal.SIGSTOP)
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                for path in ("/metrics", "/v2/health/ready", "/streams"):
                    sent = time.monotonic()
                    response = requests.get(self.address + path, timeout=TIMEOUT)
                    self.longest_wait = max(self.longest_wait, time.monotonic() - sent)
                    is_full = self.timeline.was_on("full disk", sent - 10 * INTERVAL, time.monotonic())
                    if response.status_code != 200 and others and not is_full:  # it is not ready for a while then
                        problems.append(
                            f"{path} while a process is paused: {response.status_code} {response.text[:200]}"
                        )
                time.sleep(0.5)
        except requests.RequestException as error:
            problems.append(f"while a process is paused: {error}")
        finally:
            os.kill(pid, signal.SIGCONT)

    def _find_front(self) -> int:
        from ctta.serve.ray import NAMESPACE, import_ray

        ray = import_ray()
        names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
        (name,) = (name for name in names if "-front-" in name)
        pid: int = ray.get(ray.get_actor(name, NAMESPACE).wait_until_listening.remote(), timeout=TIMEOUT)
        return pid

    def _wait(self, condition: Any, problems: list[str], kind: str) -> None:
        end = time.monotonic() + 2 * TIMEOUT
        while not condition():
            if time.monotonic() > end:
                problems.append(f"the service did not recover from: {kind}")
                return
            time.sleep(0.2)


@contextmanager
def chaos_service(folder: Path, *, on_ray: bool) -> Iterator[ChaosService]:
    """Run a service in a folder; its processes are ended afterwards."""
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(folder / "disk"))
        service = stack.enter_context(_on_cluster(folder, disk)) if on_ray else ChaosService(folder, disk)
        service.start()
        try:
            yield service
        finally:
            if service.process and service.process.poll() is None:
                service.stop(signal.SIGTERM if on_ray else signal.SIGKILL)


@contextmanager
def _on_cluster(folder: Path, disk: SmallDisk) -> Iterator[ChaosService]:
    from ctta.serve.ray import NAMESPACE, import_ray

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    ray, cluster_utils = import_ray(), import_ray("ray.cluster_utils")
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    head = {**node, "num_cpus": 0, "include_dashboard": False, "_system_config": {"worker_niceness": 0}}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**node)
        ray.init(cluster.address, namespace=NAMESPACE, log_to_driver=False)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        yield ChaosCluster(folder, disk, cluster.address, port)
    finally:
        ray.shutdown()
        cluster.shutdown()

"""Inject faults into a service at random, and check that it keeps what it promises.

    python benchmarks/chaos.py [--seconds 600] [--streams 4] [--seed 0]

A service runs in another process on loopback, with a small network. Clients send batches to it, each to its own stream,
while the process is killed, its disk is full, its network raises, and other clients are slow or send nonsense. Checked
are that after a kill every update is there that was acknowledged two snapshot intervals earlier (unless the disk was
full), that every answer equals that of a model in this process which saw the accepted batches, bit for bit, and that no
status blames the wrong side. Needs Linux, where the size of the files of another process can be limited.
"""

import argparse
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import numpy as np
import requests
import torch
from torch import Tensor

import ctta
from ctta.models import load as load_network
from ctta.serve import build_method

INTERVAL = 0.5  # seconds between two snapshots
GRACE = 2.0  # seconds for a request in progress and for a machine that is busy
NETWORK = """
import os
import torch
from torch import nn

class Faulty(nn.Sequential):
    def forward(self, x):
        if os.path.exists(os.environ.get("CHAOS_FAIL_FILE", "")):
            raise RuntimeError("the network fails")
        return super().forward(x)

def net():
    torch.manual_seed(0)
    return Faulty(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 7 * 7, 5))
"""
FAULTS = ("full disk", "failing network", "bad requests")
BAD_REQUESTS = (b"", b"[" * 10_000, b'{"inputs": []}', b'{"inputs": [{"name": "input", "shape": [1], "data": [[[]]]}]}')


def make_batch(stream: int, number: int) -> Tensor:
    """Return the batch that is number ``number`` of a stream."""
    return torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1_000_000 * stream + number))


class ChaosService:
    """The service, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, ""
        (folder / "network.py").write_text(NETWORK)
        self.spec = f"file:{folder / 'network.py'}:net"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start, and wait until it listens."""
        options = ["--model", self.spec, "--method", "tent", "--no-guard", "--window", "0", "--size", "16", "16"]
        options += ["--state", str(self.folder / "state"), "--port", "0", "--snapshot-every", str(INTERVAL)]
        command = [sys.executable, "-c", "from ctta.cli import main; main()", "serve", *options]
        with (self.folder / "log").open("a") as log:
            environment = {**os.environ, "CHAOS_FAIL_FILE": str(self.folder / "fail")}
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert self.process.stdout
        self.address = self.process.stdout.readline().split()[-1]

    def stop(self, number: signal.Signals) -> int:
        """Send a signal, and return the exit code."""
        assert self.process and self.process.stdout
        self.process.send_signal(number)
        code = self.process.wait(120)
        self.process.stdout.close()
        return code

    def set_disk_full(self, is_full: bool) -> None:
        """Let every write of the process fail, or succeed again."""
        assert self.process
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (0 if is_full else hard, hard))

    def set_network_failing(self, is_failing: bool) -> None:
        """Let the network raise, or work again."""
        file = self.folder / "fail"
        file.touch() if is_failing else file.unlink()


class ChaosClient:
    """Send batches to a stream one after the other, and compare each answer with a model in this process."""

    def __init__(self, service: ChaosService, stream: int, problems: list[str], counts: Counter[str]) -> None:
        self.service, self.stream, self.problems, self.counts = service, stream, problems, counts
        self.template = build_method(load_network(service.spec), "tent")
        self.model = self.template.fork()
        self.accepted: list[tuple[int, float]] = []  # number of the batch, and when it was acknowledged
        self.unanswered: int | None = None  # a batch whose connection broke
        self.num_batches = 0

    def send(self) -> None:
        """Send the next batch."""
        number, self.num_batches = self.num_batches, self.num_batches + 1
        x = make_batch(self.stream, number)
        head = {
            "inputs": [{"name": "input", "datatype": "FP32", "shape": list(x.shape)}],
            "parameters": {"sequence_id": f"s{self.stream}", "binary_data_output": True},
            "outputs": [{"name": "logits"}],
        }
        head["inputs"][0]["parameters"] = {"binary_data_size": x.nbytes}  # type: ignore[index]
        text = json.dumps(head).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        url = f"{self.service.address}/v2/models/ctta/infer"
        try:
            response = requests.post(url, data=text + x.numpy().tobytes(), headers=headers, timeout=120)
        except requests.RequestException:
            self.unanswered = number
            return
        self.counts["requests"] += 1
        self.counts[f"status {response.status_code}"] += 1
        if response.status_code == 200:
            self.accepted.append((number, time.monotonic()))
            logits = np.frombuffer(response.content[int(response.headers["Inference-Header-Content-Length"]) :], "<f4")
            if not np.array_equal(logits.reshape(len(x), -1), self.model(x).numpy()):
                self.problems.append(f"stream {self.stream}: the answer to batch {number} differs from the replay")
        elif response.status_code not in (429, 500, 503):
            self.problems.append(f"stream {self.stream}: status {response.status_code} for a good request")

    def check_restart(self, killed_at: float, unsaved_since: float | None) -> None:
        """Check which updates are there after a restart, and continue from them."""
        response = requests.get(f"{self.service.address}/streams/s{self.stream}", timeout=120)
        num_updates = response.json()["updates"] if response.status_code == 200 else 0
        deadline = min(killed_at, unsaved_since or killed_at) - 2 * INTERVAL - GRACE
        num_due = sum(at < deadline for _, at in self.accepted)
        if num_updates < num_due:
            self.problems.append(f"stream {self.stream}: {num_due - num_updates} updates were lost")
            self.counts["updates lost"] += num_due - num_updates
        if num_updates == len(self.accepted) + 1 and self.unanswered is not None:
            self.accepted.append((self.unanswered, killed_at))  # accepted, although the answer did not arrive
        if num_updates > len(self.accepted):
            self.problems.append(f"stream {self.stream}: has updates that nobody requested")
        self.counts["recent updates dropped by kills"] += len(self.accepted) - num_updates
        del self.accepted[num_updates:]
        self.model, self.unanswered = self.template.fork(), None
        for number, _ in self.accepted:
            self.model(make_batch(self.stream, number))


def send_nonsense(address: str, problems: list[str], generator: random.Random) -> None:
    """Send a bad request, which must be answered as such, and leave in the middle of another."""
    url = urlsplit(address)
    try:
        response = requests.post(f"{address}/v2/models/ctta/infer", data=generator.choice(BAD_REQUESTS), timeout=120)
        if response.status_code != 400:
            problems.append(f"status {response.status_code} for a bad request")
        with socket.create_connection((url.hostname or "", url.port or 0), timeout=120) as connection:
            connection.sendall(b"POST /streams/s0/image HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n")
            time.sleep(generator.uniform(0, 0.5))
            connection.sendall(b"half")
    except (OSError, requests.RequestException):
        pass  # killed meanwhile


def run(seconds: float, num_streams: int, seed: int) -> tuple[list[str], Counter[str]]:
    """Inject faults for a time, and return the problems and what was counted."""
    generator, problems, counts = random.Random(seed), list[str](), Counter[str]()
    with TemporaryDirectory() as folder:
        service = ChaosService(Path(folder))
        service.start()
        end = time.monotonic() + seconds
        clients = [ChaosClient(service, stream, problems, counts) for stream in range(num_streams)]
        while time.monotonic() < end and not problems:
            is_stopping = threading.Event()

            def work(client: ChaosClient, is_stopping: threading.Event = is_stopping) -> None:
                while not is_stopping.is_set() and client.unanswered is None:
                    client.send()

            threads = [threading.Thread(target=work, args=(client,)) for client in clients]
            for thread in threads:
                thread.start()
            unsaved_since = inject(service, generator, problems, counts)
            killed_at = time.monotonic()
            if service.stop(signal.SIGKILL) != -signal.SIGKILL:
                problems.append("the service had ended by itself")
            is_stopping.set()
            for thread in threads:
                thread.join()
            counts["kill -9"] += 1
            service.start()
            for client in clients:
                client.check_restart(killed_at, unsaved_since)
        if service.stop(signal.SIGTERM) != 0:
            problems.append("the service could not be stopped")
    return problems, counts


def inject(service: ChaosService, generator: random.Random, problems: list[str], counts: Counter[str]) -> float | None:
    """Inject each fault once, and return since when the disk is full, if it is at the end."""
    unsaved_since = None
    for fault in generator.sample(FAULTS, len(FAULTS)):
        time.sleep(generator.uniform(0.2, 1.5))
        counts[fault] += 1
        if fault == "bad requests":
            send_nonsense(service.address, problems, generator)
        elif fault == "failing network":
            service.set_network_failing(True)
            time.sleep(generator.uniform(0.1, 0.5))
            service.set_network_failing(False)
        else:
            unsaved_since = time.monotonic()
            service.set_disk_full(True)
            time.sleep(generator.uniform(0.5, 2))
            if generator.random() < 0.7:
                service.set_disk_full(False)
                time.sleep(2 * INTERVAL + GRACE)
                unsaved_since = None
    return unsaved_since


def main() -> None:
    """Inject faults, and print a summary."""
    parser = argparse.ArgumentParser(description="Inject faults into a service at random.")
    parser.add_argument("--seconds", type=float, default=600, help="duration")
    parser.add_argument("--streams", type=int, default=4, help="streams, each with a client")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    problems, counts = run(arguments.seconds, arguments.streams, arguments.seed)
    print(f"ctta {ctta.__version__}, {arguments.streams} streams, seed {arguments.seed}")
    first = ("kill -9", *FAULTS, "requests", "updates lost")
    for name in (*first, *sorted(counts.keys() - set(first))):
        print(f"{name:34}{counts[name]:8}")
    sys.exit("\n".join(problems) if problems else 0)


if __name__ == "__main__":
    main()

"""Measure throughput and latency of `ctta serve`, against the same guarded model that is called in a loop.

    python -m benchmarks.speed.serve_load [--method tent] [--batch 32] [--clients 2] [--workers 1] [--requests 12]
    python -m benchmarks.speed.serve_load --batch 1 --clients 8 --requests 60

The service runs in another process with the embedded network, one worker and one torch thread by default. Clients, each
with its own process and stream, send images as raw bytes in the Open Inference Protocol, and wait for each answer. The
loop has a model for each stream, which get the same batches in the same numbers from one thread of this process; single
images are only predicted, by the network as it was trained, as the service does for streams without a window. Loops
and clients take turns, in rounds of alternating order, so that other load on the machine affects them alike. The
clients take a part of the cores from the service, and none from the loop. Beside the ratio of throughputs, which other
load on the machine makes noisy, there is that of the CPU time per image of the two processes, without the clients.
"round trip" is what a request costs that does nothing.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

import ctta
from benchmarks.speed.measurements import median_interval, seconds
from benchmarks.speed.serve_clients import Camera, ClientProcesses
from ctta.core.model import AdaptiveModel
from ctta.data.datasets import sample
from ctta.guard import Guarded, InputSpec
from ctta.serve import build_method

NUM_IMAGES = 512  # that every client sends again and again


@dataclass
class Timing:
    """Latencies of all calls, the time of each round, and the CPU time of all rounds, in seconds."""

    latencies: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    cpu_time: float = 0.0

    def measure(self, run: Callable[[], list[float]], cpu_clock: Callable[[], float]) -> None:
        """Run a round."""
        started, cpu_started = time.perf_counter(), cpu_clock()
        self.latencies += run()
        self.rounds.append(time.perf_counter() - started)
        self.cpu_time += cpu_clock() - cpu_started

    def percentile(self, percent: int) -> float:
        """Return a percentile of the latencies in milliseconds."""
        return 1000 * statistics.quantiles(self.latencies, n=100)[percent - 1]


class Loop:
    """Models that are called in a loop, as an application would in its own process."""

    def __init__(self, arguments: argparse.Namespace, images: Tensor) -> None:
        net = ctta.models.embedded().eval()
        self.batches, self.net, self.num_sent = images.split(arguments.batch), net, 0
        spec = InputSpec(low=0, high=1)
        self.models: list[AdaptiveModel] = [
            Guarded(build_method(net, arguments.method), input_spec=spec) for _ in range(arguments.clients)
        ]

    def run(self, count: int, *, adapt: bool) -> list[float]:
        """Call each model with the next batches, and return the latencies."""
        found = []
        for number in range(self.num_sent, self.num_sent + count):
            x = self.batches[number % len(self.batches)]
            for model in self.models:
                predict = self._predict_single if len(x) == 1 else model.predict
                found.append(seconds(partial(model if adapt else predict, x)))
        self.num_sent += count
        return found

    def _predict_single(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.net(x)
        return logits


@contextmanager
def start_service(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, int]]:
    """Start a service in another process, and yield its address and the id of the process."""
    options = ["--model", "embedded", "--method", arguments.method, "--port", "0", "--state", str(folder)]
    workers = ["--workers", str(arguments.workers)]
    command = [sys.executable, "-c", "from ctta.cli import main; main()", "serve", *options, *workers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1], server.pid
        finally:
            server.terminate()


def read_cpu_time(process: int) -> float:
    """Return the CPU time of a process and its threads in seconds."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Start a service and measure it."""
    parser = argparse.ArgumentParser(description="Measure the throughput and latency of a service.")
    parser.add_argument("--method", default="tent")
    parser.add_argument("--batch", type=int, default=32, help="images per request")
    parser.add_argument("--requests", type=int, default=12, help="requests of each client in a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind")
    parser.add_argument("--clients", type=int, default=2, help="clients, each with its own process and stream")
    parser.add_argument("--workers", type=int, default=1, help="worker threads of the service")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images = torch.from_numpy(sample().images[:NUM_IMAGES]).permute(0, 3, 1, 2).float().div(255).contiguous()
    with TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "images.npy", images.numpy())
        with start_service(arguments, folder / "state") as (address, server):
            clients = ClientProcesses(address, folder / "images.npy", batch=arguments.batch, count=arguments.clients)
            try:
                timings = measure(arguments, clients, Loop(arguments, images), partial(read_cpu_time, server))
                camera = Camera(address, "ping", images.numpy(), 1)
                timings["round trip"] = Timing([camera.ping() for _ in range(100)])
            finally:
                clients.stop()
    print_table(arguments, timings)


def measure(
    arguments: argparse.Namespace, clients: ClientProcesses, loop: Loop, cpu_clock: Callable[[], float]
) -> dict[str, Timing]:
    """Let the loop and the clients take turns."""
    count = arguments.requests
    modes = {"predict only": False} if arguments.batch == 1 else {"predict only": False, "adapt": True}
    runs: dict[str, Callable[[], list[float]]] = {}
    for mode, adapt in modes.items():
        runs[f"{mode}, loop"] = partial(loop.run, count, adapt=adapt)
        runs[f"{mode}, service"] = partial(clients.run, count, adapt=adapt)
    for run in runs.values():
        run()  # warm up
    timings = {name: Timing() for name in runs}
    for number in range(arguments.rounds):
        for name in list(runs)[:: 1 if number % 2 == 0 else -1]:
            timings[name].measure(runs[name], cpu_clock if name.endswith("service") else time.process_time)
    return timings


def print_table(arguments: argparse.Namespace, timings: dict[str, Timing]) -> None:
    """Print throughput, the ratio of the service to the loop by rounds, and percentiles of the latency."""
    method, clients, batch, workers = arguments.method, arguments.clients, arguments.batch, arguments.workers
    print(f"{method}, guarded; {clients} clients, {batch} images per request, {workers} workers")
    print(f"{'':24}images/s          service / loop    by CPU       p50       p99   p99/p50")
    for name, timing in timings.items():
        speed = batch * len(timing.latencies) / sum(timing.rounds) if timing.rounds else 0.0
        ratio = by_cpu = ""
        if name.endswith("service"):
            loop = timings[name.replace("service", "loop")]
            ratios = [ours / theirs for ours, theirs in zip(loop.rounds, timing.rounds, strict=True)]
            low, high = median_interval(ratios)
            ratio = f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
            by_cpu = f"{loop.cpu_time / timing.cpu_time:.2f}"
        p50, p99 = timing.percentile(50), timing.percentile(99)
        print(f"{name:24}{speed:8.1f}{ratio:>24}{by_cpu:>10}{p50:7.1f} ms{p99:7.1f} ms{p99 / p50:10.1f}")


if __name__ == "__main__":
    main()

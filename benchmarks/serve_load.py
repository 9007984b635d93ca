"""Measure throughput and latency of `ctta serve`, predicting and adapting, against the bare network.

    python benchmarks/serve_load.py [--method tent] [--batch 32] [--requests 60] [--clients 2]

The service runs in another process with the embedded network. Clients, each with its own stream, send batches as raw
bytes in the Open Inference Protocol. The measurements take turns in rounds, so that other load on the machine affects
them alike. "round trip" is what a request costs that does nothing, on a connection that is kept open.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from tempfile import TemporaryDirectory

import requests
import torch
from baseline import forward
from measurements import seconds

import ctta

ROUNDS = 5


def request_body(batch: int, *, stream: int, adapt: bool) -> tuple[bytes, dict[str, str]]:
    """Return a batch of noise as a request body, and the header with the length of its JSON part."""
    data = torch.rand(batch, 3, 32, 32).numpy().tobytes()
    tensor = {"name": "input", "datatype": "FP32", "shape": [batch, 3, 32, 32]}
    head = json.dumps(
        {
            "inputs": [{**tensor, "parameters": {"binary_data_size": len(data)}}],
            "parameters": {"sequence_id": f"load{stream}", "adapt": adapt, "binary_data_output": True},
        }
    ).encode()
    return head + data, {"Inference-Header-Content-Length": str(len(head))}


def send(session: requests.Session, address: str, batch: int, stream: int, adapt: bool) -> None:
    """Send a request, which must succeed."""
    body, headers = request_body(batch, stream=stream, adapt=adapt)
    session.post(f"{address}/v2/models/ctta/infer", data=body, headers=headers, timeout=600).raise_for_status()


def client(address: str, batch: int, count: int, adapt: bool, stream: int) -> list[float]:
    """Return the latencies of one client that waits for each answer."""
    with requests.Session() as session:
        return [seconds(partial(send, session, address, batch, stream, adapt)) for _ in range(count)]


def round_trips(address: str, count: int) -> list[float]:
    """Return the latencies of requests that do nothing, on one connection."""
    with requests.Session() as session:
        return [seconds(partial(session.get, f"{address}/v2/health/live", timeout=600)) for _ in range(count)]


def load(address: str, batch: int, count: int, clients: int, *, adapt: bool) -> list[float]:
    """Return the latencies of several clients at once, each of which sends its part of the requests."""
    with ThreadPoolExecutor(clients) as pool:
        found = pool.map(partial(client, address, batch, count // clients, adapt), range(clients))
        return [latency for latencies in found for latency in latencies]


def main() -> None:
    """Start a service and measure it."""
    parser = argparse.ArgumentParser(description="Measure the throughput and latency of a service.")
    parser.add_argument("--method", default="tent")
    parser.add_argument("--batch", type=int, default=32, help="images per request")
    parser.add_argument("--requests", type=int, default=60, help="requests of each kind")
    parser.add_argument("--clients", type=int, default=2, help="concurrent clients, each with its own stream")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    net, x = ctta.models.embedded(), torch.rand(arguments.batch, 3, 32, 32)
    with TemporaryDirectory() as folder:
        options = ["--model", "embedded", "--method", arguments.method, "--port", "0", "--state", folder]
        workers = ["--workers", str(arguments.clients)]
        command = [sys.executable, "-c", "from ctta.cli import main; main()", "serve", *options, *workers]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            try:
                measure(address, arguments, bare=partial(forward, net, x))
            finally:
                server.terminate()


def measure(address: str, arguments: argparse.Namespace, *, bare: Callable[[], object]) -> None:
    """Measure each in turn, and print a table."""
    batch, clients, count = arguments.batch, arguments.clients, arguments.requests // ROUNDS
    measurements: dict[str, Callable[[], list[float]]] = {
        "bare network": lambda: [seconds(bare) for _ in range(count)],
        "predict only": partial(load, address, batch, count, clients, adapt=False),
        "adapt": partial(load, address, batch, count, clients, adapt=True),
        "round trip": partial(round_trips, address, count),
    }
    latencies: dict[str, list[float]] = {name: [] for name in measurements}
    spent = dict.fromkeys(measurements, 0.0)
    for run in measurements.values():
        run()  # warm up
    for _ in range(ROUNDS):
        for name, run in measurements.items():
            started = time.perf_counter()
            latencies[name] += run()
            spent[name] += time.perf_counter() - started
    print(f"{arguments.method}, guarded; {clients} clients, batches of {batch}")
    print(f"{'':16}images/s   ratio         p50         p99")
    speeds = {name: batch * len(latencies[name]) / spent[name] for name in measurements}
    speeds["round trip"] = 0  # without images
    for name, speed in speeds.items():
        milliseconds = sorted(1000 * latency for latency in latencies[name])
        p99 = statistics.quantiles(milliseconds, n=100)[-1]
        print(
            f"{name:16}{speed:8.1f}{speed / speeds['bare network']:8.2f}"
            f"{statistics.median(milliseconds):9.1f} ms{p99:9.1f} ms"
        )


if __name__ == "__main__":
    main()

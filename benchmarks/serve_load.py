"""What `ctta serve` costs beside the bare network: throughput and latency, to predict only and to adapt.

    python benchmarks/serve_load.py [--method tent] [--batch 32] [--requests 60] [--clients 2]

The service runs in a second process with the embedded network. Clients, each with a stream of its own, send batches as
raw bytes in the Open Inference Protocol. Bare, predict-only and adapting take turns in rounds, so that a noisy machine
disturbs them alike.
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
from bare import forward
from measuring import seconds

import ctta

ROUNDS = 5


def request_body(batch: int, *, stream: int, adapt: bool) -> tuple[bytes, dict[str, str]]:
    """A batch of noise as bytes, and the header that says where they begin."""
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
    """One request, which must succeed."""
    body, headers = request_body(batch, stream=stream, adapt=adapt)
    session.post(f"{address}/v2/models/ctta/infer", data=body, headers=headers, timeout=600).raise_for_status()


def client(address: str, batch: int, count: int, adapt: bool, stream: int) -> list[float]:
    """The latencies of one client that waits for each answer."""
    with requests.Session() as session:
        return [seconds(partial(send, session, address, batch, stream, adapt)) for _ in range(count)]


def load(address: str, batch: int, count: int, clients: int, *, adapt: bool) -> list[float]:
    """The latencies of clients at once, each with its share of the requests."""
    with ThreadPoolExecutor(clients) as pool:
        found = pool.map(partial(client, address, batch, count // clients, adapt), range(clients))
        return [latency for latencies in found for latency in latencies]


def main() -> None:
    parser = argparse.ArgumentParser(description="Load a service.")
    parser.add_argument("--method", default="tent")
    parser.add_argument("--batch", type=int, default=32, help="images of a request")
    parser.add_argument("--requests", type=int, default=60, help="of each kind")
    parser.add_argument("--clients", type=int, default=2, help="at once, each with a stream of its own")
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
    """A table of the three, by turns."""
    batch, clients, count = arguments.batch, arguments.clients, arguments.requests // ROUNDS
    kinds: dict[str, Callable[[], list[float]]] = {
        "bare network": lambda: [seconds(bare) for _ in range(count)],
        "predict only": partial(load, address, batch, count, clients, adapt=False),
        "adapt": partial(load, address, batch, count, clients, adapt=True),
    }
    latencies: dict[str, list[float]] = {name: [] for name in kinds}
    spent = dict.fromkeys(kinds, 0.0)
    for run in kinds.values():
        run()  # to warm up
    for _ in range(ROUNDS):
        for name, run in kinds.items():
            started = time.perf_counter()
            latencies[name] += run()
            spent[name] += time.perf_counter() - started
    print(
        f"{arguments.method}, guarded; {clients} clients, batches of {batch}\n{'':16}images/s   ratio      p50      p99"
    )
    speeds = {name: batch * len(latencies[name]) / spent[name] for name in kinds}
    for name, speed in speeds.items():
        milliseconds = sorted(1000 * latency for latency in latencies[name])
        p99 = statistics.quantiles(milliseconds, n=100)[-1]
        print(
            f"{name:16}{speed:8.1f}{speed / speeds['bare network']:8.2f}"
            f"{statistics.median(milliseconds):7.0f} ms{p99:6.0f} ms"
        )


if __name__ == "__main__":
    main()

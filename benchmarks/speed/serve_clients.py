"""A client of `ctta serve` in a process of its own, which sends requests on command and reports their latencies.

    python -m benchmarks.speed.serve_clients ADDRESS STREAM IMAGES.npy BATCH

It reads lines of JSON, ``{"adapt": bool, "count": int}``, and answers each with the latencies in seconds.
"""

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray


class Camera:
    """Send batches of images one after the other, as raw bytes on a connection that is kept open."""

    def __init__(self, address: str, stream: str, images: NDArray[np.float32], batch: int) -> None:
        self.connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=600)
        self.stream, self.num_sent = stream, 0
        self.batches = [images[start : start + batch].tobytes() for start in range(0, len(images) - batch + 1, batch)]
        self.shape = [batch, *images.shape[1:]]

    def send(self, *, adapt: bool) -> float:
        """Send the next batch, and return the seconds until the answer was read."""
        data = self.batches[self.num_sent % len(self.batches)]
        tensor = {"name": "input", "datatype": "FP32", "shape": self.shape}
        head = json.dumps(
            {
                "inputs": [{**tensor, "parameters": {"binary_data_size": len(data)}}],
                "parameters": {"sequence_id": self.stream, "adapt": adapt, "binary_data_output": True},
            }
        ).encode()
        body, headers = head + data, {"Inference-Header-Content-Length": str(len(head))}
        started = time.perf_counter()
        self.connection.request("POST", "/v2/models/ctta/infer", body, headers)
        response = self.connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {content[:200]!r}")
        self.num_sent += 1
        return time.perf_counter() - started

    def ping(self) -> float:
        """Send a request that does nothing."""
        started = time.perf_counter()
        self.connection.request("GET", "/v2/health/live")
        self.connection.getresponse().read()
        return time.perf_counter() - started


class ClientProcesses:
    """Several clients, each with its own process and stream."""

    def __init__(self, address: str, images: Path, *, batch: int, count: int) -> None:
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.speed.serve_clients",
                    address,
                    f"load{number}",
                    str(images),
                    str(batch),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(count)
        ]

    def run(self, count: int, *, adapt: bool) -> list[float]:
        """Let all of them send a number of requests at once, and return the latencies."""
        for process in self.processes:
            assert process.stdin
            process.stdin.write(json.dumps({"adapt": adapt, "count": count}) + "\n")
            process.stdin.flush()
        latencies: list[float] = []
        for process in self.processes:
            assert process.stdout
            latencies += json.loads(process.stdout.readline())
        return latencies

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.communicate(timeout=60)


def main(arguments: Sequence[str]) -> None:
    """Send requests as told on the standard input."""
    address, stream, images, batch = arguments
    camera = Camera(address, stream, np.load(images), int(batch))
    for line in sys.stdin:
        command = json.loads(line)
        camera.connection.close()  # and opened again: the service closes those that are idle for some seconds
        print(json.dumps([camera.send(adapt=command["adapt"]) for _ in range(command["count"])]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

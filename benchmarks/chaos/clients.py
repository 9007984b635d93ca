"""Clients of benchmarks/chaos/run.py: those that use the service and check it, and those that misuse it."""

import copy
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import numpy as np
import requests
import torch
from torch import Tensor

from benchmarks.chaos.service import ChaosService
from ctta.core.model import AdaptiveModel
from ctta.models import load as load_network
from ctta.serve import build_method

TIMEOUT = 30.0  # seconds; a request that takes longer hangs
CHUNK = 512  # bytes
PAUSE = 0.02  # seconds between two requests of a client
COPY_EVERY, NUM_COPIES = 10, 60  # batches between two copies of the replayed model, and how many are kept
BAD_BODIES = (
    b"",
    b"[" * 10_000,
    b'{"inputs": []}',
    b'{"inputs": [{"name": "input", "shape": [1], "data": [[[]]]}]}',
    b'{"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 3, 16, 16], "data": [NaN]}]}',
    b'{"inputs": [{"name": "input", "datatype": "FP32", "shape": [4294967296, 3, 16, 16],'
    b' "parameters": {"binary_data_size": 1e9}}]}',
)


def make_batch(stream: int, number: int) -> Tensor:
    """Return the batch that is number ``number`` of a stream."""
    return torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1_000_000 * stream + number))


class TrickledBody:
    """A body of known length that is sent in small parts, with pauses.

    Args:
        body: The body.
        pause: Returns the seconds to wait before the next part.
    """

    def __init__(self, body: bytes, pause: Callable[[], float]) -> None:
        self.body, self.pause = body, pause

    def __len__(self) -> int:
        return len(self.body)

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self.body), CHUNK):
            time.sleep(self.pause())
            yield self.body[start : start + CHUNK]


class ChaosClient:
    """Send batches to a stream one after the other, and compare each answer with a model in this process.

    Args:
        service: The service.
        stream: Number of the stream.
        problems: Gets what the service did wrong.
        counts: Counts requests.
        chunk_pause: Called before each part of a body is sent; None to send it at once.
    """

    def __init__(
        self,
        service: ChaosService,
        stream: int,
        problems: list[str],
        counts: Counter[str],
        chunk_pause: Callable[[], float] | None = None,
    ) -> None:
        self.service, self.stream, self.problems, self.counts = service, stream, problems, counts
        self.chunk_pause = chunk_pause
        self.template = build_method(load_network(service.spec), "tent")
        self.model: AdaptiveModel = self.template.fork()
        self.copies: dict[int, AdaptiveModel] = {}  # the model after a number of accepted batches
        self.accepted: list[tuple[int, float]] = []  # number of the batch, and when it was acknowledged
        self.unanswered: int | None = None  # a batch whose connection broke
        self.num_batches = 0
        self.oldest_dropped = 0.0  # seconds between the acknowledgment of an update and the kill that dropped it

    def work(self) -> None:
        """Send batches until the process ends."""
        while self.service.ended_at == float("inf") and self.unanswered is None:
            self.send()
            time.sleep(PAUSE)

    def send(self) -> None:
        """Send the next batch."""
        number, self.num_batches = self.num_batches, self.num_batches + 1
        x = make_batch(self.stream, number)
        text = json.dumps(
            {
                "inputs": [
                    {
                        "name": "input",
                        "datatype": "FP32",
                        "shape": list(x.shape),
                        "parameters": {"binary_data_size": x.nbytes},
                    }
                ],
                "parameters": {"sequence_id": f"s{self.stream}", "binary_data_output": True},
                "outputs": [{"name": "logits"}],
            }
        ).encode()
        body = text + x.numpy().tobytes()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        sent = time.monotonic()
        try:
            response = requests.post(
                f"{self.service.address}/v2/models/ctta/infer",
                data=body if self.chunk_pause is None else TrickledBody(body, self.chunk_pause),
                headers=headers,
                timeout=TIMEOUT,
            )
            content = response.content
        except requests.RequestException as error:
            self.unanswered = number
            if self.service.ended_at == float("inf"):
                self.problems.append(f"stream {self.stream}: no answer from a service that runs ({error})")
            return
        answered = time.monotonic()
        self.counts["requests"] += 1
        self.counts[f"status {response.status_code}"] += 1
        if self.chunk_pause is not None:
            self.counts["slow requests"] += 1
        if response.status_code != 200:
            self._check_failure(response, sent, answered)
            return
        self.accepted.append((number, answered))
        self.counts["updates acknowledged"] += 1
        logits = np.frombuffer(content[int(response.headers["Inference-Header-Content-Length"]) :], "<f4")
        if not np.array_equal(logits.reshape(len(x), -1), self.model(x).numpy()):
            self.problems.append(f"stream {self.stream}: the answer to batch {number} differs from the replay")
        if len(self.accepted) % COPY_EVERY == 0:
            self._keep_copy()

    def _check_failure(self, response: requests.Response, sent: float, answered: float) -> None:
        """Report a status that blames the wrong side: a good request fails only while there is a fault."""
        was_on = self.service.timeline.was_on
        is_explained = {
            500: was_on("failing network", sent, answered),
            503: was_on("full disk", sent, answered) or was_on("stopping", sent, answered),
        }.get(response.status_code, False)
        if not is_explained:
            message = f"status {response.status_code} without a fault: {response.text[:200]}"
            self.problems.append(f"stream {self.stream}: {message}")

    def _keep_copy(self) -> None:
        self.copies[len(self.accepted)] = copy.deepcopy(self.model, {id(self.model.source): self.model.source})
        while len(self.copies) > NUM_COPIES:
            del self.copies[min(self.copies)]

    def check_restart(self, ended_at: float, *, is_saved: bool) -> None:
        """Check which updates are there after a restart, and continue from them.

        Args:
            ended_at: When the process was killed or stopped.
            is_saved: Whether it had the chance to save everything.
        """
        response = requests.get(f"{self.service.address}/streams/s{self.stream}", timeout=TIMEOUT)
        num_updates = response.json()["updates"] if response.status_code == 200 else 0
        compute_due = self.service.timeline.compute_due
        num_due = len(self.accepted) if is_saved else sum(compute_due(at) < ended_at for _, at in self.accepted)
        if num_updates < num_due:
            self.problems.append(f"stream {self.stream}: {num_due - num_updates} updates were lost")
            self.counts["updates lost"] += num_due - num_updates
        if num_updates == len(self.accepted) + 1 and self.unanswered is not None:
            self.accepted.append((self.unanswered, ended_at))  # accepted, although the answer did not arrive
        if num_updates > len(self.accepted):
            self.problems.append(f"stream {self.stream}: has updates that nobody requested")
        if num_updates < len(self.accepted):
            at = self.accepted[num_updates][1]
            self.counts["recent updates dropped by kills"] += len(self.accepted) - num_updates
            if not self.service.timeline.was_on("full disk", at, ended_at):
                self.oldest_dropped = max(self.oldest_dropped, ended_at - at)
        self.unanswered = None
        self._rewind(num_updates)

    def _rewind(self, num_updates: int) -> None:
        """Return to the model after a number of updates."""
        del self.accepted[num_updates:]
        self.copies = {count: model for count, model in self.copies.items() if count <= num_updates}
        start = max(self.copies, default=0)
        known = self.copies.get(start)
        self.model = self.template.fork() if known is None else copy.deepcopy(known, {id(known.source): known.source})
        for number, _ in self.accepted[start:]:
            self.model(make_batch(self.stream, number))


def send_bad_request(service: ChaosService, problems: list[str], generator: random.Random) -> None:
    """Send a bad request, which must be answered as such, whatever else is wrong."""
    body = generator.choice(BAD_BODIES)
    try:
        response = requests.post(f"{service.address}/v2/models/ctta/infer", data=body, timeout=TIMEOUT)
    except requests.RequestException:
        if service.ended_at == float("inf"):
            problems.append("no answer to a bad request")
        return
    if response.status_code != 400:
        problems.append(f"status {response.status_code} for the bad request {body[:80]!r}")


def leave_early(service: ChaosService, generator: random.Random) -> None:
    """Announce a body, send half of it in pieces, and leave."""
    head = b"POST /streams/leaver/image HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    _talk(service, [head, *[b"x"] * 50], lambda: generator.uniform(0, 0.1))


def read_nothing(service: ChaosService, generator: random.Random) -> None:
    """Ask for much more than the buffers of a connection hold, and read none of it for seconds."""
    _talk(service, [b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200], lambda: generator.uniform(2, 4))


def _talk(service: ChaosService, parts: list[bytes], pause: Callable[[], float]) -> None:
    url = urlsplit(service.address)
    try:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(TIMEOUT)
            connection.connect((url.hostname or "", url.port or 0))
            for part in parts:
                if service.ended_at < float("inf"):
                    return
                connection.sendall(part)
                time.sleep(pause())
    except OSError:
        pass  # the service may have been killed, and may close such a connection

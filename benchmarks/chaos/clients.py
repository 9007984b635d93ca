"""Clients of benchmarks/chaos/run.py: those that use the service and check it, and those that misuse it."""

import copy
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from threading import Event
from urllib.parse import urlsplit

import numpy as np
import requests
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.chaos.service import TIMEOUT, ChaosService, Kind
from ctta.core.model import AdaptiveModel
from ctta.models import load as load_network
from ctta.serve import build_method
from ctta.serve.protocol import DEFAULT_STREAM
from ctta.serve.ray import read_slots

PATIENCE = 180.0  # seconds until a batch that is sent again and again is answered
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

    Each batch has an idempotency key and is sent until it is answered, so that it must count once, whatever happens.

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
        self.name, self.shard = f"s{stream}", service.find_shard(f"s{stream}")
        self.chunk_pause = chunk_pause
        self.template = build_method(load_network(service.spec), "tent")
        self.model: AdaptiveModel = self.template.fork()
        self.copies: dict[int, AdaptiveModel] = {}  # the model after a number of accepted batches
        self.accepted: list[tuple[int, float]] = []  # number of the batch, and when it was acknowledged
        self.oldest_dropped = 0.0  # seconds between the acknowledgment of an update and the kill that dropped it

    def work(self, is_over: Event) -> None:
        """Send batches until the attack is over, and the last one until it is answered."""
        number = 0
        while not is_over.is_set() and not self.problems:
            number += 1
            end = time.monotonic() + PATIENCE
            while not self.send(number):
                if self.problems:
                    return
                if time.monotonic() > end:
                    self.problems.append(f"stream {self.stream}: batch {number} was not answered for {PATIENCE:g} s")
                    return
                time.sleep(0.2)
                self.counts["requests sent again"] += 1
            time.sleep(PAUSE)

    def send(self, number: int) -> bool:
        """Send a batch, and return whether it was answered."""
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
                "parameters": {"sequence_id": self.name, "binary_data_output": True},
                "outputs": [{"name": "logits"}],
            }
        ).encode()
        body = text + x.numpy().tobytes()
        headers = {"Inference-Header-Content-Length": str(len(text)), "Idempotency-Key": str(number)}
        sent = time.monotonic()
        self.counts["requests"] += 1
        self.counts["slow requests"] += self.chunk_pause is not None
        try:
            response = requests.post(
                f"{self.service.address}/v2/models/ctta/infer",
                data=body if self.chunk_pause is None else TrickledBody(body, self.chunk_pause),
                headers=headers,
                timeout=TIMEOUT,
            )
            content = response.content
        except requests.RequestException as error:
            causes = find_causes(self.service, sent)
            self.counts[f"no answer ({' and '.join(causes) or 'no cause'})"] += 1
            if not causes:
                self.problems.append(f"stream {self.stream}: no answer from a service that runs ({error})")
            return False
        self.counts[f"status {response.status_code}"] += 1
        if response.status_code != 200:
            self._check_failure(response, sent)
            return False
        length = int(response.headers["Inference-Header-Content-Length"])
        logits = np.frombuffer(content[length:], "<f4").reshape(len(x), -1)
        self._check_answer(number, x, logits, json.loads(content[:length])["parameters"]["update"])
        return True

    def _check_answer(self, number: int, x: Tensor, logits: NDArray[np.float32], num_updates: int) -> None:
        """Check which updates the stream has, and compare the answer with that of a model which saw the same."""
        if num_updates > len(self.accepted) + 1:
            self.problems.append(f"stream {self.stream}: update {num_updates}, and {len(self.accepted)} were requested")
        elif num_updates <= len(self.accepted):
            self._check_dropped(num_updates - 1)
            self._rewind(num_updates - 1)
        self.accepted.append((number, time.monotonic()))
        self.counts["updates acknowledged"] += 1
        if not np.array_equal(logits, self.model(x).numpy()):
            self.problems.append(f"stream {self.stream}: the answer to batch {number} differs from the replay")
        if len(self.accepted) % COPY_EVERY == 0:
            self._keep_copy()

    def _check_dropped(self, num_updates: int) -> None:
        """Report updates that are not there any more, unless a kill came before they had to be saved."""
        timeline = self.service.timeline
        for _, acknowledged in self.accepted[num_updates:]:
            killed = timeline.find_kill(acknowledged, self.shard)
            if killed is None or timeline.compute_due(acknowledged) < killed:
                self.counts["updates lost"] += 1
                cause = "nothing was killed" if killed is None else f"{killed - acknowledged:.1f} s before a kill"
                self.problems.append(f"stream {self.stream}: an update was lost that was acknowledged, {cause}")
                continue
            self.counts["recent updates dropped by kills"] += 1
            if not timeline.was_on("full disk", acknowledged, killed):
                self.oldest_dropped = max(self.oldest_dropped, killed - acknowledged)

    def _check_failure(self, response: requests.Response, sent: float) -> None:
        """Report a status that blames the wrong side: a good request fails only while there is a fault."""
        timeline, now = self.service.timeline, time.monotonic()
        is_down = timeline.was_on("down", sent, now, self.shard)
        is_failing = timeline.was_on("failing network", sent, now)
        is_explained = {
            500: is_failing,
            503: timeline.was_on("full disk", sent, now) or is_down or (is_failing and self.service.may_start_later),
            504: is_down,
        }.get(response.status_code, False)
        if not is_explained or not response.headers["Content-Type"].startswith("application/json"):
            message = f"status {response.status_code} without a fault: {response.text[:200]}"
            self.problems.append(f"stream {self.stream}: {message}")

    def check_saved(self) -> None:
        """Check that a service that was stopped has saved every update, but those that a kill dropped just before."""
        slot = read_slots(str(self.service.state)).get(self.name)
        found = int((slot.last_summary or {})["updates"]) if slot else 0
        self._check_dropped(found)
        if found > len(self.accepted):
            self.problems.append(f"stream {self.stream}: {found} updates were saved, of {len(self.accepted)}")

    def _keep_copy(self) -> None:
        self.copies[len(self.accepted)] = copy.deepcopy(self.model, {id(self.model.source): self.model.source})
        while len(self.copies) > NUM_COPIES:
            del self.copies[min(self.copies)]

    def _rewind(self, num_updates: int) -> None:
        """Return to the model after a number of updates."""
        del self.accepted[num_updates:]
        self.copies = {count: model for count, model in self.copies.items() if count <= num_updates}
        start = max(self.copies, default=0)
        known = self.copies.get(start)
        self.model = self.template.fork() if known is None else copy.deepcopy(known, {id(known.source): known.source})
        for number, _ in self.accepted[start:]:
            self.model(make_batch(self.stream, number))


def find_causes(service: ChaosService, sent: float) -> list[Kind]:
    """Return why a connection since a time may end without an answer.

    One that has not sent its request yet may have to make room for silent ones.
    """
    kinds: tuple[Kind, ...] = ("down", "silent connections")
    return [kind for kind in kinds if service.timeline.was_on(kind, sent, time.monotonic())]


def send_bad_request(service: ChaosService, problems: list[str], generator: random.Random) -> None:
    """Send a bad request, which must be answered as such, whatever else is wrong."""
    body, sent = generator.choice(BAD_BODIES), time.monotonic()
    try:
        response = requests.post(f"{service.address}/v2/models/ctta/infer", data=body, timeout=TIMEOUT)
    except requests.RequestException:
        if not find_causes(service, sent):
            problems.append("no answer to a bad request")
        return
    timeline, shard, now = service.timeline, service.find_shard(DEFAULT_STREAM), time.monotonic()
    # A process that has to be started for it needs the network.
    is_unavailable = service.may_start_later and timeline.was_on("failing network", sent, now)
    if response.status_code != 400 and not (is_unavailable or timeline.was_on("down", sent, now, shard)):
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
                connection.sendall(part)
                time.sleep(pause())
    except OSError:
        pass  # the service may have been killed, and may close such a connection

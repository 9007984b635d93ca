"""Many, slow, large and abandoned requests: latency, memory and snapshots stay within their limits."""

import asyncio
import io
import json
import socket
import statistics
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from PIL import Image
from serving import Client, ServerProcess, make_images, make_png, make_tent, serve_in_thread
from torch import Tensor, nn

import ctta
from ctta.serve import Service
from ctta.serve.errors import ApiError
from ctta.serve.limits import MemoryBudget
from ctta.serve.tensors import estimate_memory, parse_input, split_body

NUM_CLIENTS, NUM_STREAMS, INTERVAL = 48, 12, 0.5
IMAGE_SIDES, NUM_IMAGES = (6200, 5000), 40
IMAGE_REQUESTS = 'ctta_requests_total{method="POST",route="/streams/{name}/image"'
MEMORY, REQUEST_MEMORY = 1024, 832  # MB


class SlowNetwork(nn.Module):
    """Take a while, without a core."""

    def __init__(self, net: nn.Module, seconds: float) -> None:
        super().__init__()
        self.net, self.seconds = net, seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        logits: Tensor = self.net(x)
        return logits


def test_changes_are_saved_within_two_intervals_while_requests_queue(tmp_path: Path) -> None:
    """Each stream has four clients, whose requests wait about a second for the only worker."""
    model = ctta.Tent(SlowNetwork(make_tent(tmp_path).copy_of_source(), 0.02))
    service = Service(model, tmp_path / "state", window_size=0, num_workers=1, snapshot_interval=INTERVAL)
    end, x, unsaved = time.monotonic() + 8 * INTERVAL, make_images(4), []

    def send_requests(number: int) -> int:
        client, num_sent = Client(address), 0
        while time.monotonic() < end:
            client.infer(f"s{number % NUM_STREAMS}", x)
            num_sent += 1
        return num_sent

    def watch() -> None:
        while time.monotonic() < end:
            unsaved.append(service.store.unsaved_seconds)
            time.sleep(0.01)

    with serve_in_thread(service) as client:
        address = client.address
        with ThreadPoolExecutor(NUM_CLIENTS + 1) as pool:
            watching = pool.submit(watch)
            num_sent = sum(pool.map(send_requests, range(NUM_CLIENTS)))
            watching.result()
        streams = list((service.state_dir / "streams").iterdir())
        numbers = [max(int(path.name) for path in stream.glob("[0-9]*")) for stream in streams]
    assert num_sent > NUM_CLIENTS and len(numbers) == NUM_STREAMS
    assert min(numbers) >= 3  # snapshots of each stream
    assert max(unsaved) < 2 * INTERVAL


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    memory = ("--memory", MEMORY, "--request-memory", REQUEST_MEMORY)
    options = ("--method", "tent", "--no-guard", *memory, "--queue", NUM_IMAGES, "--timeout", 300)
    process = ServerProcess(tmp_path_factory.mktemp("load") / "state", *options)
    with process:
        yield process


def test_a_connection_that_is_kept_open_has_no_delay(server: ServerProcess) -> None:
    """Without TCP_NODELAY every answer takes 40 ms, however fast the machine is."""
    client, latencies = Client(server.client.address), []
    for _ in range(40):
        started = time.perf_counter()
        assert client.call("POST", "/streams/fast/image?adapt=false", data=make_png()).status_code == 200
        latencies.append(time.perf_counter() - started)
    assert statistics.quantiles(latencies, n=4)[0] < 0.03


def peak_memory(process_id: int) -> int:
    """Return the highest resident memory of a process so far, in MB."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def test_large_images_are_decoded_within_the_memory_limit(server: ServerProcess) -> None:
    """Forty files of 31 megapixels and 30 KB at once; each takes up to 360 MB while it is decoded."""
    file = io.BytesIO()
    Image.new("L", IMAGE_SIDES, "gray").save(file, "PNG")
    body = file.getvalue()
    assert 25_000 < len(body) < 40_000
    client = Client(server.client.address)
    assert client.call("POST", "/streams/large/image", data=make_png()).status_code == 200
    before = peak_memory(server.process.pid)

    def send(_number: int) -> int:
        return Client(server.client.address).call("POST", "/streams/large/image", data=body).status_code

    with ThreadPoolExecutor(NUM_IMAGES) as pool:
        assert set(pool.map(send, range(NUM_IMAGES))) == {200}
    assert peak_memory(server.process.pid) - before < 512 < MEMORY
    assert client.call("POST", "/streams/large/image", data=make_png()).status_code == 200


def make_raw_request(shape: list[int], datatype: str, data: bytes) -> tuple[bytes, dict[str, str]]:
    tensor = {"name": "input", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [tensor]}).encode()
    return head + data, {"Inference-Header-Content-Length": str(len(head))}


def test_tensors_are_parsed_within_the_memory_limit(server: ServerProcess) -> None:
    """Bodies of almost 16 MB, which take 64 MB to 2 GB once they are parsed; all of them are bad requests."""
    size = 15_000_000
    requests = {
        "numbers": (b'{"inputs": [' + b"0.5," * (size // 4) + b"1]}", {}, 400),
        "lists": (b'{"inputs": [' + b"[]," * (size // 3) + b"1]}", {}, 413),
        "raw": (*make_raw_request([1, 3, 1, size // 3], "UINT8", bytes(size)), 400),
    }
    before = peak_memory(server.process.pid)

    def send(name: str) -> None:
        body, headers, status = requests[name]
        response = Client(server.client.address).call("POST", "/v2/models/ctta/infer", data=body, headers=headers)
        assert response.status_code == status, response.text

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(send, ["numbers", "raw", "lists"] * 2))
    assert peak_memory(server.process.pid) - before < REQUEST_MEMORY


def test_the_memory_of_a_request_is_not_underestimated() -> None:
    count = 20_000
    data = {
        "floats": "0.5," * count,
        "long floats": "0.12345678901234," * count,
        "small integers": "0," * count,
        "integers": "3000," * count,
        "empty lists": "[]," * count,
        "lists": "[0]," * count,
        "empty objects": "{}," * count,
        "objects": '{"a":0},' * count,
        "keys": "{" + ",".join(f'"{number:x}":0' for number in range(count)) + "},",
        "strings": '"a",' * count,
        "long string": '"' + "a" * count + '",',
        "wide string": '"' + "a" * count + '\U0001f600",',
        "wide": '"\U0001f600",' * count,
    }
    raw = {name: make_raw_request([count], name, bytes(count * size)) for name, size in (("UINT8", 1), ("FP64", 8))}
    start = f'{{"inputs": [{{"name": "input", "datatype": "FP32", "shape": [{count}], "data": ['
    bodies = {name: (f"{start}{text[:-1]}]}}]}}".encode(), dict[str, str]()) for name, text in data.items()}
    for name, (content, headers) in {**bodies, **raw}.items():
        json_length = headers.get("Inference-Header-Content-Length")
        tracemalloc.start()
        with suppress(ApiError):
            parse_input(split_body(content, json_length))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        estimate = estimate_memory(content, json_length)
        assert peak < estimate, (name, peak / len(content), estimate / len(content))


def send_raw(server: ServerProcess, *parts: bytes, pause: float = 0.0) -> socket.socket:
    """Send parts of a request, and return the connection."""
    url = urlsplit(server.client.address)
    assert url.hostname and url.port
    connection = socket.create_connection((url.hostname, url.port), timeout=60)
    for part in parts:
        connection.sendall(part)
        time.sleep(pause)
    return connection


def count_image_requests(metrics: str) -> float:
    """Return how many image files the service has finished with, including those of clients that have left."""
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(IMAGE_REQUESTS))


def test_slow_and_abandoned_requests(server: ServerProcess) -> None:
    """A body that arrives byte by byte is served, and clients that hang up leave everything as it was."""
    body, client = make_png(), Client(server.client.address)
    client.infer("patient", make_images(4))
    num_requests = count_image_requests(client.call("GET", "/metrics").text)
    head = f"POST /streams/patient/image HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    before = client.json("GET", "/streams/patient")["images"]
    for _ in range(5):
        send_raw(server, head).close()
        send_raw(server, head, body[:100]).close()
    slow = send_raw(server, head, *(body[start : start + 50] for start in range(0, len(body), 50)), pause=0.01)
    assert slow.recv(100).startswith(b"HTTP/1.1 200")
    slow.close()
    assert client.json("GET", "/streams/patient")["images"] == before + 1
    for _ in range(5):
        send_raw(server, head, body).close()  # handled, if the service got to it before the client left
    end = time.monotonic() + 60
    while count_image_requests(metrics := client.call("GET", "/metrics").text) < num_requests + 16:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert "ctta_waiting_requests 0.0\n" in metrics
    assert "ctta_failures_total{" not in metrics
    summary = client.json("GET", "/streams/patient")
    assert before + 1 <= summary["images"] <= before + 6
    assert client.infer("patient", make_images(4))["update"] == summary["updates"] + 1


def test_requests_wait_for_memory_in_their_order(tmp_path: Path) -> None:
    """A large one is not overtaken by smaller ones, and one that waits for too long is answered with 503."""
    budget, order = MemoryBudget(100, timeout=0.2), []

    async def reserve(name: str, num_bytes: int, seconds: float) -> None:
        async with budget.reserve(num_bytes) as reservation:
            order.append(name)
            assert budget.num_reserved <= 100
            await asyncio.sleep(seconds / 2)
            reservation.shrink(num_bytes // 2)
            await asyncio.sleep(seconds / 2)

    async def run() -> list[BaseException | None]:
        requests = (("a", 60, 0.1), ("b", 100, 0.04), ("c", 30, 0.02), ("d", 100, 0.5), ("late", 100, 0.01))
        jobs = [reserve(*request) for request in requests]
        return await asyncio.gather(*jobs, return_exceptions=True)

    *served, given_up = asyncio.run(run())
    assert served == [None] * 4 and order == ["a", "b", "c", "d"] and budget.num_reserved == 0
    assert isinstance(given_up, ApiError) and given_up.status == 503 and given_up.retry_after
    with pytest.raises(ApiError, match="serve with a larger --request-memory") as refused:
        asyncio.run(reserve("too large", 101, 0.0))
    assert refused.value.status == 413 and refused.value.retry_after is None

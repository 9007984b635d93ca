"""Many, slow, large and abandoned requests: latency, memory and snapshots stay within their limits."""

import asyncio
import io
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image
from serving import Client, ServerProcess, make_images, make_png, make_tent
from torch import Tensor

from ctta.serve import Service, serve
from ctta.serve.http import ApiError, MemoryBudget
from ctta.serve.protocol import estimate_memory, parse_input, split_body
from ctta.serve.stream import InferenceResult, ServedStream

IMAGE_SIDES, NUM_IMAGES = (6200, 5000), 12
IMAGE_REQUESTS = 'ctta_requests_total{method="POST",route="/streams/{name}/image"'
MEMORY, REQUEST_MEMORY = 1024, 832  # MB


def test_a_snapshot_waits_for_one_request_only(tmp_path: Path) -> None:
    """Those that queue come after it, and streams that only wait for a worker are saved at once."""
    service = Service(make_tent(tmp_path), tmp_path / "state", window_size=0, num_workers=1)
    x, order, working, proceed = make_images(4), list[str](), threading.Event(), threading.Event()
    write = service.factory.snapshots.write

    def observe(name: str) -> None:
        stream = service.store.slots[name].stream
        assert stream is not None
        infer = stream.infer

        def infer_and_note(x: Tensor, **options: Any) -> InferenceResult:
            order.append(f"request {name}")
            working.set()
            assert proceed.wait(60)
            return infer(x, **options)

        stream.infer = infer_and_note  # type: ignore[method-assign]

    def write_and_note(stream: ServedStream) -> None:
        order.append(f"snapshot {stream.name}")
        write(stream)

    async def run() -> None:
        for name in "ab":
            await service.infer(name, x, adapt=True)
            observe(name)
        service.factory.snapshots.write = write_and_note  # type: ignore[method-assign]
        requests = [asyncio.create_task(service.infer(name, x, adapt=True)) for name in "aaab"]
        await asyncio.to_thread(working.wait, 60)
        saving = asyncio.create_task(service.store.save_all())
        while "snapshot b" not in order:
            await asyncio.sleep(0.01)
        assert order == ["request a", "snapshot b"]
        proceed.set()
        await asyncio.gather(saving, *requests)
        assert order.index("snapshot a") < order.index("request a", 1)

    asyncio.run(run())
    service.release()


def test_snapshots_are_due_at_a_fixed_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that saving takes is not added to the interval, unless it exceeds that."""
    service = Service(make_tent(tmp_path), tmp_path / "state", snapshot_interval=10.0)
    now, pauses, durations = 0.0, list[float](), [4.0, 25.0, 1.0, 0.0]

    async def sleep(seconds: float) -> None:
        nonlocal now
        pauses.append(seconds)
        now += seconds

    async def save_all() -> None:
        nonlocal now
        now += durations.pop(0)
        if not durations:
            raise asyncio.CancelledError

    monkeypatch.setattr("ctta.serve.store.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("ctta.serve.store.asyncio.sleep", sleep)
    monkeypatch.setattr(service.store, "save_all", save_all)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(service.store.autosave_loop())
    assert pauses == [10.0, 6.0, 0.0, 9.0]
    service.release()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    memory = ("--memory", MEMORY, "--request-memory", REQUEST_MEMORY)
    options = ("--method", "tent", "--no-guard", *memory, "--queue", NUM_IMAGES, "--timeout", 300)
    process = ServerProcess(tmp_path_factory.mktemp("load") / "state", *options)
    with process:
        yield process


def test_a_connection_that_is_kept_open_has_no_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TCP_NODELAY every answer takes 40 ms, however fast the machine is."""
    service, found = Service(make_tent(tmp_path), tmp_path / "state"), list[int]()

    def accept(_server: object, sockets: list[socket.socket]) -> None:
        with socket.create_connection(sockets[0].getsockname(), timeout=60), sockets[0].accept()[0] as connection:
            found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr("uvicorn.Server.run", accept)
    serve(service, port=0)
    assert found == [1]
    service.release()


def peak_memory(process_id: int) -> int:
    """Return the highest resident memory of a process so far, in MB."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def test_large_images_are_decoded_within_the_memory_limit(server: ServerProcess) -> None:
    """Twelve files of 31 megapixels and 30 KB at once; each takes up to 360 MB while it is decoded."""
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


def test_requests_wait_for_memory_in_their_order() -> None:
    """A large one is not overtaken by smaller ones, and one that waits for too long is answered with 503."""
    budget, order, may_end = MemoryBudget(100, timeout=60.0), list[str](), dict[str, asyncio.Event]()

    async def reserve(name: str, num_bytes: int) -> None:
        async with budget.reserve(num_bytes) as shrink:
            order.append(name)
            assert budget.num_reserved <= 100
            await may_end[name].wait()
            before = budget.num_reserved
            shrink(num_bytes // 2)
            assert budget.num_reserved == before - num_bytes // 2

    async def settle() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def run() -> None:
        requests = {"a": 60, "b": 100, "c": 30, "d": 40}
        may_end.update({name: asyncio.Event() for name in requests})
        jobs = [asyncio.create_task(reserve(*request)) for request in requests.items()]
        await settle()
        assert order == ["a"], "c would fit beside it"
        may_end["a"].set()
        await settle()
        assert order == ["a", "b"]
        may_end["b"].set()
        await settle()
        assert order == ["a", "b", "c", "d"]
        budget.timeout = 0.01
        with pytest.raises(ApiError, match="no memory for the request") as given_up:
            await reserve("late", 100)
        assert given_up.value.status == 503 and given_up.value.retry_after
        may_end["c"].set()
        may_end["d"].set()
        await asyncio.gather(*jobs)
        assert budget.num_reserved == 0
        with pytest.raises(ApiError, match="serve with a larger --request-memory") as refused:
            await reserve("too large", 101)
        assert refused.value.status == 413 and refused.value.retry_after is None

    asyncio.run(run())

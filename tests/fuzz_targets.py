"""What every reader of foreign bytes must do, as functions of bytes; for tests and ``benchmarks/chaos/fuzz.py``.

A target returns for any input, and raises if the reader broke its promise: a value or one of the library's own errors.
``tests/corpus/TARGET/`` has inputs to start from, among them each that once made a target raise.
"""

import asyncio
import inspect
import json
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from checkpoint_edits import save_adapted
from fastapi import FastAPI
from saved_streams import STREAM, Tensors, make_network, read_file

import ctta
from ctta.adapt.predictions import PredictionFile
from ctta.benchmark.report.runs import FORMAT, read_run_file
from ctta.core.hyperparameters import parse_hyperparameters
from ctta.errors import ConfigError, DataError, InputError
from ctta.io.tensors import write_tensors
from ctta.methods import METHODS
from ctta.nn.surgery import fingerprint
from ctta.serve import Limits, Service, create_app

CORPUS = Path(__file__).parent / "corpus"
SOURCE = "SOURCE"  # in place of the fingerprint of the network, which may differ between versions of torch
MAX_BODY = 64 * 2**10  # bytes
HANG = 30.0  # seconds


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="fuzz-")  # removed when the process ends, after the check of the session's folder


def scratch(name: str) -> Path:
    """Return a path in a folder that lives as long as the process."""
    return Path(_folder().name) / name


# ---- checkpoints ----


@cache
def saved_tensors() -> dict[tuple[str, ...], Tensors]:
    """Return the tensors of saved streams of several kinds, by their names."""
    found = {}
    for kind in ("tent", "cotta", "guarded_tent"):
        save_adapted(kind, scratch(kind))
        tensors = read_file(scratch(kind))[1]
        found[tuple(sorted(tensors))] = tensors
    return found


def fuzz_checkpoint(data: bytes) -> None:
    """Load a file; JSON is taken as the header of a valid file, with a checksum that fits."""
    path = scratch("fuzzed.safetensors")
    path.write_bytes(data)
    if data[:1] == b"{":
        try:
            header = json.loads(data)
        except (ValueError, RecursionError):
            return
        if header.get("source") == SOURCE:
            header["source"] = fingerprint(make_network())
        names = header.get("tensors")
        known = tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()
        tensors = saved_tensors().get(known, next(iter(saved_tensors().values())))
        write_tensors(path, tensors, "ctta", header)
    try:
        model = ctta.load(path, make_network())
    except (ctta.CheckpointError, ConfigError) as error:
        assert str(error)
        return
    # Inputs may be refused if the header specifies them.
    with suppress(InputError, TypeError) if isinstance(model, ctta.Guarded) else nullcontext():
        model(STREAM[3])


# ---- the service ----


class AppUnderTest:
    """A service of a small network, called without a connection."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.loop = asyncio.new_event_loop()
        self.app: FastAPI = create_app(
            Service(
                ctta.Tent(make_network(), batch_stats=0.5),
                scratch("state"),
                limits=Limits(max_body_bytes=MAX_BODY, max_streams=8, max_live_streams=4, max_batch=16, max_side=64),
                num_workers=1,
            )
        )

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """Return the status and the body of the answer; what the application raises is raised."""
        return self.loop.run_until_complete(asyncio.wait_for(self._post(path, body, headers), HANG))

    async def _post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        messages, status, content = [{"type": "http.request", "body": body, "more_body": False}], 0, bytearray()

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.sleep(HANG)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            content.extend(message.get("body", b""))

        await self.app(scope, receive, send)
        return status, bytes(content)


@cache
def app_under_test() -> AppUnderTest:
    """Return the service, started once."""
    return AppUnderTest()


def fuzz_protocol(data: bytes) -> int:
    """Send a body to the tensor route; the first line of the input is the length of its JSON part, or empty.

    Returns:
        The status.
    """
    length, _, body = data.partition(b"\n")
    headers = {"Host": "localhost", "Content-Length": str(len(body))}
    if length:
        headers["Inference-Header-Content-Length"] = length.decode("latin-1")
    started = time.monotonic()
    status, content = app_under_test().post("/v2/models/ctta/infer", body, headers)
    assert time.monotonic() - started < HANG
    assert status in (200, 400, 413, 429), (status, content)
    if status != 200:
        assert json.loads(content)["error"]
    return status


# ---- tables, settings and runs ----


def fuzz_csv(data: bytes) -> None:
    """Read a table; what is read is written again as it was, and then read as the same."""
    file = PredictionFile(scratch("fuzzed.csv"), ["class"])
    file.path.write_bytes(data)
    try:
        images, num_dropped = file.truncate(1)
    except (ConfigError, DataError):
        return
    assert num_dropped >= 0
    rewritten = file.path.read_bytes()
    assert file.truncate(1)[0] == images
    file.append([["last.png", 0, 1]])
    assert file.truncate(1) == (images | {"last.png"}, 0)
    assert file.path.read_bytes().startswith(rewritten)


def fuzz_settings(data: bytes) -> None:
    """Parse a setting of every method."""
    text = data.decode("utf-8", "replace")
    for method in METHODS.values():
        try:
            parsed = parse_hyperparameters(method, [text])
        except (ConfigError, InputError) as error:
            assert str(error)
        else:
            assert parsed.keys() <= set(inspect.signature(method).parameters)


def fuzz_run(data: bytes) -> None:
    """Read the description of a run folder."""
    folder = scratch("run")
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_bytes(data)
    try:
        found = read_run_file(folder)
    except DataError as error:
        assert str(error)
    else:
        assert found["format"] == FORMAT and isinstance(found["commands"], list)


TARGETS: dict[str, Callable[[bytes], object]] = {
    "checkpoint": fuzz_checkpoint,
    "protocol": fuzz_protocol,
    "csv": fuzz_csv,
    "settings": fuzz_settings,
    "run": fuzz_run,
}


def corpus(target: str) -> list[Path]:
    """Return the inputs that a target starts from."""
    return sorted(path for path in (CORPUS / target).iterdir() if path.is_file())

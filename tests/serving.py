"""Services for tests, in a thread of this process or as a command in another one, and a client for them."""

import io
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import requests
import torch
import uvicorn
from command_line import NETWORK
from PIL import Image
from torch import Tensor

import ctta
from ctta import models
from ctta.serve import Service, StreamCamera, Tokens, create_app

TIMEOUT = 120.0  # seconds; test machines are slow at times
SIZE = (16, 16)


class Client:
    """Send requests to a service."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address, self.session = address, requests.Session()
        if token:
            self.session.headers["Authorization"] = f"Bearer {token}"

    def call(self, method: str, path: str, **options: Any) -> requests.Response:
        return self.session.request(method, self.address + path, timeout=TIMEOUT, **options)

    def json(self, method: str, path: str, **options: Any) -> Any:
        response = self.call(method, path, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def infer(self, stream: str | int, x: Tensor, **parameters: Any) -> dict[str, Any]:
        """Return every output by its name, and the parameters of the answer."""
        answer = self.json("POST", "/v2/models/ctta/infer", json=infer_request(stream, x, **parameters))
        outputs = {output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in answer["outputs"]}
        return {**outputs, **answer["parameters"]}

    def state(self, stream: str) -> bytes:
        response = self.call("GET", f"/streams/{stream}/state")
        assert response.status_code == 200, response.text
        return response.content


def infer_request(stream: str | int, x: Tensor, **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "input", "datatype": "FP32", "shape": list(x.shape), "data": x.flatten().tolist()}
    outputs = [{"name": name} for name in ("logits", "label", "confidence")]
    return {"inputs": [tensor], "outputs": outputs, "parameters": {"sequence_id": stream, **parameters}}


class ServerProcess:
    """``ctta serve`` in another process, which may open so many files at once."""

    def __init__(
        self,
        state: Path,
        *options: object,
        environment: Mapping[str, str] | None = None,
        num_files: int | None = None,
    ) -> None:
        self.spec = f"file:{write_network_file(state.parent)}:net"
        self.state = state
        self.options = ["--model", self.spec, "--size", *SIZE, "--port", 0, "--state", state, *options]
        self.environment, self.num_files = environment, num_files

    def __enter__(self) -> Client:
        command = [sys.executable, "-c", "from ctta.cli import main; main()", "serve", *map(str, self.options)]
        if self.num_files is not None:
            command = ["prlimit", f"--nofile={self.num_files}:{self.num_files}", *command]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=self.environment and dict(self.environment)
        )
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line.startswith("Listening on http://127.0.0.1:"), line
        self.client = Client(line.split()[-1])
        return self.client

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT)

    def __exit__(self, *_error: object) -> None:
        if self.process.poll() is None:
            self.stop(signal.SIGTERM)
        assert self.process.stdout
        self.process.stdout.close()


@contextmanager
def serve_in_thread(
    service: Service,
    tokens: Tokens = Tokens(),  # noqa: B008
    cameras: Sequence[StreamCamera] = (),
) -> Iterator[Client]:
    """Serve on a free port of this machine, in a thread of this process."""
    config = uvicorn.Config(create_app(service, tokens, cameras), port=0, log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        for _ in range(int(TIMEOUT / 0.02)):
            if server.started:
                break
            time.sleep(0.02)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Client(f"http://127.0.0.1:{port}", tokens.admin or tokens.infer)
    finally:
        server.should_exit = True
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def write_network_file(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "network.py"
    path.write_text(NETWORK)
    return path


def make_tent(folder: Path, **settings: Any) -> ctta.Tent:
    """Build a small model that adapts quickly."""
    return ctta.Tent(models.load(f"file:{write_network_file(folder)}:net"), **settings)


def make_images(number: int, seed: int = 0) -> Tensor:
    return torch.rand(number, 3, *SIZE, generator=torch.Generator().manual_seed(seed))


def make_png(seed: int = 0, side: int = 16) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()

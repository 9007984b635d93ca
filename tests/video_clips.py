"""Small videos for tests: files, and a camera that drops its connections."""

import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from ctta.data.datasets.video import FrameFeed

SIDE, RATE = 16, 10
Frames = NDArray[np.uint8]


def draw_frames(number: int, side: int = SIDE) -> Frames:
    """Return a moving pattern under light that fades, uint8 (number, side, side, 3)."""
    rows, columns = np.mgrid[:side, :side]
    frames = []
    for place in range(number):
        waves = [np.sin(0.4 * (rows + place) + shift) + np.cos(0.5 * columns - shift) for shift in (0, 1, 2)]
        light = 1 - 0.7 * place / number
        frames.append((light * (127.5 + 63 * np.stack(waves, 2))).clip(0, 255))
    return np.array(frames).astype(np.uint8)


def write_clip(path: Path, frames: Sequence[Frames] | Frames, **options: str) -> Path:
    """Encode frames, with a key frame every seven and B-frames between."""
    with av.open(str(path), "w") as output:
        stream: Any = output.add_stream("libx264", rate=RATE, options={"crf": "10", "g": "7", "bf": "2"} | options)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        output.mux(stream.encode())
    return path


def read_clip(path: Path) -> Frames:
    """Decode all frames of a file."""
    with av.open(str(path)) as container:
        return np.array([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def encode_jpeg(frame: Frames) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG")
    return file.getvalue()


def keep_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let streams keep every frame of a camera, however slow this machine is, and connect again at once."""

    def make_feed(*arguments: Any, **settings: Any) -> FrameFeed:
        return FrameFeed(*arguments, **settings | {"capacity": 10**6})

    monkeypatch.setattr(import_module("ctta.data.streams.video"), "FrameFeed", make_feed)
    monkeypatch.setattr("ctta.data.datasets.video.FIRST_DELAY", 0.01)


@contextmanager
def dropping_camera(frames: Frames, num_per_connection: int) -> Iterator[str]:
    """Serve frames as cameras do over HTTP; after so many, the connection ends, and the next goes on with the next."""
    pictures, lock = cycle([encode_jpeg(frame) for frame in frames]), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            for _ in range(num_per_connection):
                with lock:
                    picture = next(pictures)
                head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(picture)}\r\n\r\n"
                try:
                    self.wfile.write(head.encode() + picture + b"\r\n")
                except OSError:  # the reader left
                    return

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/door"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

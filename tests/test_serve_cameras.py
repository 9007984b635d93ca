"""``ctta serve --camera``: the service reads cameras by itself, and says how they are."""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke, user_error
from serving import SIZE, TIMEOUT, Client, make_tent, serve_in_thread
from torch import Tensor, nn
from video_clips import draw_frames, dropping_camera, write_clip

import ctta
from ctta.cli.serve import serve
from ctta.data.datasets.video import FrameSampling
from ctta.data.streams import video
from ctta.errors import ConfigError
from ctta.serve import Service, StreamCamera, Tokens, create_app


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctta.data.datasets.video.FIRST_DELAY", 0.01)
    monkeypatch.setattr("ctta.serve.cameras.PAUSE", 0.01)


def wait_for(client: Client, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the health of the only source once it is as expected."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        (source,) = client.json("GET", "/cameras")
        if condition(source):
            return dict(source)
        time.sleep(0.02)
    raise AssertionError(source)


def read_metrics(client: Client) -> dict[str, float]:
    text = client.call("GET", "/metrics").text
    return {
        name: float(value) for name, value in re.findall(r'^ctta_camera_(\w+)\{camera="camera7"\} (\S+)', text, re.M)
    }


def test_a_camera_feeds_its_stream_and_comes_back_after_a_drop(tmp_path: Path) -> None:
    service = Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=4, update_every=2)
    with dropping_camera(draw_frames(30), num_per_connection=6) as address:
        secret = address.replace("://", "://me:secret@")
        with serve_in_thread(service, cameras=[StreamCamera("camera7", secret)]) as client:
            source = wait_for(client, lambda source: source["reconnects"] >= 2 and source["answered"] >= 8)
            assert (source["stream"], source["address"], source["ended"]) == ("camera7", address, False)
            assert set(source["last_answer"]) == {"frame", "time", "class", "label", "confidence"}
            metrics = read_metrics(client)
            assert metrics["frames_total"] >= metrics["skipped_frames_total"] + 8 and metrics["reconnects_total"] >= 2
            assert metrics["up"] in (0, 1) and 0 <= metrics["frame_age_seconds"] < TIMEOUT
            stream = client.json("GET", "/streams/camera7")
            assert stream["updates"] > 0 and stream["images"] >= 8
            assert "secret" not in str(source) + client.call("GET", "/metrics").text
        names = [thread.name for thread in threading.enumerate()]
        assert not any(name.startswith(("source", "video")) for name in names), names
    again = Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=4, update_every=2)
    assert again.store.slots["camera7"].summary()["images"] >= stream["images"], "saved at the end"
    again.release()


def test_a_recording_is_played_once_as_if_a_client_sent_it(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "clip.mp4", draw_frames(12, side=32))
    settings: dict[str, Any] = {"image_size": SIZE, "window_size": 4, "update_every": 2}
    service = Service(make_tent(tmp_path), tmp_path / "pulled", **settings)
    with serve_in_thread(service, cameras=[StreamCamera("camera7", str(clip), FrameSampling(every=2))]) as client:
        source = wait_for(client, lambda source: source["answered"] == 6)
        source = wait_for(client, lambda source: source["ended"])
        pulled = client.state("camera7")
        assert read_metrics(client)["up"] == 0
    assert (source["frames"], source["skipped"], source["error"]) == (6, 0, None)
    assert source["last_answer"]["frame"] == 10 and source["last_answer"]["time"] == 1.0
    with serve_in_thread(Service(make_tent(tmp_path), tmp_path / "sent", **settings)) as client:
        for batch in video(clip, every=2, size=SIZE, batch_size=1):
            answer = client.infer("camera7", batch.x)
        assert client.state("camera7") == pulled
    assert answer["label"][0] == source["last_answer"]["class"]


class DazzledNetwork(nn.Module):
    """A network that fails on bright images."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0.4:
            raise RuntimeError("too bright")
        logits: Tensor = self.head(self.norm(x).mean((2, 3)))
        return logits


def test_frames_that_fail_are_counted_and_do_not_end_the_source(tmp_path: Path) -> None:
    frames = draw_frames(9)  # the light fades
    clip = write_clip(tmp_path / "clip.mp4", frames)
    service = Service(ctta.Tent(DazzledNetwork()), tmp_path / "state", window_size=0)
    with serve_in_thread(service, cameras=[StreamCamera("camera7", str(clip))]) as client:
        source = wait_for(client, lambda source: source["answered"] + source["skipped"] == 9)
    assert source["skipped"] == sum(frame.mean() > 0.4 * 255 for frame in frames) > 0
    assert source["error"] is None, "the last one was answered"


def test_a_source_that_cannot_go_on_says_why(tmp_path: Path) -> None:
    """The names of the classes do not fit the network, which nobody knows before its first answer."""
    clip = write_clip(tmp_path / "clip.mp4", draw_frames(3))
    service = Service(make_tent(tmp_path), tmp_path / "state", class_names=["bird", "cat"])
    with serve_in_thread(service, cameras=[StreamCamera("camera7", str(clip))]) as client:
        source = wait_for(client, lambda source: source["error"] is not None)
    assert "got 2 class names for a network with 5 classes" in source["error"] and not source["answered"]


def test_the_command_passes_sources_to_the_application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = write_clip(tmp_path / "clip.mp4", draw_frames(2))
    applications: list[tuple[Any, ...]] = []

    def record(*arguments: Any) -> None:
        applications.append(arguments)
        arguments[0].release()
        raise KeyboardInterrupt

    monkeypatch.setattr("ctta.serve.app.create_app", record)
    options = ("--camera", f"camera7={clip}", "--camera", "door=rtsp://door", "--every", "0.5s")
    invoke(serve, "--model", "embedded", "--method", "tent", "--state", tmp_path / "state", *options)
    sampling = FrameSampling(interval=0.5)
    ((_, _, cameras),) = applications
    assert cameras == [StreamCamera("camera7", str(clip), sampling), StreamCamera("door", "rtsp://door", sampling)]


def test_mistakes_are_named(tmp_path: Path) -> None:
    command = ("--model", "embedded", "--camera")
    assert "expected --camera NAME=ADDRESS, such as camera7=" in user_error(serve, *command, "rtsp://door")
    assert "cannot be the name of a stream" in user_error(serve, *command, "a/b=rtsp://door")
    assert "gone.mp4 does not exist" in user_error(serve, *command, "camera7=gone.mp4")
    assert "such as 0.5s, got 'x'" in user_error(serve, *command, "a=rtsp://door", "--every", "x")
    cameras = [StreamCamera("a", "rtsp://door"), StreamCamera("a", "rtsp://gate")]
    service = Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE)
    with pytest.raises(ConfigError, match="several cameras feed the stream a"):
        create_app(service, cameras=cameras)
    service.release()


def test_sources_are_listed_for_those_with_a_token_only(tmp_path: Path) -> None:
    service = Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE)
    tokens = Tokens(infer="i" * 32, admin="a" * 32)
    with serve_in_thread(service, tokens, [StreamCamera("camera7", "http://127.0.0.1:9/door")]) as client:
        source = wait_for(client, lambda source: source["error"] is not None)
        assert not source["up"] and "cannot be read as video" in source["error"]
        assert Client(client.address).call("GET", "/cameras").status_code == 401

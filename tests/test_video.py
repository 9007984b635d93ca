"""Streams of video: which frames are taken, resuming at any of them, and cameras that drop."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from video_clips import RATE, Frames, draw_frames, dropping_camera, keep_all_frames, read_clip, write_clip

import ctta
from ctta.data.datasets.video import FrameFeed, FrameSampling, estimate_num_frames
from ctta.data.streams import VideoStream, video
from ctta.errors import ConfigError, DataError, InputError

NUM_FRAMES = 23


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clips") / "clip.mp4", draw_frames(NUM_FRAMES))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctta.data.datasets.video.FIRST_DELAY", 0.01)


def frame_numbers(stream: VideoStream) -> list[int]:
    return [number for batch in stream for number in batch.index.tolist()]


def test_batches_have_pixels_numbers_and_times(clip: Path) -> None:
    batches = list(video(clip, batch_size=10))
    assert [len(batch.x) for batch in batches] == [10, 10, 3]
    expected = torch.from_numpy(read_clip(clip)).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(torch.cat([batch.x for batch in batches]), expected, rtol=0, atol=1e-7)
    assert torch.cat([batch.index for batch in batches]).tolist() == list(range(NUM_FRAMES))
    times = [seconds for batch in batches for seconds in batch.seconds]
    np.testing.assert_allclose(times, np.arange(NUM_FRAMES) / RATE, atol=1e-6)
    assert all(batch.y is None and batch.domain == "clip.mp4" for batch in batches)
    assert [frame.shape for frame in batches[-1].frames] == [(16, 16, 3)] * 3


def test_frames_are_resized_as_images_are(clip: Path) -> None:
    (batch,) = video(clip, batch_size=100, size=(8, 12), seconds=0.1)
    pixels = np.array(Image.fromarray(read_clip(clip)[0]).resize((12, 8), Image.Resampling.BILINEAR))
    assert torch.equal(batch.x[0], torch.from_numpy(pixels).permute(2, 0, 1) / 255)
    assert batch.frames[0].shape == (16, 16, 3)


def test_sampling(clip: Path) -> None:
    assert frame_numbers(video(clip, every=5)) == [0, 5, 10, 15, 20]
    assert frame_numbers(video(clip, interval=0.3)) == [0, 3, 6, 9, 12, 15, 18, 21]
    assert frame_numbers(video(clip, interval=0.25)) == [0, 3, 5, 8, 10, 13, 15, 18, 20]
    assert frame_numbers(video(clip, every=2, seconds=0.6)) == [0, 2, 4]
    for sampling in FrameSampling(every=5), FrameSampling(interval=0.3), FrameSampling(every=2, seconds=0.6):
        taken = frame_numbers(video(clip, every=sampling.every, interval=sampling.interval, seconds=sampling.seconds))
        assert estimate_num_frames(clip, sampling) == len(taken)
    for settings in {"every": 0}, {"interval": 0.0}, {"seconds": -1.0}, {"every": 2, "interval": 1.0}:
        with pytest.raises(ConfigError):
            video(clip, **settings)


@pytest.mark.parametrize("settings", [{}, {"every": 3}, {"interval": 0.25}])
def test_a_stream_resumes_after_any_frame(clip: Path, settings: dict[str, float]) -> None:
    whole = [batch for batch in video(clip, batch_size=1, **settings)]  # type: ignore[arg-type]
    for place, batch in enumerate(whole):
        stream = video(clip, batch_size=1, **settings)  # type: ignore[arg-type]
        stream.go_on_after(int(batch.index[0]), float(f"{batch.seconds[0]:.6f}"))  # as a table has it
        rest = list(stream)
        assert [int(each.index[0]) for each in rest] == [int(each.index[0]) for each in whole[place + 1 :]]
        assert all(torch.equal(one.x, other.x) for one, other in zip(rest, whole[place + 1 :], strict=True))


def test_position(clip: Path) -> None:
    stream = video(clip, batch_size=5)
    assert [frame_numbers(stream) for _ in range(2)] == [list(range(NUM_FRAMES))] * 2, "starts over"
    for position in (3, 1, 4, 0):
        stream.position = position
        assert frame_numbers(stream) == list(range(5 * position, NUM_FRAMES))
    for batch in stream:
        assert batch.index[0] == 0
        break
    assert stream.position == 1
    assert frame_numbers(stream)[0] == 5, "goes on after a break"


def test_a_recording_without_times_is_counted_through(tmp_path: Path) -> None:
    raw = write_clip(tmp_path / "clip.h264", draw_frames(12), bf="0")
    whole = list(video(raw, batch_size=1))
    stream = video(raw, batch_size=1)
    stream.go_on_after(6, 99.0)  # no frame has this time
    assert [int(batch.index[0]) for batch in stream] == list(range(7, 12))
    assert torch.equal(next(iter(video(raw, batch_size=12))).x[7:8], whole[7].x)


def test_numbered_images(tmp_path: Path) -> None:
    frames = draw_frames(6)
    for number, frame in enumerate(frames, start=17):  # FFmpeg by itself finds those that start at 0 to 4 only
        Image.fromarray(frame).save(tmp_path / f"frames-{number:05}.png")
    (batch,) = video(tmp_path / "frames-%05d.png")
    assert np.array_equal(np.array(batch.frames), frames)
    assert batch.seconds[1] == pytest.approx(1 / 25)
    with pytest.raises(DataError):
        next(iter(video(tmp_path / "other-%05d.png")))


def test_what_cannot_be_read_is_named(tmp_path: Path, clip: Path) -> None:
    (tmp_path / "half.mp4").write_bytes(clip.read_bytes()[:500])
    for name in ("gone.mp4", "half.mp4"):
        with pytest.raises(DataError, match=name):
            next(iter(video(tmp_path / name)))


def test_damaged_parts_are_left_out(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "clip.ts", draw_frames(40, side=64), bf="0", g="5")
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 2000] = bytes(2000)
    path.write_bytes(content)
    frames = frame_numbers(video(path))
    assert 25 < len(frames) <= 40 and frames == list(range(len(frames)))


def test_phones_turn_their_videos(tmp_path: Path) -> None:
    frames = np.zeros((3, 32, 16, 3), np.uint8)
    frames[:, :8] = 255  # bright at the top
    path = write_clip(tmp_path / "clip.mp4", frames)
    content = bytearray(path.read_bytes())
    place = content.index(b"tkhd") + 4 + 40  # the matrix of the track header; 90 degrees clockwise
    matrix = [0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 0x40000000]
    content[place : place + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in matrix)
    path.write_bytes(content)
    (batch,) = video(path)
    (frame, *_) = batch.frames
    assert frame.shape == (16, 32, 3)
    assert frame[:, -8:].mean() > 200 > 50 > frame[:, :8].mean(), "bright at the right"


def test_without_pyav_the_extra_is_named(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"pip install 'ctta\[video\]'"):
        video(clip)


# ---- cameras ----


def test_a_camera_that_drops_is_connected_to_again(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_all_frames(monkeypatch)
    sentences: list[str] = []
    started = time.time()
    with dropping_camera(draw_frames(30), num_per_connection=5) as address:
        stream = video(address, batch_size=4)
        stream.on_change = sentences.append
        batches = list(islice(stream, 4))
        with pytest.raises(AttributeError, match="position"):
            stream.position = 0
        (later,) = islice(stream, 1)
    assert torch.cat([batch.index for batch in batches]).tolist() == list(range(16))
    pictures = torch.cat([batch.x for batch in batches])
    expected = torch.from_numpy(draw_frames(30)[:16]).permute(0, 3, 1, 2) / 255
    assert (pictures - expected).abs().mean() < 0.05  # JPEG
    assert started <= batches[0].seconds[0] <= batches[-1].seconds[-1] <= time.time()
    assert sentences[0].startswith(f"{address} dropped (") and sentences[1] == f"{address} is back"
    assert later.index[0] == 16, "numbers go on"


def test_a_wrong_address_fails_at_once_without_its_password() -> None:
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:9/door cannot be read as video") as caught:
        next(iter(video("http://me:secret@127.0.0.1:9/door")))
    assert "secret" not in str(caught.value)


class FakeCamera:
    """Yields the given numbers of frames per connection; 0 fails to connect, and after the last there are no frames."""

    def __init__(self, *counts: int) -> None:
        self.counts = iter(counts)

    def __call__(self) -> Iterator[Frames]:
        count = next(self.counts, None)
        if count is None:
            threading.Event().wait(0.1)
            return
        if count == 0:
            raise DataError("no route")
        yield from draw_frames(count)


def watch(camera: Callable[[], Iterator[Frames]], sampling: FrameSampling | None = None, **settings: Any) -> FrameFeed:
    """Return the feed of a camera that is a function."""
    feed = FrameFeed("rtsp://door", sampling or FrameSampling(), **settings)
    feed._read_camera = camera  # type: ignore[method-assign]
    return feed


class RecordingEvent(threading.Event):
    """An event that notes for how long it is waited for, without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return self.is_set()


def test_the_wait_doubles_until_frames_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctta.data.datasets.video.FIRST_DELAY", 0.05)
    monkeypatch.setattr("ctta.data.datasets.video.MAX_DELAY", 0.2)
    feed = watch(FakeCamera(1, 0, 0, 0, 1, 1))
    feed._stop = stopped = RecordingEvent()
    with feed:
        assert len(list(islice(feed.read(), 3))) == 3
    # After a frame, three failures, and two connections with a frame each.
    assert stopped.waits[:5] == [0.05, 0.1, 0.2, 0.2, 0.05]
    assert feed.num_reconnects == 2 and not feed.is_up


@pytest.mark.usefixtures("quick")
def test_a_slow_reader_gets_the_latest_frames() -> None:
    with watch(FakeCamera(20), FrameSampling(every=2), capacity=3) as feed:
        while feed.last_frame_at is None or feed.is_up:  # until all have come
            time.sleep(0.005)
        assert [frame.number for frame in islice(feed.read(), 3)] == [14, 16, 18]
    assert (feed.num_frames, feed.num_dropped) == (10, 7)


@pytest.mark.usefixtures("quick")
def test_a_feed_ends_on_time_and_may_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def film() -> Iterator[Frames]:
        nonlocal now
        for number, frame in enumerate(draw_frames(5)):
            now = 100.0 + 0.1 * number
            yield frame

    with monkeypatch.context() as patch:
        patch.setattr("ctta.data.datasets.video.time", SimpleNamespace(time=time.time, monotonic=lambda: now))
        with watch(film, FrameSampling(seconds=0.15)) as feed:
            assert [frame.number for frame in feed.read()] == [0, 1]

    def interrupt() -> None:
        raise KeyboardInterrupt

    with watch(FakeCamera()) as feed, pytest.raises(KeyboardInterrupt):
        next(feed.read(interrupt))


def test_a_camera_must_connect_at_first_unless_it_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctta.data.datasets.video.FIRST_DELAY", 0.01)
    camera = FakeCamera(0, 1)
    with watch(camera) as feed, pytest.raises(DataError, match="route"):
        list(feed.read())
    with watch(FakeCamera(0, 1), must_connect=False) as feed:
        assert next(feed.read()).number == 0


def test_what_fails_in_the_thread_reaches_the_reader() -> None:
    def film() -> Iterator[Frames]:
        yield from draw_frames(1)
        raise MemoryError

    with watch(film) as feed:
        frames = feed.read()
        assert next(frames).number == 0
        with pytest.raises(MemoryError):
            next(frames)
    assert feed.error == "MemoryError" and feed.has_ended


def test_frames_of_other_sizes_are_refused(tmp_path: Path) -> None:
    for number, side in enumerate((16, 16, 24)):
        Image.fromarray(draw_frames(1, side)[0]).save(tmp_path / f"{number}.png")
    with pytest.raises(InputError):
        list(video(tmp_path / "%d.png"))
    assert len(next(iter(video(tmp_path / "%d.png", size=(8, 8)))).x) == 3


def test_the_stream_feeds_a_model(clip: Path) -> None:
    net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(768, 4))
    model = ctta.adapt(net, "tent")
    for batch in video(clip, every=2, batch_size=4):
        assert model(batch.x).shape == (len(batch.x), 4)
    assert model.num_steps == 3

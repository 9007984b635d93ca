"""Cameras that the service reads by itself: a thread each, which feeds the frames to a stream."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from ctta.data.datasets.video import FrameFeed, FrameSampling, VideoFrame, describe_address, import_av, is_live
from ctta.data.streams.video import frame_to_tensor
from ctta.errors import ConfigError, DataError, InputError, first_line
from ctta.serve.http import ApiError, validate_stream_name
from ctta.serve.service import Service

logger = logging.getLogger("ctta.serve")

CAPACITY = 2  # frames that wait: those of a camera that is faster than its stream are skipped
PAUSE = 1.0  # seconds after a frame that was not answered


@dataclass(frozen=True)
class StreamCamera:
    """A camera or recording, and the stream that it feeds.

    Attributes:
        stream: Name of the stream.
        address: Address, device or file, as for :func:`ctta.data.streams.video`.
        sampling: Which frames to take.
    """

    stream: str
    address: str = field(repr=False)  # an address may contain a password
    sampling: FrameSampling = field(default_factory=FrameSampling)

    def __post_init__(self) -> None:
        import_av()
        try:
            validate_stream_name(self.stream)
        except ApiError as error:
            raise ConfigError(f"{self.stream!r} cannot be the name of a stream: {error.message}") from None
        is_file = not is_live(self.address) and "://" not in self.address and "%" not in self.address
        if is_file and not Path(self.address).exists():
            raise ConfigError(f"{self.address} does not exist: give a camera or a video file for {self.stream}")

    @classmethod
    def parse(cls, text: str, sampling: FrameSampling) -> "StreamCamera":
        """Parse the value of ``--camera``.

        Args:
            text: Such as ``camera7=rtsp://door:554/1``.
            sampling: Which frames to take.

        Returns:
            The camera.

        Raises:
            ConfigError: If it is not of this form, or names a file that does not exist.
        """
        name, separator, address = text.partition("=")
        if not separator or not address:
            raise ConfigError(f"expected --camera NAME=ADDRESS, such as camera7=rtsp://door:554/1, got {text!r}")
        return cls(name, address, sampling)


class CameraReader:
    """Reads a camera in a thread and feeds its frames to a stream, one request after the other."""

    def __init__(self, service: Service, camera: StreamCamera) -> None:
        self.service, self.camera = service, camera
        self.feed = FrameFeed(
            camera.address, camera.sampling, capacity=CAPACITY, must_connect=False, on_change=logger.warning
        )
        self.num_answered = self.num_rejected = 0
        self.last_answer: dict[str, Any] | None = None
        self.error: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"camera {camera.stream}", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to read; requests are made in an event loop."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the request that it has made."""
        self._stop.set()
        self.feed.stop()
        self._thread.join()

    def describe(self) -> dict[str, Any]:
        """Return the health of the camera, as ``GET /cameras`` shows it."""
        return {
            "stream": self.camera.stream,
            "address": describe_address(self.camera.address),
            "up": self.feed.is_up,
            "ended": self.feed.has_ended,
            "frames": self.feed.num_frames,
            "answered": self.num_answered,
            "skipped": self.num_skipped,
            "reconnects": self.feed.num_reconnects,
            "last_frame_at": self.feed.last_frame_at,
            "error": self.error or self.feed.error,
            "last_answer": self.last_answer,
        }

    @property
    def num_skipped(self) -> int:
        """Frames that the stream did not answer: they came too fast, or were rejected."""
        return self.feed.num_dropped + self.num_rejected

    def _run(self) -> None:
        try:
            with self.feed:
                for frame in self.feed.read():
                    if self._stop.is_set():
                        return
                    self._answer(frame)
        except DataError as error:  # the feed remembers it
            logger.error("camera %s ended: %s", self.camera.stream, error)
        except Exception as error:
            self.error = first_line(error)
            logger.exception("camera %s ended", self.camera.stream)

    def _answer(self, frame: VideoFrame) -> None:
        try:
            name = self.camera.stream
            x = frame_to_tensor(frame.pixels, self.service.image_size or self.service.store.image_size(name))
            assert self._loop is not None, "start() comes first"
            result = asyncio.run_coroutine_threadsafe(self.service.infer(name, x, adapt=True), self._loop).result()
        except (ApiError, InputError) as error:
            self.error = error.message if isinstance(error, ApiError) else str(error)
            self.num_rejected += 1
            self._stop.wait(PAUSE)
        except CancelledError:  # the service ends
            self._stop.set()
        else:
            answer = self.service.classify(result.logits) if result.logits.ndim == 2 else {}
            self.last_answer = {"frame": frame.number, "time": round(frame.seconds, 3), **answer}
            self.error = None
            self.num_answered += 1  # last: whoever sees the count sees the answer too


class CameraReaders(Collector):
    """All cameras of a service, with their metrics; ConfigError if two of them feed the same stream."""

    def __init__(self, service: Service, cameras: Sequence[StreamCamera]) -> None:
        names = [camera.stream for camera in cameras]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"several cameras feed the stream {repeated[0]}: give each a stream of its own")
        self.readers = [CameraReader(service, camera) for camera in cameras]
        if self.readers:
            service.metrics.registry.register(self)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the cameras within the block."""
        loop = asyncio.get_running_loop()
        for reader in self.readers:
            reader.start(loop)
        try:
            yield
        finally:
            await asyncio.gather(*(asyncio.to_thread(reader.stop) for reader in self.readers))

    @override
    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("ctta_camera_up", "Whether frames arrive from a camera.", labels=["camera"])
        age = GaugeMetricFamily("ctta_camera_frame_age_seconds", "Time since the last frame.", labels=["camera"])
        frames = CounterMetricFamily("ctta_camera_frames", "Frames taken from a camera.", labels=["camera"])
        skipped = CounterMetricFamily("ctta_camera_skipped_frames", "Frames without an answer.", labels=["camera"])
        reconnects = CounterMetricFamily("ctta_camera_reconnects", "Connections after a drop.", labels=["camera"])
        for reader in self.readers:
            name, feed = [reader.camera.stream], reader.feed
            up.add_metric(name, float(feed.is_up))
            age.add_metric(name, float("nan") if feed.last_frame_at is None else time.time() - feed.last_frame_at)
            frames.add_metric(name, feed.num_frames)
            skipped.add_metric(name, reader.num_skipped)
            reconnects.add_metric(name, feed.num_reconnects)
        return up, age, frames, skipped, reconnects

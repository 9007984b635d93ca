"""Cameras that the service reads by itself: a thread each, which feeds the frames to a stream."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from ctta.data.datasets.video import FrameFeed, FrameSampling, VideoFrame, describe_source, import_av, is_live
from ctta.data.streams.video import frame_to_tensor
from ctta.errors import ConfigError, DataError, InputError, first_line
from ctta.serve.auth import Authenticator
from ctta.serve.errors import ApiError
from ctta.serve.schemas import error_responses, validate_stream_name
from ctta.serve.service import Service
from ctta.serve.stream import InferenceResult

logger = logging.getLogger("ctta.serve")

CAPACITY = 2  # frames that wait: those of a camera that is faster than its stream are skipped
PAUSE = 1.0  # seconds after a frame that was not answered


@dataclass(frozen=True)
class VideoSource:
    """A camera or recording, and the stream that it feeds.

    Attributes:
        stream: Name of the stream.
        source: Address, device or file, as for :func:`ctta.data.streams.video`.
        sampling: Which frames to take.
    """

    stream: str
    source: str = field(repr=False)  # an address may contain a password
    sampling: FrameSampling = field(default_factory=FrameSampling)

    def __post_init__(self) -> None:
        import_av()
        try:
            validate_stream_name(self.stream)
        except ApiError as error:
            raise ConfigError(f"{self.stream!r} cannot be the name of a stream: {error.message}") from None
        is_file = not is_live(self.source) and "://" not in self.source and "%" not in self.source
        if is_file and not Path(self.source).exists():
            raise ConfigError(f"{self.source} does not exist: give a camera or a video file for {self.stream}")

    @classmethod
    def parse(cls, text: str, sampling: FrameSampling) -> "VideoSource":
        """Parse the value of ``--source``.

        Args:
            text: Such as ``camera7=rtsp://door:554/1``.
            sampling: Which frames to take.

        Returns:
            The source.

        Raises:
            ConfigError: If it is not of this form, or names a file that does not exist.
        """
        name, separator, source = text.partition("=")
        if not separator or not source:
            raise ConfigError(f"expected --source NAME=SOURCE, such as camera7=rtsp://door:554/1, got {text!r}")
        return cls(name, source, sampling)


class SourcePuller:
    """Reads a source in a thread and feeds its frames to a stream, one request after the other.

    Args:
        service: Answers the requests.
        source: What to read.
    """

    def __init__(self, service: Service, source: VideoSource) -> None:
        self.service, self.source = service, source
        self.feed = FrameFeed(
            source.source, source.sampling, capacity=CAPACITY, must_connect=False, on_change=logger.warning
        )
        self.num_answered = self.num_rejected = 0
        self.last_answer: dict[str, Any] | None = None
        self.error: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"source {source.stream}", daemon=True)

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
        """Return the health of the source, as ``GET /sources`` shows it."""
        return {
            "stream": self.source.stream,
            "source": describe_source(self.source.source),
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
            logger.error("source %s ended: %s", self.source.stream, error)
        except Exception as error:
            self.error = first_line(error)
            logger.exception("source %s ended", self.source.stream)

    def _answer(self, frame: VideoFrame) -> None:
        try:
            result = self._request(frame).result()
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

    def _request(self, frame: VideoFrame) -> "Future[InferenceResult]":
        name = self.source.stream
        x = frame_to_tensor(frame.pixels, self.service.image_size or self.service.store.image_size(name))
        assert self._loop is not None, "start() comes first"
        return asyncio.run_coroutine_threadsafe(self.service.infer(name, x, adapt=True), self._loop)


class SourcePullers(Collector):
    """All sources of a service, with their metrics.

    Args:
        service: Answers the requests.
        sources: What to read.

    Raises:
        ConfigError: If two sources feed the same stream.
    """

    def __init__(self, service: Service, sources: Sequence[VideoSource]) -> None:
        names = [source.stream for source in sources]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"several sources feed the stream {repeated[0]}: give each a stream of its own")
        self.pullers = [SourcePuller(service, source) for source in sources]
        if self.pullers:
            service.metrics.registry.register(self)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the sources within the block."""
        loop = asyncio.get_running_loop()
        for puller in self.pullers:
            puller.start(loop)
        try:
            yield
        finally:
            await asyncio.gather(*(asyncio.to_thread(puller.stop) for puller in self.pullers))

    @override
    def collect(self) -> Iterable[Metric]:
        return list(self._collect())

    def _collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("ctta_source_up", "Whether frames arrive from a source.", labels=["source"])
        age = GaugeMetricFamily("ctta_source_frame_age_seconds", "Time since the last frame.", labels=["source"])
        frames = CounterMetricFamily("ctta_source_frames", "Frames taken from a source.", labels=["source"])
        skipped = CounterMetricFamily("ctta_source_skipped_frames", "Frames without an answer.", labels=["source"])
        reconnects = CounterMetricFamily("ctta_source_reconnects", "Connections after a drop.", labels=["source"])
        for puller in self.pullers:
            name, feed = [puller.source.stream], puller.feed
            up.add_metric(name, float(feed.is_up))
            age.add_metric(name, float("nan") if feed.last_frame_at is None else time.time() - feed.last_frame_at)
            frames.add_metric(name, feed.num_frames)
            skipped.add_metric(name, puller.num_skipped)
            reconnects.add_metric(name, feed.num_reconnects)
        yield from (up, age, frames, skipped, reconnects)


def source_routes(pullers: SourcePullers, auth: Authenticator) -> APIRouter:
    """Return the route ``/sources``."""
    router = APIRouter(tags=["sources"])

    @router.get("/sources", dependencies=[Depends(auth.require_infer)], responses=error_responses())
    async def list_sources() -> list[dict[str, Any]]:
        """List the sources that the service reads by itself: their health, and the last answer of each."""
        return [puller.describe() for puller in pullers.pullers]

    return router

"""Cameras: frames of a live source, decoded by a thread that connects again whenever the source drops."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ctta.core.validation import check_integer
from ctta.data.datasets.video import (
    TIMEOUT,
    FrameSampling,
    VideoFrame,
    decode_frames,
    describe_source,
    is_live,
    open_video,
    read_recording,
    to_pixels,
)
from ctta.errors import DataError

#: Seconds before connecting again: the first time, and at most; each failure doubles them.
FIRST_DELAY, MAX_DELAY = 1.0, 30.0
POLL_SECONDS = 0.2

#: Connects to a source and yields its frames until it drops.
OpenFrames = Callable[[], Iterator[NDArray[np.uint8]]]


class FrameFeed:
    """Frames of a source as they come; a context manager that runs a thread.

    Whoever reads a camera too slowly misses frames, the oldest first, instead of falling behind. A recording waits for
    its reader, and ends.

    Args:
        source: Device, address or file.
        sampling: Which frames to take. Its ``seconds`` count from the start of the feed for a camera.
        capacity: Number of frames to keep for the reader.
        first_number: Number of the first frame.
        must_connect: Whether it is an error if a camera cannot be read at first; otherwise it is tried again.
        on_change: Called in the thread with a sentence when the source drops and when it returns.
        open_frames: Yields the frames of a camera; by default PyAV does.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        sampling: FrameSampling,
        *,
        capacity: int = 32,
        first_number: int = 0,
        must_connect: bool = True,
        on_change: Callable[[str], None] | None = None,
        open_frames: OpenFrames | None = None,
    ) -> None:
        self.source, self.sampling = source, sampling
        self.name, self.is_live = describe_source(source), is_live(source) or open_frames is not None
        self.capacity, self.must_connect = check_integer("capacity", capacity, 1), must_connect
        self.on_change = on_change or (lambda _sentence: None)
        self.is_up, self.has_ended = False, False
        self.num_frames = self.num_dropped = self.num_reconnects = 0
        self.last_frame_at: float | None = None  # Unix time
        self.error: str | None = None
        self._open_frames = open_frames or self._read_camera
        self._number = first_number
        self._last_taken: float | None = None
        self._deadline: float | None = None
        self._frames: deque[VideoFrame] = deque()
        self._changed, self._stop = threading.Condition(), threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"video {self.name}", daemon=True)

    def __enter__(self) -> Self:
        if self.is_live and self.sampling.seconds is not None:
            self._deadline = time.monotonic() + self.sampling.seconds
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.join(TIMEOUT + 1)

    def stop(self) -> None:
        """Ask the thread to end; frames that have arrived can still be read."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()

    def read(self, on_wait: Callable[[], None] | None = None) -> Iterator[VideoFrame]:
        """Yield the frames as they arrive, until the source ends or the feed is stopped.

        Args:
            on_wait: Called several times a second while there is no frame; may raise.

        Raises:
            DataError: A recording cannot be read, or a camera cannot be connected to at first. Whatever else fails in
                the thread is raised as it is.
        """
        while True:
            with self._changed:
                if not self._frames and not self._is_over():
                    self._changed.wait(POLL_SECONDS)
                frame = self._frames.popleft() if self._frames else None
                self._changed.notify_all()
            if frame is not None:
                yield frame
            elif self._is_over():
                if self._failure is not None:
                    raise self._failure
                return
            elif on_wait is not None:
                on_wait()

    def _is_over(self) -> bool:
        return self.has_ended or self._stop.is_set() or self._is_late()

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            if self.is_live:
                self._follow_camera()
            else:
                self._play_recording()
        except Exception as error:  # for the reader, to whom the feed would seem to have ended
            self._failure, self.error = error, str(error) or type(error).__name__
        finally:
            self.is_up, self.has_ended = False, True
            with self._changed:
                self._changed.notify_all()

    def _play_recording(self) -> None:
        for frame in read_recording(self.source, self.sampling):
            self.is_up = True
            with self._changed:
                while len(self._frames) >= self.capacity and not self._stop.is_set():
                    self._changed.wait(POLL_SECONDS)
                if self._stop.is_set():
                    return
                self._push(frame)

    def _follow_camera(self) -> None:
        delay = FIRST_DELAY
        while not self._is_over():
            try:
                for pixels in self._open_frames():
                    if self._is_over():
                        return
                    if not self.is_up:
                        self._note_return()
                    delay = FIRST_DELAY
                    self._take(pixels)
                self.error = "the source ended"
            except DataError as error:
                if self.must_connect and self.last_frame_at is None:
                    raise
                self.error = str(error)
            was_up, self.is_up = self.is_up, False
            if was_up:
                self.on_change(f"{self.name} dropped ({self.error}); connecting again")
            self._stop.wait(delay)
            delay = min(2 * delay, MAX_DELAY)

    def _note_return(self) -> None:
        self.is_up, self.error = True, None
        if self.last_frame_at is not None:
            self.num_reconnects += 1
            self.on_change(f"{self.name} is back")

    def _take(self, pixels: NDArray[np.uint8]) -> None:
        self.last_frame_at = now = time.time()
        number, self._number = self._number, self._number + 1
        if not self.sampling.takes(number, now, self._last_taken):
            return
        self._last_taken = now
        with self._changed:
            while len(self._frames) >= self.capacity:
                self._frames.popleft()
                self.num_dropped += 1
            self._push(VideoFrame(number, now, pixels))

    def _push(self, frame: VideoFrame) -> None:
        self._frames.append(frame)
        self.num_frames += 1
        self.last_frame_at = time.time()
        self._changed.notify_all()

    def _read_camera(self) -> Iterator[NDArray[np.uint8]]:
        with open_video(self.source) as container:
            for frame in decode_frames(container):
                yield to_pixels(frame)

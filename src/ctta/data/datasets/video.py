"""Video: which frames to take, and how to decode those of a recording or of a camera that may drop."""

import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from ctta.core.validation import check_integer, check_positive
from ctta.errors import ConfigError, DataError

#: Seconds to wait for a camera to answer, and for its next frame.
TIMEOUT = 10.0
#: Frames per second of images named by a pattern, and of videos that do not say.
DEFAULT_RATE = Fraction(25)
#: Ends of the paths of web addresses that are recordings; others are cameras.
RECORDING_SUFFIXES = {".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"}
#: Seconds by which times that are read from a table may differ from those of the frames.
TIME_TOLERANCE = 1e-6
_PATTERN = re.compile(r"%0?(\d*)d")


def import_av() -> ModuleType:
    """Import and return PyAV, which reads and writes video by FFmpeg."""
    try:
        import av
    except ImportError as error:
        raise ImportError("video needs PyAV, which is not installed: pip install 'ctta[video]'") from error
    return av


@dataclass(frozen=True)
class VideoFrame:
    """A frame of a video."""

    number: int  # how many frames of the video came before it, whether they were taken or not
    seconds: float  # time since the start of a recording; the Unix time at which a frame of a camera arrived
    pixels: NDArray[np.uint8]  # uint8 (H, W, 3) in RGB


@dataclass(frozen=True)
class FrameSampling:
    """Which frames of a video to take."""

    every: int = 1  # take every n-th frame
    interval: float | None = None  # seconds of the intervals of which to take the first frame, instead of ``every``
    seconds: float | None = None  # duration after which to end; None for the whole video

    def __post_init__(self) -> None:
        check_integer("every", self.every, 1)
        for name in ("interval", "seconds"):
            if (value := getattr(self, name)) is not None:
                check_positive(name, value)
        if self.every > 1 and self.interval is not None:
            raise ConfigError(f"give every or interval, not both: got every={self.every}, interval={self.interval}")

    def takes(self, number: int, seconds: float, last: float | None) -> bool:
        """Return whether to take a frame, by its number and time, and by the time of the last one taken, if any."""
        if self.interval is None:
            return number % self.every == 0
        return last is None or self._cell(seconds) > self._cell(last)

    def _cell(self, seconds: float) -> int:
        # Half a microsecond, so that a frame at 0.1 + 0.2 seconds is not before one at 0.3.
        return math.floor((seconds + 5e-7) / (self.interval or 1))


def is_live(address: str | os.PathLike[str]) -> bool:
    """Return whether an address is that of a camera, whose frames come in real time and only once.

    Those are devices such as ``/dev/video0`` and addresses such as ``rtsp://…``, except web addresses that end like
    the name of a video file.

    >>> is_live("clip.mp4"), is_live("rtsp://door:554/1"), is_live("http://door/stream"), is_live("https://a/b.mp4")
    (False, True, True, False)
    """
    text = os.fspath(address)
    if text.startswith("/dev/"):
        return True
    parts = urlsplit(text)
    if "://" not in text or parts.scheme == "file":
        return False
    return not (parts.scheme in ("http", "https") and Path(parts.path).suffix.lower() in RECORDING_SUFFIXES)


def describe_address(address: str | os.PathLike[str]) -> str:
    """Return a name for a video: that of the file, or the address without a password.

    >>> describe_address("clips/door.mp4"), describe_address("rtsp://me:secret@door:554/1?token=abc")
    ('door.mp4', 'rtsp://door:554/1')
    """
    text = os.fspath(address)
    if "://" not in text:
        return text if text.startswith("/dev/") else Path(text).name
    parts = urlsplit(text)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def open_video(address: str | os.PathLike[str]) -> AbstractContextManager[Any]:
    """Open a file, a pattern, a device or an address with PyAV; raise a DataError unless it has a video."""
    av, text, options = import_av(), os.fspath(address), {}
    name = describe_address(address)
    if "://" not in text and _PATTERN.search(Path(text).name):
        options["start_number"] = str(_find_first_number(Path(text)))
    elif text.startswith("rtsp"):
        options["rtsp_transport"] = "tcp"  # over UDP, lost packets smear the image
    elif "://" not in text and not Path(text).exists():
        raise DataError(f"{text} does not exist: give a video file, a pattern, a device or an address")
    form = "v4l2" if text.startswith("/dev/video") else None
    try:
        container = av.open(text, format=form, options=options, timeout=TIMEOUT if is_live(address) else None)
    except (av.error.FFmpegError, OSError) as error:
        raise DataError(f"{name} cannot be read as video ({_reason(error)}): check the path or address") from error
    if not container.streams.video:
        container.close()
        raise DataError(f"{name} contains no video: give another file")
    return container  # type: ignore[no-any-return]


def decode_frames(container: Any) -> Iterator[Any]:
    """Yield the frames of a container as PyAV has them; what cannot be decoded is left out."""
    av, stream = import_av(), container.streams.video[0]
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
            if packet is None:
                return
            frames = packet.decode()
        except av.error.EOFError:
            return
        except av.error.InvalidDataError:  # a damaged packet: the next ones may be intact
            continue
        except (av.error.FFmpegError, OSError) as error:
            raise DataError(f"reading the video failed ({_reason(error)})") from error
        yield from frames


def to_pixels(frame: Any) -> NDArray[np.uint8]:
    """Return a frame of PyAV as uint8 (H, W, 3), upright as players show it."""
    pixels: NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
    turns = round(getattr(frame, "rotation", 0) / 90) % 4  # phones store how to turn the image, counterclockwise
    return np.rot90(pixels, turns) if turns else pixels


def frame_rate(stream: Any) -> Fraction:
    """Return the frames per second of PyAV's stream, as far as it says."""
    return Fraction(stream.average_rate or stream.guessed_rate or DEFAULT_RATE)


def estimate_num_frames(address: str | os.PathLike[str], sampling: FrameSampling) -> int | None:
    """Return about how many frames of a recording will be taken; None if it does not say how long it is."""
    with open_video(address) as container:
        stream = container.streams.video[0]
        rate = float(frame_rate(stream))
        duration = stream.frames / rate if stream.frames else (container.duration or 0) / 1e6
    duration = min(duration, sampling.seconds or math.inf)
    count = duration * rate / sampling.every if sampling.interval is None else duration / sampling.interval
    return math.ceil(count) or None


def clip_rate(address: str | os.PathLike[str], sampling: FrameSampling) -> Fraction:
    """Return the frames per second at which the taken frames of a video play in real time."""
    if sampling.interval is not None:
        rate = Fraction(1 / sampling.interval)
    elif is_live(address):
        rate = DEFAULT_RATE / sampling.every
    else:
        with open_video(address) as container:
            rate = frame_rate(container.streams.video[0]) / sampling.every
    return max(rate, Fraction(1, 60)).limit_denominator(1001)


def read_recording(
    address: str | os.PathLike[str],
    sampling: FrameSampling,
    *,
    after: tuple[int, float] | None = None,
    num_skipped: int = 0,
) -> Iterator[VideoFrame]:
    """Decode the frames of a recording that are to be taken, without the first ``num_skipped`` of them.

    ``after`` is the number and the time of the frame to continue after; by default the video is read from the start.
    """
    last = None if after is None else after[1]
    for number, seconds, frame in _number_frames(address, after):
        if sampling.seconds is not None and seconds >= sampling.seconds:
            return
        if sampling.takes(number, seconds, last):
            last = seconds
            if num_skipped:
                num_skipped -= 1
            else:
                yield VideoFrame(number, seconds, to_pixels(frame))


def _number_frames(
    address: str | os.PathLike[str], after: tuple[int, float] | None
) -> Iterator[tuple[int, float, Any]]:
    """Yield number, time and frame of every frame of a recording, or of those after one of them."""
    if after is not None:
        with open_video(address) as container:
            frames = _seek(container, after[1])
            if frames is not None:
                yield from _add_times(container, frames, after[0] + 1)
                return
    # From the start, also if the recording has no usable index: then the frames are counted.
    with open_video(address) as container:
        for number, seconds, frame in _add_times(container, _decode_in_threads(container), 0):
            if after is None or number > after[0]:
                yield number, seconds, frame


def _seek(container: Any, seconds: float) -> Iterator[Any] | None:
    """Return the frames after the one at a time; None if there is none at exactly that time."""
    stream = container.streams.video[0]
    first = stream.start_time or 0
    try:
        container.seek(first + round(seconds / stream.time_base), stream=stream)  # to a key frame at or before it
    except import_av().error.FFmpegError:
        return None
    frames = _decode_in_threads(container)
    for frame in frames:
        time = None if frame.pts is None else float((frame.pts - first) * stream.time_base)
        if time is None or time > seconds + TIME_TOLERANCE:
            return None
        if time >= seconds - TIME_TOLERANCE:
            return frames
    return None


def _decode_in_threads(container: Any) -> Iterator[Any]:
    container.streams.video[0].thread_type = "AUTO"
    return decode_frames(container)


def _add_times(container: Any, frames: Iterator[Any], first_number: int) -> Iterator[tuple[int, float, Any]]:
    stream = container.streams.video[0]
    rate, first = frame_rate(stream), stream.start_time or 0
    for number, frame in enumerate(frames, start=first_number):
        time = number / rate if frame.pts is None else (frame.pts - first) * stream.time_base
        yield number, float(time), frame


def _find_first_number(pattern: Path) -> int:
    """Return the lowest number of a file that a pattern such as ``frames-%05d.png`` names."""
    before, after = _PATTERN.split(pattern.name)[::2]
    name = re.compile(f"{re.escape(before)}(\\d+){re.escape(after)}")
    folder = pattern.parent
    names = os.listdir(folder) if folder.is_dir() else []
    numbers = [int(match[1]) for match in map(name.fullmatch, names) if match]
    if not numbers:
        raise DataError(f"no file fits the pattern {pattern}: check the path, such as frames-%05d.png")
    return min(numbers)


def _reason(error: BaseException) -> str:
    """Return why FFmpeg failed, without the address, which may contain a password."""
    return getattr(error, "strerror", None) or type(error).__name__


#: Seconds before connecting again: the first time, and at most; each failure doubles them.
FIRST_DELAY, MAX_DELAY = 1.0, 30.0
POLL_SECONDS = 0.2


class FrameFeed:
    """Frames of a video as they come; a context manager that runs a thread.

    Whoever reads a camera too slowly misses frames, the oldest first, instead of falling behind: ``capacity`` frames
    are kept. A recording waits for its reader, and ends. For a camera, ``sampling.seconds`` count from the start of the
    feed, and ``on_change`` is called in the thread with a sentence when it drops and when it returns. Without
    ``must_connect``, a camera that fails at first is tried again.
    """

    def __init__(
        self,
        address: str | os.PathLike[str],
        sampling: FrameSampling,
        *,
        capacity: int = 32,
        first_number: int = 0,
        must_connect: bool = True,
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        self.address, self.sampling = address, sampling
        self.name, self.is_live = describe_address(address), is_live(address)
        self.capacity, self.must_connect = check_integer("capacity", capacity, 1), must_connect
        self.on_change = on_change or (lambda _sentence: None)
        self.is_up, self.has_ended = False, False
        self.num_frames = self.num_dropped = self.num_reconnects = 0
        self.last_frame_at: float | None = None  # Unix time
        self.error: str | None = None
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

    def __exit__(self, *_error: object) -> None:
        self.stop()
        self._thread.join(TIMEOUT + 1)

    def stop(self) -> None:
        """Ask the thread to end; frames that have arrived can still be read."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()

    def read(self, on_wait: Callable[[], None] | None = None) -> Iterator[VideoFrame]:
        """Yield the frames as they arrive, until the video ends or the feed is stopped; raise what fails in the thread.

        Several times a second while there is no frame, ``on_wait`` is called, which may raise.
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
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        return self.has_ended or self._stop.is_set() or is_late

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
        for frame in read_recording(self.address, self.sampling):
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
                for pixels in self._read_camera():
                    if self._is_over():
                        return
                    if not self.is_up:
                        self._note_return()
                    delay = FIRST_DELAY
                    self._take(pixels)
                self.error = "the video ended"
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
        """Connect to the camera and yield its frames until it drops."""
        with open_video(self.address) as container:
            for frame in decode_frames(container):
                yield to_pixels(frame)

"""Streams of frames: of a recording, which can be resumed anywhere, of a camera, or frames that arrive one by one."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.core.validation import check_integer
from ctta.data.datasets.video import (
    FrameFeed,
    FrameSampling,
    VideoFrame,
    describe_address,
    import_av,
    is_live,
    read_recording,
)
from ctta.data.streams.stream import Batch
from ctta.errors import InputError
from ctta.io.images import Resize, import_pillow, to_unit_floats, to_upright_rgb


class LiveStream(Iterator[Batch]):
    """Batches of frames as they arrive; created by :func:`live`.

    It is single-pass: it has no ``len`` and no ``hash``, and ``position`` can be read but not set. After a ``break`` or
    an error of the camera, a new loop continues with the next frame; frames of an incomplete batch are kept.

    Args:
        frames: The frames, as for :func:`live`.
        batch_size: Frames per batch.
        name: Name of the domain.
    """

    def __init__(self, frames: Iterable[Any], batch_size: int, name: str) -> None:
        batch_size = check_integer("batch_size", batch_size, 1)
        self.name, self.batch_size = name, batch_size
        self.domains = [name]
        self._frames = iter(frames)
        self._pending: list[Tensor] = []
        self._num_batches = self._num_frames = 0

    @property
    def position(self) -> int:
        """Number of batches yielded so far; it cannot be set, as earlier frames are not kept."""
        return self._num_batches

    @position.setter
    def position(self, value: int) -> None:
        raise AttributeError(
            f"the position of a live stream cannot be set (to {value}), as its frames are not kept: continue with new "
            "frames, or save the frames as images and use ctta.data.streams.folder"
        )

    def __next__(self) -> Batch:
        while len(self._pending) < self.batch_size:
            try:
                frame = next(self._frames)
            except StopIteration:
                if not self._pending:
                    raise
                break  # yield the last, smaller batch
            self._pending.append(self._convert(frame))
        x, self._pending = torch.stack(self._pending), []
        index = torch.arange(self._num_frames, self._num_frames + len(x))
        self._num_batches, self._num_frames = self._num_batches + 1, self._num_frames + len(x)
        return Batch(x, None, self.name, index)

    def _convert(self, frame: Any) -> Tensor:
        label = f"frame {self._num_frames + len(self._pending)} of {self.name!r}"
        x = _convert_frame(frame, label)
        if self._pending and x.shape != self._pending[0].shape:
            size, expected = tuple(x.shape[1:]), tuple(self._pending[0].shape[1:])
            raise InputError(
                f"images in a batch must have the same size, but {label} has {size} pixels and the frames before it "
                f"{expected}: resize the frames to one size, or use batch_size=1"
            )
        return x

    def __repr__(self) -> str:
        return f"LiveStream({self.name!r}, {self._num_batches} batches of {self.batch_size} so far)"


def live(frames: Iterable[Any], *, batch_size: int = 32, name: str = "camera") -> LiveStream:
    """Return a single-pass stream of frames that arrive one by one, such as those of a camera.

    A batch is yielded as soon as its frames have arrived; when the frames end, the last batch may be smaller.

    Args:
        frames: uint8 arrays of shape (H, W, 3) in RGB order (OpenCV's are BGR: give ``frame[:, :, ::-1]``), PIL images,
            or float tensors of shape (3, H, W) in [0, 1].
        batch_size: Frames per batch, for which the model has to wait.
        name: Name of the domain.

    Returns:
        The stream.

    >>> import numpy as np
    >>> frames = (np.full((4, 6, 3), brightness, np.uint8) for brightness in range(5))
    >>> [tuple(batch.x.shape) for batch in live(frames, batch_size=2)]
    [(2, 3, 4, 6), (2, 3, 4, 6), (1, 3, 4, 6)]
    """
    return LiveStream(frames, batch_size, name)


def _convert_frame(frame: Any, label: str) -> Tensor:
    """Return a frame as floats (3, H, W) in new memory, as cameras write the next frame over the last."""
    if hasattr(frame, "convert"):  # a PIL image; Pillow need not be installed to check
        frame = np.asarray(to_upright_rgb(frame, label))
    if isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3:
        return to_unit_floats(np.array(frame, order="C")[None])[0]
    if not (isinstance(frame, Tensor) and frame.is_floating_point() and frame.ndim == 3 and len(frame) == 3):
        given = f"{frame.dtype} {tuple(frame.shape)}" if hasattr(frame, "dtype") else repr(frame)
        raise InputError(
            f"{label} must be an array of uint8 (H, W, 3), a PIL image, or a float tensor (3, H, W) in [0, 1], got a "
            f"{type(frame).__name__}: {given}"
        )
    low, high = (bound.item() for bound in frame.detach().aminmax())
    if not (low >= 0 and high <= 1):  # NaN fails too
        raise InputError(
            f"{label} has values from {low:g} to {high:g}; expected [0, 1]: divide bytes by 255, leave normalization "
            "to the model, and clamp values after resizing"
        )
    return frame.detach().to(torch.float32, copy=True)


@dataclass(frozen=True)
class VideoBatch(Batch):
    """Consecutive frames of a video.

    Attributes:
        x: Frames of shape (N, 3, H, W), floats in [0, 1], resized if a size was given.
        y: None, as there are no labels.
        domain: Name of the video.
        index: Number of each frame in the video, counting those that were not taken too.
        domains: Name of the video for each frame.
        seconds: Time of each frame since the start of a recording; Unix time of its arrival from a camera.
        frames: The frames as they were decoded, uint8 (H, W, 3), before any resizing.
    """

    seconds: tuple[float, ...] = ()
    frames: tuple[NDArray[np.uint8], ...] = ()


class VideoStream:
    """Batches of the frames of a video, decoded as they are needed; created by :func:`video`.

    Iterating continues from ``position``, the number of batches yielded so far, also after a ``break``; after the last
    batch of a recording it starts over. A camera cannot be rewound: its ``position`` can be read but not set, and a new
    loop continues with new frames. There is no ``len`` and no ``hash``.

    Args:
        address: File, pattern, device or address.
        sampling: Which frames to take.
        size: (height, width) to resize to.
        batch_size: Frames per batch; the last one may be smaller.
        name: Name of the domain.

    Attributes:
        is_live: Whether the video is that of a camera.
        on_wait: Called several times a second while a camera sends no frame; may raise.
        on_change: Called with a sentence when a camera drops and when it returns.
        num_dropped: Frames of a camera that came too fast.
    """

    def __init__(
        self,
        address: str | os.PathLike[str],
        sampling: FrameSampling,
        *,
        size: tuple[int, int] | None,
        batch_size: int,
        name: str,
    ) -> None:
        import_av()  # raises now and not with the first batch
        self.address, self.sampling, self.name = address, sampling, name
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self.domains, self.is_live = [name], is_live(address)
        self.on_wait: Callable[[], None] | None = None
        self.on_change: Callable[[str], None] | None = None
        self.num_dropped = 0
        self._resize = Resize(size) if size else None
        # Number and time of the frames before the first batch and before the next one, as far as known.
        self._start: tuple[int, float] | None = None
        self._after: tuple[int, float] | None = None
        self._position, self._is_exhausted = 0, False

    @property
    def position(self) -> int:
        """Number of batches yielded since the start; set it to resume a recording."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        if self.is_live:
            raise AttributeError(f"the position of a camera cannot be set (to {value}), as its frames are not kept")
        value = check_integer("position", value, 0)
        if value != self._position:
            self._after = self._start if value == 0 else None
        self._position, self._is_exhausted = value, False

    def go_on_after(self, number: int, seconds: float) -> None:
        """Start the stream after a frame, which a recording finds without decoding all frames before it.

        Args:
            number: Number of the frame.
            seconds: Its time.
        """
        self._start = self._after = (number, seconds)
        self._position, self._is_exhausted = 0, False

    def __iter__(self) -> Iterator[VideoBatch]:
        if self._is_exhausted and not self.is_live:
            self._position, self._after = 0, self._start
        self._is_exhausted = False
        frames = self._read_camera() if self.is_live else self._read_recording()
        while chunk := list(islice(frames, self.batch_size)):
            self._position, self._after = self._position + 1, (chunk[-1].number, chunk[-1].seconds)
            yield self._make_batch(chunk)
        self._is_exhausted = True

    def _read_recording(self) -> Iterator[VideoFrame]:
        if self._after is not None or self._position == 0:
            return read_recording(self.address, self.sampling, after=self._after)
        num_skipped = self._position * self.batch_size
        return read_recording(self.address, self.sampling, after=self._start, num_skipped=num_skipped)

    def _read_camera(self) -> Iterator[VideoFrame]:
        first_number = 0 if self._after is None else self._after[0] + 1
        with FrameFeed(
            self.address,
            self.sampling,
            capacity=2 * self.batch_size,
            first_number=first_number,
            on_change=self.on_change,
        ) as feed:
            for frame in feed.read(self.on_wait):
                self.num_dropped = feed.num_dropped
                yield frame

    def _make_batch(self, frames: list[VideoFrame]) -> VideoBatch:
        pixels = [resize_frame(frame.pixels, self._resize) for frame in frames]
        for frame, array in zip(frames, pixels, strict=True):
            if array.shape != pixels[0].shape:
                raise InputError(
                    f"images in a batch must have the same size, but frame {frame.number} of {self.name!r} has "
                    f"{array.shape[:2]} pixels and those before it {pixels[0].shape[:2]}: give a size, or use "
                    "batch_size=1"
                )
        return VideoBatch(
            to_unit_floats(np.stack(pixels)),
            None,
            self.name,
            torch.tensor([frame.number for frame in frames]),
            seconds=tuple(frame.seconds for frame in frames),
            frames=tuple(frame.pixels for frame in frames),
        )

    def __repr__(self) -> str:
        return f"VideoStream({self.name!r}, {self._position} batches of {self.batch_size} so far)"


def video(
    address: str | os.PathLike[str],
    *,
    every: int = 1,
    interval: float | None = None,
    seconds: float | None = None,
    size: tuple[int, int] | None = None,
    batch_size: int = 32,
    name: str | None = None,
) -> VideoStream:
    """Return a stream of the frames of a video, without labels; needs the extra ``video``.

    A recording is decoded as the batches are needed, and resumes at any ``position``. A camera is read by a thread,
    which connects again when the camera drops; if the loop is slower than the camera, the oldest frames are left out.

    Args:
        address: A file such as ``clip.mp4``, numbered images such as ``frames-%05d.png`` (25 per second), a device such
            as ``/dev/video0``, or an address such as ``rtsp://door:554/1``.
        every: Take every n-th frame; neighboring frames are nearly the same image.
        interval: Seconds between frames to take, instead of ``every``.
        seconds: Duration of the recording, or of the time at the camera, after which to end.
        size: (height, width) to resize frames to.
        batch_size: Frames per batch.
        name: Name of the domain; that of the file, or the address without a password, by default.

    Returns:
        The stream.

    Raises:
        ConfigError: A setting is not valid.
        ImportError: PyAV is not installed.
    """
    sampling = FrameSampling(every, interval, seconds)
    return VideoStream(address, sampling, size=size, batch_size=batch_size, name=name or describe_address(address))


def resize_frame(pixels: NDArray[np.uint8], resize: Resize | None) -> NDArray[np.uint8]:
    """Return a frame resized in the way of image files."""
    if resize is None:
        return np.ascontiguousarray(pixels)
    return np.asarray(resize(import_pillow().fromarray(np.ascontiguousarray(pixels))))


def frame_to_tensor(pixels: NDArray[np.uint8], size: tuple[int, int] | None) -> Tensor:
    """Return a frame as a batch of one, floats (1, 3, H, W) in [0, 1]."""
    return to_unit_floats(np.stack([resize_frame(pixels, Resize(size) if size else None)]))

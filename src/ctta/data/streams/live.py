"""Live streams: frames that arrive one by one, without labels, and can be read only once."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctta.core.validation import check_integer
from ctta.data.streams.stream import Batch
from ctta.errors import InputError
from ctta.io.images import to_unit_floats, to_upright_rgb


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

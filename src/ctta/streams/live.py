"""A camera that is looking now: frames that come one by one, without labels, and only once."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctta.datasets.arrays import to_unit_floats
from ctta.datasets.image_files import to_upright_rgb
from ctta.streams.stream import Batch
from ctta.validation import check_integer


class LiveStream(Iterator[Batch]):
    """Batches of frames as they come; made by :func:`live`.

    The future has no length and the past is gone, so there is no ``len``, no ``hash``, and ``position`` can be read
    but not set. After a ``break`` or an error of the camera a new loop goes on with the next frame; frames that wait
    for their batch are kept.
    """

    def __init__(self, frames: Iterable[Any], batch_size: int, name: str) -> None:
        batch_size = check_integer("batch_size", batch_size, 1)
        self.name, self.batch_size = name, batch_size
        self.domains = [name]
        self._frames = iter(frames)
        self._waiting: list[Tensor] = []
        self._num_batches = self._num_frames = 0

    @property
    def position(self) -> int:
        """How many batches have been given; to resume, go on with the frames that come then."""
        return self._num_batches

    @position.setter
    def position(self, value: int) -> None:
        raise AttributeError(
            f"the position of a live stream cannot be set (to {value}): its frames are gone. Go on with those that "
            "come now, or keep the frames as pictures and use ctta.streams.folder"
        )

    def __next__(self) -> Batch:
        while len(self._waiting) < self.batch_size:
            try:
                frame = next(self._frames)
            except StopIteration:
                if not self._waiting:
                    raise
                break  # the camera is off: what has come is given
            self._waiting.append(self._converted(frame))
        x, self._waiting = torch.stack(self._waiting), []
        index = torch.arange(self._num_frames, self._num_frames + len(x))
        self._num_batches, self._num_frames = self._num_batches + 1, self._num_frames + len(x)
        return Batch(x, None, self.name, index)

    def _converted(self, frame: Any) -> Tensor:
        which = f"frame {self._num_frames + len(self._waiting)} of {self.name!r}"
        x = _to_unit_floats(frame, which)
        if self._waiting and x.shape != self._waiting[0].shape:
            size, others = tuple(x.shape[1:]), tuple(self._waiting[0].shape[1:])
            raise ValueError(
                f"{which} has {size} pixels and those before it {others}, which makes no batch: "
                "resize the frames to one size, or use batch_size=1"
            )
        return x

    def __repr__(self) -> str:
        return f"LiveStream({self.name!r}, {self._num_batches} batches of {self.batch_size} so far)"


def live(frames: Iterable[Any], *, batch_size: int = 32, name: str = "camera") -> LiveStream:
    """A stream from frames that come one by one, such as those of your own camera; it can be gone through once.

    A batch is given as soon as its frames are there; when the frames end, so is a last, smaller one.

    >>> import numpy as np
    >>> frames = (np.full((4, 6, 3), brightness, np.uint8) for brightness in range(5))
    >>> [tuple(batch.x.shape) for batch in live(frames, batch_size=2)]
    [(2, 3, 4, 6), (2, 3, 4, 6), (1, 3, 4, 6)]

    Args:
        frames: uint8 arrays (H, W, 3) in the order red, green, blue (OpenCV's are reversed: give
            ``frame[:, :, ::-1]``), PIL images, or float tensors (3, H, W) in [0, 1].
        batch_size: frames per batch; the model has to wait for so many.
        name: of the domain.
    """
    return LiveStream(frames, batch_size, name)


def _to_unit_floats(frame: Any, which: str) -> Tensor:
    """One frame as floats (3, H, W), in memory of its own: cameras write the next frame over the last."""
    if hasattr(frame, "convert"):  # a PIL image, without importing Pillow to ask
        frame = np.asarray(to_upright_rgb(frame, which))
    if isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3:
        return to_unit_floats(np.array(frame, order="C")[None])[0]
    if not (isinstance(frame, Tensor) and frame.is_floating_point() and frame.ndim == 3 and len(frame) == 3):
        given = f"{frame.dtype} {tuple(frame.shape)}" if hasattr(frame, "dtype") else repr(frame)
        raise ValueError(
            f"{which} is a {type(frame).__name__}, {given}; expected an array of uint8 (H, W, 3), a PIL image, "
            "or a float tensor (3, H, W) in [0, 1]"
        )
    low, high = (bound.item() for bound in frame.detach().aminmax())
    if not (low >= 0 and high <= 1):  # so that NaN fails too
        raise ValueError(
            f"{which} has values from {low:g} to {high:g}; expected [0, 1]: divide bytes by 255, leave normalising to "
            "the model, clamp what a resize overshot"
        )
    return frame.detach().to(torch.float32, copy=True)

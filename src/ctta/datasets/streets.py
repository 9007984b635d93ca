"""The embedded street as a stream: scenes drawn when they are read, in one kind of weather after the other."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.corruptions.arrays import UInt8Array
from ctta.datasets.arrays import to_unit_floats
from ctta.datasets.base import Rows
from ctta.synthetic.classes import CLASSES, Labels
from ctta.synthetic.frames import VERSION, check_condition, render_frame, validate_size
from ctta.validation import check_integer

KEPT_PIXELS = 1 << 24  # that a reader remembers, 64 MiB, 512 frames of 128x256: rounds come back to the same scenes


@dataclass(frozen=True)
class StreetScenes:
    """Scenes 0, 1, 2, … of the embedded street in one kind of weather; ``labels`` is None: no scene has one label.

    >>> scenes = StreetScenes("fog", count=10)
    >>> x, y = scenes.read(np.array([0, 7]))
    >>> x.shape, y.shape, y.dtype
    (torch.Size([2, 3, 128, 256]), torch.Size([2, 128, 256]), torch.int64)

    Args:
        condition: the weather, as for :func:`ctta.synthetic.render_frame`.
        split: "train", "choose" or "report": which scenes.
        count: how many.
        seed: another seed, other streets.
        size: (height, width) in pixels.
    """

    condition: str
    split: str = "report"
    count: int = 100
    seed: int = 0
    size: tuple[int, int] = (128, 256)
    _kept: dict[int, tuple[UInt8Array, Labels]] = field(default_factory=dict, init=False, repr=False, compare=False)

    labels = None
    class_names = CLASSES

    def __post_init__(self) -> None:
        check_condition(self.condition, self.split)
        check_integer("seed", self.seed)
        check_integer("count", self.count, 1)
        validate_size(self.size)

    @property
    def name(self) -> str:
        # With the generator's version: a later one may draw other pixels, and results would not compare.
        height, width = self.size
        return f"streets={VERSION} {self.split} seed={self.seed} size={height}x{width} {self.condition}"

    def __len__(self) -> int:
        return self.count

    def read(self, rows: Rows) -> tuple[Tensor, Tensor]:
        frames = [self._frame(int(row)) for row in rows]
        images: NDArray[np.uint8] = np.stack([image for image, _ in frames])
        return to_unit_floats(images), torch.from_numpy(np.stack([label for _, label in frames]).astype(np.int64))

    def _frame(self, row: int) -> tuple[UInt8Array, Labels]:
        if row in self._kept:
            return self._kept[row]
        drawn = render_frame(row, self.condition, split=self.split, seed=self.seed, size=self.size)
        if len(self._kept) < KEPT_PIXELS // drawn.label.size:
            self._kept[row] = drawn.image, drawn.label
        return drawn.image, drawn.label

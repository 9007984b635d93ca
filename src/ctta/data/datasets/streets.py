"""Drawn street scenes: rendered when they are read, with exact label maps."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.core.validation import check_integer
from ctta.data.corruptions.arrays import UInt8Array
from ctta.data.datasets.base import Rows
from ctta.data.streets.canvas import CLASSES, LabelMap
from ctta.data.streets.frames import VERSION, check_condition, render_frame, validate_size
from ctta.io.images import to_unit_floats

#: Pixels that a reader caches (64 MiB, 512 frames of 128x256), as repeated rounds show the same scenes again.
MAX_CACHED_PIXELS = 1 << 24


@dataclass(frozen=True)
class StreetScenes:
    """Scenes 0, 1, 2, … of the synthetic street under one condition.

    Attributes:
        condition: Weather or light, as for :func:`ctta.data.streets.render_frame`.
        split: "train", "choose" or "report"; each has other scenes.
        num_scenes: Number of scenes.
        seed: Seed of the street.
        size: (height, width) in pixels.

    >>> scenes = StreetScenes("fog", num_scenes=10)
    >>> x, y = scenes.read(np.array([0, 7]))
    >>> x.shape, y.shape, y.dtype
    (torch.Size([2, 3, 128, 256]), torch.Size([2, 128, 256]), torch.int64)
    """

    condition: str
    split: str = "report"
    num_scenes: int = 100
    seed: int = 0
    size: tuple[int, int] = (128, 256)
    _cache: dict[int, tuple[UInt8Array, LabelMap]] = field(default_factory=dict, init=False, repr=False, compare=False)

    labels = None  # labels are per pixel
    class_names = CLASSES

    def __post_init__(self) -> None:
        check_condition(self.condition, self.split)
        check_integer("seed", self.seed)
        check_integer("num_scenes", self.num_scenes, 1)
        validate_size(self.size)

    @property
    def name(self) -> str:
        """Name that identifies the scenes, the same on every machine."""
        # With the version of the generator: another version may draw other pixels, whose results are not comparable.
        height, width = self.size
        return f"streets={VERSION} {self.split} seed={self.seed} size={height}x{width} {self.condition}"

    def __len__(self) -> int:
        return self.num_scenes

    def read(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Render some of the scenes.

        Args:
            rows: Indices of the scenes.

        Returns:
            Images of shape (N, 3, H, W) as floats in [0, 1], and label maps of shape (N, H, W).
        """
        frames = [self._render(int(row)) for row in rows]
        images: NDArray[np.uint8] = np.stack([image for image, _ in frames])
        return to_unit_floats(images), torch.from_numpy(np.stack([label for _, label in frames]).astype(np.int64))

    def _render(self, row: int) -> tuple[UInt8Array, LabelMap]:
        if row in self._cache:
            return self._cache[row]
        frame = render_frame(row, self.condition, split=self.split, seed=self.seed, size=self.size)
        if len(self._cache) < MAX_CACHED_PIXELS // frame.label.size:
            self._cache[row] = frame.image, frame.label
        return frame.image, frame.label

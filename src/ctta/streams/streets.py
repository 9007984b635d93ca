"""The embedded street as a stream: scenes drawn when they are read, in one kind of weather after the other."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.corruptions.arrays import UInt8Array
from ctta.streams.arrays import unit_floats
from ctta.streams.stream import Rows, Segment, Stream
from ctta.synthetic.classes import CLASSES, Labels
from ctta.synthetic.frames import HOLD_OUT, SPLITS, VERSION, check_condition, render_frame, validate_size
from ctta.validation import check_choice, check_integer

#: What a stream of each part goes through unless told otherwise.
WEATHER = {"train": ("clear",), "choose": tuple(HOLD_OUT), "report": ("fog", "night", "rain", "snow")}
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
        return unit_floats(images), torch.from_numpy(np.stack([label for _, label in frames]).astype(np.int64))

    def _frame(self, row: int) -> tuple[UInt8Array, Labels]:
        if row in self._kept:
            return self._kept[row]
        drawn = render_frame(row, self.condition, split=self.split, seed=self.seed, size=self.size)
        if len(self._kept) < KEPT_PIXELS // drawn.label.size:
            self._kept[row] = drawn.image, drawn.label
        return drawn.image, drawn.label


def streets(
    *,
    split: str = "report",
    conditions: Sequence[str] | None = None,
    scenes: int = 100,
    seed: int = 0,
    size: tuple[int, int] = (128, 256),
    batch_size: int = 4,
) -> Stream:
    """The embedded street in fog, at night, in rain and in snow: one round; see :func:`rounds` for ten.

    Nothing is read from disk. The weather of each part is its own, so that no setting is learnt or chosen on what is
    reported: "train" is clear, "choose" has dusk and dust, "report" the paper's four.

    >>> from ctta.streams import rounds
    >>> stream = rounds(streets(scenes=8), 10)
    >>> stream.domains[:5], len(stream)
    (['fog', 'night', 'rain', 'snow', 'fog'], 80)

    Args:
        split: "train", "choose" or "report"; each has scenes of its own.
        conditions: other weather that this split may be seen in, in this order.
        scenes: how many of each condition; the same ones in each.
        seed: another seed, other streets.
        size: (height, width) of pictures and label maps.
        batch_size: scenes per batch.
    """
    if isinstance(conditions, str):
        raise ValueError(f"conditions must be a sequence of weather, got {conditions!r}: give ({conditions!r},)")
    check_choice("split", split, tuple(SPLITS))
    chosen = WEATHER[split] if conditions is None else tuple(conditions)
    domains = {name: StreetScenes(name, split, scenes, seed, size) for name in dict.fromkeys(chosen)}
    segments = [Segment(name, domains[name], np.arange(scenes)) for name in chosen]
    name = f"streets {split} {'+'.join(chosen)} scenes={scenes} seed={seed} size={size} batch={batch_size}"
    # One batch ahead: drawing needs one core, and the model leaves gaps.
    return Stream(name, segments, batch_size=batch_size, read_ahead=1)

"""Several domains as one, so that they can be shuffled together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.streams.stream import Rows, Segment


class Mixture:
    """The images of several segments, one after the other."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.starts = np.cumsum([0, *(len(segment.rows) for segment in self.segments)])

    @property
    def name(self) -> str:
        return "mixture of " + " ".join(segment.digest for segment in self.segments)

    @property
    def labels(self) -> NDArray[np.integer[Any]] | None:
        parts = [segment.images.labels for segment in self.segments]
        if any(part is None for part in parts):
            return None
        pairs = zip(parts, self.segments, strict=True)
        return np.concatenate([part[segment.rows] for part, segment in pairs if part is not None])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        which = np.searchsorted(self.starts, rows, side="right") - 1
        read, places = [], []
        for number in np.unique(which).tolist():
            here = np.flatnonzero(which == number)
            segment = self.segments[number]
            read.append(segment.images.read(segment.rows[rows[here] - self.starts[number]]))
            places.append(here)
        back = torch.from_numpy(np.argsort(np.concatenate(places)))
        labels = [y for _, y in read if y is not None]
        return torch.cat([x for x, _ in read])[back], torch.cat(labels)[back] if len(labels) == len(read) else None

"""Several domains as one, so that they can be shuffled together."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.datasets.base import Rows
from ctta.errors import DataError
from ctta.streams.stream import Segment


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

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.segments[0].class_names

    def __len__(self) -> int:
        return int(self.starts[-1])

    def origins(self, rows: Rows) -> tuple[tuple[str, ...], Rows]:
        domains, index = np.empty(len(rows), dtype=object), np.empty(len(rows), dtype=np.int64)
        for segment, inner_rows, places in self._by_segment(rows):
            domains[places], index[places] = segment.origins(inner_rows)  # it may be a mixture itself
        return tuple(domains), index

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        read: list[tuple[Tensor, Tensor | None]] = []
        all_places, domains = [], []
        for segment, inner_rows, places in self._by_segment(rows):
            read.append(segment.images.read(inner_rows))
            all_places.append(places)
            domains.append(segment.domain)
            for first, other in zip(read[0], read[-1], strict=True):
                if first is not None and other is not None and first.shape[1:] != other.shape[1:]:
                    sizes = [tuple(part.shape[-2:]) for part in (first, other)]
                    raise DataError(
                        f"{domains[0]} has {sizes[0]} pixels and {segment.domain} {sizes[1]}, which makes no mixed "
                        "batch: bring the domains to one size, or give the images one by one with single(mixed(...))"
                    )
        back = torch.from_numpy(np.argsort(np.concatenate(all_places)))
        labels = [y for _, y in read if y is not None]
        return torch.cat([x for x, _ in read])[back], torch.cat(labels)[back] if len(labels) == len(read) else None

    def _by_segment(self, rows: Rows) -> Iterator[tuple[Segment, Rows, Rows]]:
        """Each segment that these rows meet, which of its images they mean, and at which places of `rows`."""
        which = np.searchsorted(self.starts, rows, side="right") - 1
        for number in np.unique(which).tolist():
            places = np.flatnonzero(which == number)
            segment = self.segments[number]
            yield segment, segment.rows[rows[places] - self.starts[number]], places

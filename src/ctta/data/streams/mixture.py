"""Several domains as one, so that their images can be shuffled together."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.core.validation import check_integer
from ctta.data.datasets.base import Rows
from ctta.data.streams.stream import Segment, Stream
from ctta.errors import DataError


class Mixture:
    """The images of several segments, one segment after the other; implements :class:`ctta.data.datasets.Images`."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.starts = np.cumsum([0, *(len(segment.rows) for segment in self.segments)])

    @property
    def name(self) -> str:
        """Name that identifies the images, the same on every machine."""
        return "mixture of " + " ".join(segment.digest for segment in self.segments)

    @property
    def labels(self) -> NDArray[np.integer[Any]] | None:
        """Label of each image; None if a segment has none."""
        parts = [segment.images.labels for segment in self.segments]
        if any(part is None for part in parts):
            return None
        pairs = zip(parts, self.segments, strict=True)
        return np.concatenate([part[segment.rows] for part, segment in pairs if part is not None])

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""
        return self.segments[0].class_names

    def __len__(self) -> int:
        return int(self.starts[-1])

    def origins(self, rows: Rows) -> tuple[tuple[str, ...], Rows]:
        """Return the domain of each image and its index within that domain."""
        domains, index = np.empty(len(rows), dtype=object), np.empty(len(rows), dtype=np.int64)
        for segment, inner_rows, places in self._group_by_segment(rows):
            domains[places], index[places] = segment.origins(inner_rows)  # the segment may itself be a mixture
        return tuple(domains), index

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Read some of the images, which must have the same size in all domains."""
        parts: list[tuple[Tensor, Tensor | None]] = []
        all_places, domains = [], []
        for segment, inner_rows, places in self._group_by_segment(rows):
            parts.append(segment.images.read(inner_rows))
            all_places.append(places)
            domains.append(segment.domain)
            for first, other in zip(parts[0], parts[-1], strict=True):
                if first is not None and other is not None and first.shape[1:] != other.shape[1:]:
                    sizes = [tuple(part.shape[-2:]) for part in (first, other)]
                    raise DataError(
                        f"images in a batch must have the same size, but {domains[0]} has {sizes[0]} pixels and "
                        f"{segment.domain} {sizes[1]}: resize the domains to one size, or use single(mixed(...))"
                    )
        order = torch.from_numpy(np.argsort(np.concatenate(all_places)))
        labels = [y for _, y in parts if y is not None]
        return torch.cat([x for x, _ in parts])[order], torch.cat(labels)[order] if len(labels) == len(parts) else None

    def _group_by_segment(self, rows: Rows) -> Iterator[tuple[Segment, Rows, Rows]]:
        """Yield each segment that rows refer to, the indices within its domain, and their places in ``rows``."""
        numbers = np.searchsorted(self.starts, rows, side="right") - 1
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            segment = self.segments[number]
            yield segment, segment.rows[rows[places] - self.starts[number]], places


def mixed(stream: Stream, *, seed: int = 0) -> Stream:
    """Shuffle all images of a stream together, so that a batch contains several domains.

    Args:
        stream: The stream to shuffle.
        seed: Seed of the order.

    Returns:
        A stream of one segment, "mixed"; ``batch.domains`` names the domain of each image.
    """
    mixture, seed = Mixture(stream.segments), check_integer("seed", seed, 0)
    rows = np.random.default_rng(seed).permutation(len(mixture))
    return stream.with_segments(f"mixed seed={seed}", [Segment("mixed", mixture, rows)])

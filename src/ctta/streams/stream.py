"""A stream: batches in order, from domain after domain, that can be stopped and gone on with."""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ctta.datasets.base import HasClassNames, HasOrigins, Images, Rows
from ctta.validation import check_integer


@dataclass(frozen=True)
class Batch:
    """What a stream gives: inputs for the model, and the rest for the score. No method ever sees a label."""

    x: Tensor
    y: Tensor | None
    domain: str
    index: Tensor  # of each image: its row in the domain that it comes from
    domains: tuple[str, ...] = ()  # of each image: that domain, also in a batch that mixes several

    def __post_init__(self) -> None:
        if not self.domains:
            object.__setattr__(self, "domains", (self.domain,) * len(self.x))


@dataclass(frozen=True)
class Segment:
    """A stretch of a stream within one domain: some of its images, in some order."""

    domain: str
    images: Images
    rows: Rows

    def batches(self, size: int) -> int:
        return -(-len(self.rows) // size)

    def origins(self, rows: Rows) -> tuple[tuple[str, ...], Rows]:
        """The domain of each of these images, and its row there."""
        if isinstance(self.images, HasOrigins):
            return self.images.origins(rows)
        return (self.domain,) * len(rows), rows

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.images.class_names if isinstance(self.images, HasClassNames) else ()

    @property
    def digest(self) -> str:
        """Of all that decides what this segment gives."""
        digest = hashlib.sha256(f"{self.domain}\n{self.images.name}\n".encode())
        digest.update(np.ascontiguousarray(self.rows, dtype="<i8").data)
        return digest.hexdigest()[:16]


class Stream:
    """Batches of segment after segment; a batch never reaches over the end of a segment.

    Iterating goes on from ``position``, the number of batches given so far, also after a ``break``; once it has given
    the last batch, it starts over. So to resume, set ``position`` to what it was. ``name`` says which protocol this
    is, and ``hash`` tells two streams apart that would give other batches: results with the same hash are comparable.

    Args:
        name: the protocol and its settings, in words.
        segments: what to go through.
        batch_size: images per batch; the last of a segment may be smaller.
        read_ahead: how many batches background threads read while the model works, for pictures to be decoded.
    """

    def __init__(self, name: str, segments: Sequence[Segment], *, batch_size: int = 200, read_ahead: int = 0) -> None:
        batch_size = check_integer("batch_size", batch_size, 1)
        if not segments or any(len(segment.rows) == 0 for segment in segments):
            raise ValueError(f"the stream {name!r} has no images, or a domain without any")
        self.name, self.segments, self.batch_size, self.read_ahead = name, tuple(segments), batch_size, read_ahead
        # The number of batches before each segment, and at the end before none.
        self._starts = np.cumsum([0, *(segment.batches(batch_size) for segment in self.segments)])
        self._position = 0
        self._came_to_end = False

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def domains(self) -> list[str]:
        """The domain of each segment, in order."""
        return [segment.domain for segment in self.segments]

    @property
    def class_names(self) -> tuple[str, ...]:
        """What the data set calls its classes; empty where it does not say."""
        return self.segments[0].class_names

    @property
    def position(self) -> int:
        """How many batches have been given since the start."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        self._position, self._came_to_end = check_integer("position", value, 0, len(self)), False

    def __iter__(self) -> Iterator[Batch]:
        if self._came_to_end:
            self.position = 0
        numbers = range(self._position, len(self))
        batches = self._ahead(numbers) if self.read_ahead else map(self.batch, numbers)
        for number, batch in zip(numbers, batches, strict=True):
            self._position, self._came_to_end = number + 1, number + 1 == len(self)
            yield batch

    def _ahead(self, numbers: range) -> Iterator[Batch]:
        with ThreadPoolExecutor(self.read_ahead) as pool:
            waiting = deque(pool.submit(self.batch, number) for number in numbers[: self.read_ahead])
            for number in numbers:
                batch = waiting.popleft().result()
                if number + self.read_ahead in numbers:
                    waiting.append(pool.submit(self.batch, number + self.read_ahead))
                yield batch

    def segment_of(self, number: int) -> int:
        """Which segment a batch belongs to, by its number."""
        if not 0 <= number < len(self):
            raise IndexError(f"there are batches 0 to {len(self) - 1}, and no {number}")
        return int(np.searchsorted(self._starts, number, side="right")) - 1

    def batch(self, number: int) -> Batch:
        """One batch by its number, whatever the position is."""
        which = self.segment_of(number)
        segment, first = self.segments[which], (number - int(self._starts[which])) * self.batch_size
        rows = segment.rows[first : first + self.batch_size]
        x, y = segment.images.read(rows)
        domains, index = segment.origins(rows)
        return Batch(x, y, segment.domain, torch.from_numpy(index.copy()), domains)

    @property
    def hash(self) -> str:
        """Of all that decides which batches come: images, their order, and the batch size."""
        parts = [str(self.batch_size), *(segment.digest for segment in self.segments)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def with_segments(self, suffix: str, segments: Sequence[Segment]) -> "Stream":
        """Another stream with this one's batch size; the suffix says what was done."""
        return Stream(f"{self.name} {suffix}", segments, batch_size=self.batch_size, read_ahead=self.read_ahead)

    def __repr__(self) -> str:
        return f"Stream({self.name!r}, {len(self.segments)} segments, {len(self)} batches of {self.batch_size})"

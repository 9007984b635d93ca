"""What came out of one method on one stream, and its form on disk."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from ctta.metrics import Score

FORMAT = 1


@dataclass(frozen=True)
class BatchRecord:
    """One batch: its score, what the update did, and what it cost."""

    segment: int  # which stretch of the stream the batch belongs to
    score: Score
    seconds: float  # of predicting and adapting, without reading the images
    peak_mib: int  # of memory, so far
    loss: float | None = None  # these four are the model's last_step
    confidence: float | None = None
    augmented: float | None = None
    skipped: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        fields = json.loads(line)
        return cls(**fields | {"score": Score.from_json(fields["score"])})


@dataclass(frozen=True)
class Result:
    """A method on a stream: what was asked, batch by batch what happened, and on which machine."""

    method: str  # as a table calls it
    settings: dict[str, str]  # every hyperparameter, as one would type it
    source: str  # the fingerprint of the network
    stream: str  # the protocol in words
    stream_hash: str  # results with the same hash saw the same batches
    domains: tuple[str, ...]  # of each segment, in order
    num_batches: int  # of the whole stream
    reset_at_domain: bool
    labels: dict[str, Any]  # whatever names this result among others: recipe, order, seed
    environment: dict[str, Any]  # versions, device, threads
    batches: tuple[BatchRecord, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the stream was gone through to its end; only then do the figures below exist."""
        return len(self.batches) == self.num_batches

    @cached_property
    def segments(self) -> tuple[Score, ...]:
        """The score of each segment, in order."""
        grouped: list[list[Score]] = [[] for _ in self.domains]
        for batch in self.batches:
            grouped[batch.segment].append(batch.score)
        return tuple(Score.sum(scores) for scores in grouped)

    @property
    def errors(self) -> tuple[float, ...]:
        """The error of each segment, in order."""
        return tuple(segment.error for segment in self.segments)

    @property
    def error(self) -> float:
        """The mean of the segments' errors, as the paper's tables have it."""
        return sum(self.errors) / len(self.errors)

    @property
    def calibration_error(self) -> float:
        """ECE over the whole stream."""
        return self.total.calibration_error

    @property
    def worst(self) -> tuple[str, float]:
        """The segment with the highest error, and that error."""
        place = max(range(len(self.domains)), key=lambda number: self.errors[number])
        return self.domains[place], self.errors[place]

    @cached_property
    def total(self) -> Score:
        """The score of all images together."""
        return Score.sum(self.segments)

    @property
    def seconds(self) -> float:
        """Of predicting and adapting, all batches."""
        return sum(batch.seconds for batch in self.batches)

    @property
    def images_per_second(self) -> float:
        return self.total.count / self.seconds

    @property
    def peak_mib(self) -> int:
        return max(batch.peak_mib for batch in self.batches)

    @property
    def num_skipped(self) -> int:
        """Updates that were left out because they were not finite."""
        return sum(batch.skipped for batch in self.batches)


def read_batches(path: Path) -> list[BatchRecord]:
    """The complete lines of a file of batches; a line that was being written when the run was killed is left out."""
    if not path.is_file():
        return []
    *complete, _unfinished = path.read_text().split("\n")
    return [BatchRecord.from_json(line) for line in complete]


def read_result(folder: Path) -> Result:
    """What a folder holds that :func:`ctta.evaluate` fills; not complete while it is at it."""
    about = json.loads((folder / "about.json").read_text())
    if about.pop("format") != FORMAT:
        raise ValueError(f"{folder / 'about.json'} was written by another version of ctta")
    return result_of(about, read_batches(folder / "batches.jsonl"))


def result_of(about: dict[str, Any], batches: Sequence[BatchRecord]) -> Result:
    """A result from its two parts."""
    return Result(**about | {"domains": tuple(about["domains"])}, batches=tuple(batches))

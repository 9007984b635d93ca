"""What came out of one method on one stream, and its form on disk."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from ctta.datasets.segmentation import CLASS_NAMES
from ctta.evaluation.metrics import ImageScore, Measure, PixelScore, Score, score_from_json

FORMAT = 1


@dataclass(frozen=True)
class BatchRecord:
    """One batch: its score, what the update did, and what it cost."""

    segment: int  # which stretch of the stream the batch belongs to
    score: ImageScore | PixelScore
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
        return cls(**fields | {"score": score_from_json(fields["score"])})


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
    class_names: tuple[str, ...] = ()  # where the data set has names for them

    @property
    def is_complete(self) -> bool:
        """Whether the stream was gone through to its end; only then do the figures below exist."""
        return len(self.batches) == self.num_batches

    @cached_property
    def segments(self) -> tuple[ImageScore | PixelScore, ...]:
        """The score of each segment, in order."""
        grouped: list[list[ImageScore | PixelScore]] = [[] for _ in self.domains]
        for batch in self.batches:
            grouped[batch.segment].append(batch.score)
        return tuple(Score.sum(scores) for scores in grouped)

    @property
    def measure(self) -> Measure:
        """What methods are compared by: the error where images have a label each, mIoU where pixels have."""
        return self.segments[0].measure

    @property
    def values(self) -> tuple[float, ...]:
        """The measure's figure of each segment, in order."""
        return tuple(segment.value for segment in self.segments)

    @property
    def value(self) -> float:
        """The mean of the segments' figures, as the paper's tables have it."""
        return sum(self.values) / len(self.values)

    @property
    def errors(self) -> tuple[float, ...]:
        """The error of each segment, in order: the share of wrong images, or of wrong pixels."""
        return tuple(segment.error for segment in self.segments)

    @property
    def error(self) -> float:
        """The mean of the segments' errors."""
        return sum(self.errors) / len(self.errors)

    @property
    def mious(self) -> tuple[float, ...]:
        """The mIoU of each segment, in order."""
        return tuple(segment.miou for segment in self.pixel_segments)

    @property
    def miou(self) -> float:
        """The mean of the segments' mIoU."""
        return sum(self.mious) / len(self.mious)

    @property
    def class_iou(self) -> dict[str, float | None]:
        """The IoU of every class over all images together; None of one that no label and no prediction has."""
        ious = Score.sum(self.pixel_segments).class_iou
        numbered = tuple(f"class {number}" for number in range(len(ious)))
        # Whoever has nineteen classes most likely has those of Cityscapes.
        names = self.class_names or (CLASS_NAMES if len(ious) == len(CLASS_NAMES) else numbered)
        return dict(zip(names, ious, strict=True))

    @property
    def pixel_segments(self) -> tuple[PixelScore, ...]:
        """The segments' scores, of label maps; ValueError if this is a result of images."""
        pixels = tuple(segment for segment in self.segments if isinstance(segment, PixelScore))
        if not pixels:
            raise ValueError(f"{self.stream} has a label per image, not per pixel: there is an error, and no mIoU")
        return pixels

    @property
    def calibration_error(self) -> float:
        """ECE over the whole stream."""
        return self.total.calibration_error

    @property
    def worst(self) -> tuple[str, float]:
        """The segment with the worst figure (highest error, lowest mIoU), and that figure."""
        figures = list(zip(self.domains, self.values, strict=True))
        pick = max if self.measure.best == "lowest" else min
        return pick(figures, key=lambda figure: figure[1])

    @cached_property
    def total(self) -> ImageScore | PixelScore:
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
    lists = {"domains": tuple(about["domains"]), "class_names": tuple(about.get("class_names", ()))}
    return Result(**about | lists, batches=tuple(batches))

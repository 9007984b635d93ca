"""The result of one method on one stream, and what the visits of its domains say: drift, and time to harm."""

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from ctta.data.datasets.scenes import CLASS_NAMES
from ctta.data.streams import Composition
from ctta.errors import InputError
from ctta.evaluation.display import describe_result, make_frame, plot_result, render_html_table
from ctta.evaluation.intervals import Interval, estimate_difference, estimate_interval, judge, leave_out_blocks
from ctta.evaluation.metrics import (
    ERROR,
    BatchScore,
    ImageScore,
    Metric,
    PixelScore,
    Score,
    UnlabeledScore,
    score_from_json,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class BatchRecord:
    """One batch of an evaluation: its score, what the update did, and what it cost.

    Attributes:
        segment: Index of the segment of the stream that the batch belongs to.
        score: Score of the predictions.
        seconds: Time of predicting and adapting, without reading the images.
        peak_mib: Peak memory so far, in MiB; None where the system does not report it.
        loss: ``loss`` of the model's ``last_step``; None without an update, or where it is not finite.
        confidence: ``confidence`` of the model's ``last_step``, likewise.
        augmented: ``augmented`` of the model's ``last_step``, likewise.
        skipped: Whether the update was skipped because it was not finite.
        updated: Whether the model learned from the batch; None in records of earlier versions.
    """

    segment: int
    score: BatchScore
    seconds: float
    peak_mib: int | None
    loss: float | None = None
    confidence: float | None = None
    augmented: float | None = None
    skipped: bool = False
    updated: bool | None = None

    def to_json(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(vars(self) | {"score": self.score.to_json()})

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Return the record that :meth:`to_json` has written.

        Args:
            line: The JSON.

        Returns:
            An equal record.
        """
        fields = json.loads(line)
        return cls(**fields | {"score": score_from_json(fields["score"])})


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a method on a stream: what was evaluated, the record of every batch, and the environment.

    Printed, it has three lines; in a notebook it is a table of its segments. Without labels it has ``confidence``,
    ``num_predicted`` and the costs, and what needs labels raises :class:`ctta.InputError`.

    Attributes:
        method: Name of the method in tables.
        settings: Every hyperparameter as text.
        source: Fingerprint of the source network.
        stream: Description of the stream.
        stream_hash: Hash of the stream; results with the same hash saw the same batches.
        domains: Domain of each segment, in order.
        num_batches: Number of batches of the whole stream.
        reset_at_domain: Whether the model was reset at the start of each segment.
        labels: What distinguishes this result from others, such as recipe, order and seed.
        environment: Versions, device and number of threads.
        batches: Records of the batches done.
        class_names: Names of the classes, if the dataset has them.
        visits: Visit of each segment, see :attr:`ctta.data.streams.Stream.visits`; empty if the domains come once.
        composition: How sorted and how mixed the stream is; None if it is not a stream of :mod:`ctta.data.streams`.
        step_ratio: Every how many batches the model has learned, see :func:`ctta.evaluate`.
    """

    method: str
    settings: dict[str, str]
    source: str
    stream: str
    stream_hash: str
    domains: tuple[str, ...]
    num_batches: int
    reset_at_domain: bool
    labels: dict[str, Any]
    environment: dict[str, Any]
    batches: tuple[BatchRecord, ...]
    class_names: tuple[str, ...] = ()
    visits: tuple[int, ...] = ()
    composition: Composition | None = None
    step_ratio: int = 1

    @classmethod
    def from_batches(cls, about: dict[str, Any], batches: Sequence[BatchRecord]) -> Self:
        """Build a result from its description and the records of its batches.

        Args:
            about: All other fields, as in ``about.json``.
            batches: Records of the batches done.

        Returns:
            The result.
        """
        lists = {name: tuple(about.get(name, ())) for name in ("domains", "class_names", "visits")}
        composition = Composition(**about["composition"]) if about.get("composition") else None
        return cls(**about | lists | {"composition": composition}, batches=tuple(batches))

    @property
    def is_complete(self) -> bool:
        """Whether the whole stream was evaluated; the metrics exist only then."""
        return len(self.batches) == self.num_batches

    @property
    def is_labeled(self) -> bool:
        """Whether the data had labels, and so an error."""
        return not isinstance(self.batches[0].score, UnlabeledScore) if self.batches else True

    @cached_property
    def segments(self) -> tuple[BatchScore, ...]:
        """The score of each segment, in order."""
        return tuple(map(Score.sum, self.scores_by_segment))

    @cached_property
    def left_out_blocks(self) -> tuple[tuple[BatchScore | None, ...], ...]:
        """The score of each segment without each block of the stream, see :mod:`ctta.evaluation.intervals`."""
        return leave_out_blocks(self.scores_by_segment)

    @cached_property
    def short_left_out_blocks(self) -> tuple[tuple[BatchScore | None, ...], ...]:
        """The same with more and shorter blocks, for batches that count as independent."""
        return leave_out_blocks(self.scores_by_segment, short_blocks=True)

    @property
    def scores_by_segment(self) -> list[list[BatchScore]]:
        """The scores of the batches of each segment."""
        grouped: list[list[BatchScore]] = [[] for _ in self.domains]
        for batch in self.batches:
            grouped[batch.segment].append(batch.score)
        return grouped

    @property
    def metric(self) -> Metric:
        """The metric that methods are compared by: error for labels of images, mIoU for labels of pixels."""
        return self.segments[0].metric

    @cached_property
    def interval(self) -> Interval | None:
        """The 95 % confidence interval of ``value``; None if the stream has too few batches for one."""
        return estimate_interval([self])

    @property
    def confidence(self) -> float:
        """The mean probability of the predicted class, over all images or pixels."""
        return self.total.confidence

    @property
    def num_predicted(self) -> tuple[int, ...]:
        """How often each class was predicted: images, or pixels. Results of labeled images do not count it."""
        if isinstance(self.total, UnlabeledScore | PixelScore):
            return self.total.num_predicted
        raise InputError("predictions of labeled images are not counted by class: use errors, or evaluate x without y")

    @property
    def values(self) -> tuple[float, ...]:
        """The metric of each segment, in order."""
        return tuple(segment.value for segment in self.segments)

    @property
    def value(self) -> float:
        """The mean of the metric over segments, as in the paper's tables."""
        return sum(self.values) / len(self.values)

    @property
    def visit_values(self) -> tuple[float, ...]:
        """The metric at each visit of the domains: the mean over domains, each with all its images of this visit."""
        grouped: dict[int, dict[str, list[BatchScore]]] = {}
        visits = self.visits or [0] * len(self.domains)
        for visit, domain, score in zip(visits, self.domains, self.segments, strict=True):
            grouped.setdefault(visit, {}).setdefault(domain, []).append(score)
        scores = ([Score.sum(parts) for parts in grouped[visit].values()] for visit in sorted(grouped))
        return tuple(fmean(score.value for score in domains) for domains in scores)

    @property
    def visit_errors(self) -> tuple[float, ...]:
        """The error at each visit of the domains, for labels of images."""
        if self.metric != ERROR:
            raise InputError(f"{self.stream} has no label per image: use visit_values, the {self.metric.name}")
        return self.visit_values

    @property
    def drift(self) -> float:
        """The metric at the last visit of the domains minus that at the first; 0 if they come once."""
        return self.visit_values[-1] - self.visit_values[0]

    def time_to_harm(self, source: "Result") -> int | None:
        """Return the first visit, counted from 1, at which this method is worse than the source network.

        Worse by more than noise, see :func:`find_time_to_harm`.

        Args:
            source: The result of :class:`ctta.Source` on the same stream.

        Returns:
            The visit; None if there is none, or too few batches to tell.

        Raises:
            InputError: The results saw different batches.
        """
        if source.stream_hash != self.stream_hash:
            raise InputError(f"{self.method} and {source.method} saw different batches: compare them on one stream")
        return find_time_to_harm([self], [source])

    @property
    def errors(self) -> tuple[float, ...]:
        """The error of each segment, in order: the fraction of wrong images, or of wrong pixels."""
        return tuple(segment.error for segment in self.segments)

    @property
    def error(self) -> float:
        """The mean error over segments."""
        return sum(self.errors) / len(self.errors)

    @property
    def mious(self) -> tuple[float, ...]:
        """The mIoU of each segment, in order."""
        return tuple(segment.miou for segment in self.pixel_segments)

    @property
    def miou(self) -> float:
        """The mean mIoU over segments."""
        return sum(self.mious) / len(self.mious)

    @property
    def class_iou(self) -> dict[str, float | None]:
        """The IoU of every class over all images; None for a class that is neither labeled nor predicted."""
        ious = Score.sum(self.pixel_segments).class_iou
        numbered = tuple(f"class {number}" for number in range(len(ious)))
        # A dataset with 19 classes and no names most likely has those of Cityscapes.
        names = self.class_names or (CLASS_NAMES if len(ious) == len(CLASS_NAMES) else numbered)
        return dict(zip(names, ious, strict=True))

    @property
    def class_error(self) -> dict[str, float | None]:
        """The error of every class over all images; None for a class without images. Empty if not counted."""
        if not isinstance(self.total, ImageScore):
            raise InputError(f"{self.stream} has no label per image: use class_iou, or data with labels")
        errors = self.total.class_error
        numbered = tuple(f"class {number}" for number in range(len(errors)))
        return dict(zip(self.class_names if len(self.class_names) == len(errors) else numbered, errors, strict=True))

    @property
    def pixel_segments(self) -> tuple[PixelScore, ...]:
        """The score of each segment of label maps; raises InputError for a result of image classification."""
        pixels = tuple(segment for segment in self.segments if isinstance(segment, PixelScore))
        if not pixels:
            raise InputError(f"{self.stream} has one label per image, not per pixel: use error instead of mIoU")
        return pixels

    @property
    def calibration_error(self) -> float:
        """The expected calibration error over the whole stream."""
        return self.total.calibration_error

    @property
    def worst(self) -> tuple[str, float]:
        """The domain and the metric of the worst segment: highest error, or lowest mIoU."""
        pick = max if self.metric.best == "lowest" else min
        return pick(zip(self.domains, self.values, strict=True), key=lambda pair: pair[1])

    @cached_property
    def total(self) -> BatchScore:
        """The score of all images together."""
        return Score.sum(self.segments)

    @property
    def seconds(self) -> float:
        """The time of predicting and adapting, over all batches."""
        return sum(batch.seconds for batch in self.batches)

    @property
    def ms_per_image(self) -> float:
        """The time of predicting and adapting per image, in milliseconds; images that are not scored count too."""
        return 1000 * self.seconds / self.total.num_processed

    @property
    def images_per_second(self) -> float:
        """The throughput of predicting and adapting."""
        return self.total.num_processed / self.seconds

    @property
    def peak_mib(self) -> int | None:
        """The peak memory in MiB; None where the system does not report it."""
        return max((batch.peak_mib for batch in self.batches if batch.peak_mib is not None), default=None)

    @property
    def num_skipped(self) -> int:
        """The number of updates that were skipped because they were not finite."""
        return sum(batch.skipped for batch in self.batches)

    @property
    def update_share(self) -> float | None:
        """The fraction of batches that the model learned from; None in results of earlier versions."""
        known = [batch.updated for batch in self.batches if batch.updated is not None]
        return fmean(known) if known else None

    def to_records(self) -> list[dict[str, Any]]:
        """Return one row per segment: its domain, number of images, metric (as fractions), confidence and time."""
        seconds = [0.0] * len(self.domains)
        for batch in self.batches:
            seconds[batch.segment] += batch.seconds
        records = []
        for domain, score, spent in zip(self.domains, self.segments, seconds, strict=True):
            record: dict[str, Any] = {"method": self.method, "domain": domain, "num_images": score.num_images}
            if not isinstance(score, UnlabeledScore):
                record |= {score.metric.key: score.value, "error": score.error}
            record["confidence"] = score.confidence
            if not isinstance(score, UnlabeledScore):
                record["calibration_error"] = score.calibration_error
            records.append(record | {"seconds": spent})
        return records

    def to_frame(self) -> Any:
        """Return the rows of :meth:`to_records` as a pandas DataFrame; needs pandas."""
        return make_frame(self.to_records())

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the metric over time, with a line at each change of domain; needs matplotlib.

        Args:
            ax: Axes to draw into, such as those of another result; by default those of a new figure.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
            InputError: The result has no labels.
        """
        return plot_result(self, ax)

    def __repr__(self) -> str:
        return describe_result(self)

    def _repr_html_(self) -> str:
        return render_html_table(describe_result(self), self.to_records() if self.is_complete else [])


def select_visits(result: Result, chosen: Container[int]) -> Result:
    """Return the part of a complete result that belongs to some visits, counted from 0."""
    visits = result.visits or (0,) * len(result.domains)
    segments = [number for number, each in enumerate(visits) if each in chosen]
    if not segments:
        raise IndexError(f"visits must be from 0 to {max(visits)}, got {chosen}")
    places = {number: place for place, number in enumerate(segments)}
    batches = tuple(
        replace(batch, segment=places[batch.segment]) for batch in result.batches if batch.segment in places
    )
    return replace(
        result,
        domains=tuple(result.domains[number] for number in segments),
        visits=(),
        batches=batches,
        num_batches=len(batches),
    )


def count_visits(results: Sequence[Result]) -> int:
    """Return how many visits the stream has; 1 if its domains do not come back."""
    return 1 + max(results[0].visits, default=0)


def compute_visit_errors(results: Sequence[Result]) -> tuple[float, ...]:
    """Return the error at each visit, as :attr:`Result.visit_errors` defines it, averaged over the results."""
    return tuple(map(fmean, zip(*(result.visit_errors for result in results), strict=True)))


def estimate_drift(results: Sequence[Result]) -> Interval | None:
    """Return how much the error grows from the first visit to the last; None with one visit, or too few batches.

    The two visits are paired block by block. Their images may be in another order, so Source drifts as well, by chance.
    """
    num_visits = count_visits(results)
    if num_visits == 1:
        return None
    first, last = ([select_visits(result, [visit]) for result in results] for visit in (0, num_visits - 1))
    return estimate_difference(last, first)


def find_time_to_harm(results: Sequence[Result], source: Sequence[Result]) -> int | None:
    """Return the first visit, counted from 1, that is worse than Source in the same visit by more than noise.

    The 95 % interval of the difference, paired over the batches of that visit, excludes zero. Of visits that are
    equal in truth, one in forty does so by chance; therefore the next visit must do so as well, except after the last.
    """
    num_visits = count_visits(results)
    harmed = [
        judge(
            estimate_difference(
                [select_visits(result, [visit]) for result in results],
                [select_visits(result, [visit]) for result in source],
            ),
            results[0].metric,
        )
        == "worse"
        for visit in range(num_visits)
    ]
    return next((visit + 1 for visit in range(num_visits) if all(harmed[visit : visit + 2])), None)

"""Error or mIoU over time as lines to draw: averaged within segments, never across a boundary."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean, stdev

from ctta.evaluation.metrics import ImageScore, Metric, PixelScore, Score
from ctta.evaluation.results import Result
from ctta.report.entries import Entry, order_of
from ctta.report.layout import kind_of, layout_of, spoken

MOST_POINTS = 150  # across the picture: more would be noise, not information
FEWEST_IMAGES = 250  # behind a point: their error has a standard deviation of at most 3 percentage points


@dataclass(frozen=True)
class Curve:
    """One method's error, or mIoU, over the stream, in percent."""

    label: str
    run: str
    places: tuple[float, ...]  # images seen, at the middle of what each point is the figure of
    values: tuple[float, ...]
    deviations: tuple[float, ...]  # over the seeds; empty for a single result
    round_places: tuple[float, ...] = ()  # of the mean of every round, where the stream repeats itself
    round_values: tuple[float, ...] = ()
    round_deviations: tuple[float, ...] = ()


@dataclass(frozen=True)
class Stretch:
    """A part of the axis between two marked boundaries."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class TimeLine:
    """Everything the picture of error or mIoU over time shows."""

    measure: Metric
    curves: tuple[Curve, ...]
    stretches: tuple[Stretch, ...]
    order: int | None

    @property
    def end(self) -> int:
        return self.stretches[-1].end


def time_line(entries: Sequence[Entry]) -> TimeLine:
    """The curves of the first order that was run: under another, other domains stand at the same place."""
    order = entries[0].orders[0]
    shown = [(entry, [result for result in entry.results if order_of(result) == order]) for entry in entries]
    present = [(entry, results) for entry, results in shown if results]
    curves = tuple(_curve(entry, results) for entry, results in present)
    return TimeLine(present[0][1][0].metric, curves, stretches_of(present[0][1][0]), order)


def stretches_of(result: Result) -> tuple[Stretch, ...]:
    """What is marked on the axis: rounds where the stream repeats itself, else each kind of corruption in turn."""
    layout = layout_of([result.domains])
    names = [
        layout.round_of(number) if layout.repeats else kind_of(domain) for number, domain in enumerate(result.domains)
    ]
    ends = list(accumulate(segment.count for segment in result.segments))
    changes = [0, *(number for number in range(1, len(names)) if names[number] != names[number - 1]), len(names)]
    return tuple(
        Stretch(spoken(names[first]), ends[first - 1] if first else 0, ends[last - 1])
        for first, last in pairwise(changes)
    )


def _curve(entry: Entry, results: Sequence[Result]) -> Curve:
    places, first = _points(results[0])
    lines = [first, *(_points(result)[1] for result in results[1:])]
    curve = Curve(entry.label, entry.run, places, *_mean_and_deviation(lines))
    layout = layout_of([results[0].domains])
    if not layout.repeats:
        return curve
    starts = range(0, len(results[0].domains), layout.period)
    rounds = [[100 * fmean(result.values[start : start + layout.period]) for start in starts] for result in results]
    values, deviations = _mean_and_deviation(rounds)
    middles = tuple((stretch.start + stretch.end) / 2 for stretch in stretches_of(results[0]))
    return replace(curve, round_places=middles, round_values=values, round_deviations=deviations)


def _mean_and_deviation(lines: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    points = list(zip(*lines, strict=True))
    deviations = tuple(stdev(values) for values in points) if len(lines) > 1 else ()
    return tuple(fmean(values) for values in points), deviations


def _points(result: Result) -> tuple[tuple[float, ...], list[float]]:
    """Where and how high the points are: each segment is cut into equal parts of whole batches."""
    segments: list[list[ImageScore | PixelScore]] = [[] for _ in result.domains]
    for batch in result.batches:
        segments[batch.segment].append(batch.score)
    places, values, seen = [], [], 0
    for scores in segments:
        images = sum(score.count for score in scores)
        parts = max(1, min(MOST_POINTS // len(segments), images // FEWEST_IMAGES, len(scores)))
        cuts = [len(scores) * part // parts for part in range(parts + 1)]
        for first, last in pairwise(cuts):
            part_score = Score.sum(scores[first:last])
            places.append(seen + part_score.count / 2)
            values.append(100 * part_score.value)
            seen += part_score.count
    return tuple(places), values

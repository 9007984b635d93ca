"""Error or mIoU over time as curves to plot: averaged within segments, never across a boundary."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean, stdev

from ctta.benchmark.report.layout import infer_layout, replace_underscores, strip_severity
from ctta.benchmark.report.sections import MethodEntry, get_order
from ctta.evaluation.metrics import Metric
from ctta.evaluation.plots import compute_points
from ctta.evaluation.results import Result


@dataclass(frozen=True)
class ScoreCurve:
    """Error or mIoU of one method over the stream, in percent."""

    label: str
    run: str
    positions: tuple[float, ...]  # number of images seen, at the middle of the images behind each point
    values: tuple[float, ...]
    deviations: tuple[float, ...]  # over seeds; empty for a single result
    round_positions: tuple[float, ...] = ()  # one point per round, if the stream has several rounds
    round_values: tuple[float, ...] = ()
    round_deviations: tuple[float, ...] = ()


@dataclass(frozen=True)
class AxisSpan:
    """A part of the time axis between two marked boundaries."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """The data of the plot of scores over time."""

    metric: Metric
    curves: tuple[ScoreCurve, ...]
    spans: tuple[AxisSpan, ...]
    order: int | None

    @property
    def end(self) -> int:
        """Number of images of the stream."""
        return self.spans[-1].end


def build_timeline(entries: Sequence[MethodEntry]) -> Timeline:
    """Return the curves for the first order of the domains; other orders have other domains at the same position."""
    order = entries[0].orders[0]
    selected = [(entry, [result for result in entry.results if get_order(result) == order]) for entry in entries]
    present = [(entry, results) for entry, results in selected if results]
    curves = tuple(_build_curve(entry, results) for entry, results in present)
    first = present[0][1][0]
    return Timeline(first.metric, curves, find_spans(first), order)


def find_spans(result: Result) -> tuple[AxisSpan, ...]:
    """Return the parts of the axis: rounds if the stream has several, otherwise domains without their severity."""
    layout = infer_layout([result.domains])
    names = [
        layout.name_round(number) if layout.is_repeating else strip_severity(domain)
        for number, domain in enumerate(result.domains)
    ]
    ends = list(accumulate(segment.num_images for segment in result.segments))
    changes = [0, *(number for number in range(1, len(names)) if names[number] != names[number - 1]), len(names)]
    return tuple(
        AxisSpan(replace_underscores(names[first]), ends[first - 1] if first else 0, ends[last - 1])
        for first, last in pairwise(changes)
    )


def _build_curve(entry: MethodEntry, results: Sequence[Result]) -> ScoreCurve:
    positions, first = compute_points(results[0])
    lines = [first, *(compute_points(result)[1] for result in results[1:])]
    curve = ScoreCurve(entry.label, entry.run, positions, *_mean_and_deviation(lines))
    layout = infer_layout([results[0].domains])
    if not layout.is_repeating:
        return curve
    starts = range(0, len(results[0].domains), layout.period)
    rounds = [[100 * fmean(result.values[start : start + layout.period]) for start in starts] for result in results]
    values, deviations = _mean_and_deviation(rounds)
    middles = tuple((span.start + span.end) / 2 for span in find_spans(results[0]))
    return replace(curve, round_positions=middles, round_values=values, round_deviations=deviations)


def _mean_and_deviation(lines: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    points = list(zip(*lines, strict=True))
    deviations = tuple(stdev(values) for values in points) if len(lines) > 1 else ()
    return tuple(fmean(values) for values in points), deviations

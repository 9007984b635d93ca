"""The content of a report as plain data: tables, curves and the origin of the numbers, by section.

Nothing here is a figure or a page. The files of a report are drawn from it, at once or again from ``numbers.json``.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate, pairwise
from math import isnan, nan
from pathlib import Path
from statistics import fmean, stdev
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ctta.benchmark.report.runs import MethodEntry, MissingCell, RecordedRun, Section, get_order, group_into_sections
from ctta.benchmark.report.score_tables import (
    build_class_table,
    build_score_table,
    build_summary_table,
    build_visit_table,
    describe_outcome,
)
from ctta.benchmark.report.tables import Table, infer_layout, replace_underscores, strip_severity
from ctta.errors import DataError
from ctta.evaluation.display import NUM_DIGITS, compute_points, join_names, strip_hashes
from ctta.evaluation.metrics import Metric, Score
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


@dataclass(frozen=True)
class ResultNumbers:
    """One result: a method with one order and one seed."""

    order: int | None
    seed: int | None
    stream_hash: str
    num_batches: int
    values: tuple[float, ...]  # the metric of each segment in percent
    seconds: float


@dataclass(frozen=True)
class ReportRow:
    """What a row of the tables stands for."""

    label: str
    run: str
    settings: dict[str, str]
    averaged_over: str  # orders and seeds, in words
    reset_at_domain: bool
    results: tuple[ResultNumbers, ...]
    bins: tuple[tuple[float, float, float], ...]  # by confidence: number of predictions, confidence, number right
    conditions: tuple[str, ...] = ()  # how the stream treated the model, in words


@dataclass(frozen=True)
class ReportStream:
    """A stream of a section; the segments of its results have these domains."""

    name: str
    hash: str
    domains: tuple[str, ...]


@dataclass(frozen=True)
class SectionContent:
    """The numbers of results that are comparable with each other."""

    recipes: tuple[str, ...]
    protocol: str
    runs: tuple[str, ...]
    warnings: tuple[str, ...]
    metric: Metric
    headline: str
    scores: Table
    classes: Table | None  # for segmentation, and for images of few classes
    summary: Table | None
    timeline: Timeline | None
    timeline_caption: str
    rows: tuple[ReportRow, ...]
    streams: tuple[ReportStream, ...]
    networks: tuple[tuple[str, str], ...]  # what starts from it, and its fingerprint
    environment: tuple[tuple[str, str], ...]
    composition: str = ""  # how sorted and how mixed the stream is, in a sentence
    visits: Table | None = None  # for domains that come back

    @property
    def title(self) -> str:
        """Names of the recipes."""
        return ", ".join(self.recipes)

    @property
    def protocol_title(self) -> str:
        """The protocol without the hashes of its data, which the foot of the section has."""
        return strip_hashes(self.protocol)

    @property
    def caption(self) -> str:
        """Caption of the table of scores."""
        has_deviation = any(row.num_results > 1 for row in self.scores.rows)
        spread = " ± is the sample standard deviation over the n results (orders and seeds) of a row."
        bold = f"{self.metric.best.title()} in bold, where the lead over every other row is more than noise."
        return f"{self.scores.caption}. {bold}{spread if has_deviation else ''}"


@dataclass(frozen=True)
class RunOrigin:
    """A run, and the commands that wrote it."""

    name: str
    recipe: str
    commands: tuple[str, ...]


@dataclass(frozen=True)
class ReportContent:
    """The content of a report."""

    sections: tuple[SectionContent, ...]
    runs: tuple[RunOrigin, ...]
    missing: tuple[MissingCell, ...] = ()

    @property
    def title(self) -> str:
        """Names of the recipes."""
        return f"Results: {', '.join(dict.fromkeys(run.recipe for run in self.runs))}"


def build_content(runs: Sequence[RecordedRun]) -> ReportContent:
    """Return the content of the report on some runs."""
    return ReportContent(
        sections=tuple(_build_section(section) for section in group_into_sections(runs)),
        runs=tuple(RunOrigin(run.name, run.recipe, run.commands) for run in runs),
        missing=tuple(cell for run in runs for cell in run.missing),
    )


def _build_section(section: Section) -> SectionContent:
    entries, timeline = section.entries, build_timeline(section.entries)
    streams = {result.stream_hash: result for result in section.results}
    recipes = (str(result.labels.get("recipe") or entry.run) for entry in entries for result in entry.results)
    composition = next((result.composition.describe() for result in section.results if result.composition), "")
    return SectionContent(
        recipes=tuple(dict.fromkeys(recipes)),
        protocol=section.protocol,
        runs=section.runs,
        warnings=section.warnings,
        metric=section.results[0].metric,
        headline=describe_outcome(entries),
        scores=build_score_table(entries),
        classes=build_class_table(entries),
        summary=build_summary_table(entries),
        timeline=timeline,
        timeline_caption=_describe_timeline(section, timeline),
        rows=tuple(_build_row(entry) for entry in entries),
        streams=tuple(ReportStream(each.stream, each.stream_hash, each.domains) for each in streams.values()),
        networks=tuple(_list_networks(section)),
        environment=tuple(_merge_environments(result.environment for result in section.results)),
        composition=composition and f"{composition[0].upper()}{composition[1:]}.",
        visits=build_visit_table(entries),
    )


def _build_row(entry: MethodEntry) -> ReportRow:
    results = tuple(
        ResultNumbers(
            order=get_order(result),
            seed=result.labels.get("seed"),
            stream_hash=result.stream_hash,
            num_batches=result.num_batches,
            values=tuple(100 * value for value in result.values),
            seconds=result.seconds,
        )
        for result in entry.results
    )
    return ReportRow(
        label=entry.label,
        run=entry.run,
        settings=entry.settings,
        averaged_over=entry.averaged_over,
        reset_at_domain=entry.results[0].reset_at_domain,
        results=results,
        bins=tuple((*each,) for each in Score.sum(result.total for result in entry.results).bins),
        conditions=entry.conditions,
    )


def _list_networks(section: Section) -> list[tuple[str, str]]:
    """Return the fingerprint of each network, with the rows that start from it if there are several."""
    rows: dict[str, list[str]] = {}
    for entry in section.entries:
        rows.setdefault(entry.results[0].source, []).append(entry.label)
    if len(rows) == 1:
        return [("source network", fingerprint) for fingerprint in rows]
    return [(f"source network of {', '.join(labels)}", fingerprint) for fingerprint, labels in rows.items()]


def _describe_timeline(section: Section, timeline: Timeline) -> str:
    orders = {order for entry in section.entries for order in entry.orders}
    text = "Vertical lines mark domain changes."
    if any(curve.round_positions for curve in timeline.curves):
        text = "Vertical lines mark the start of a round; thick lines are means of rounds, thin ones of segments."
    if any(curve.deviations for curve in timeline.curves):
        text += " Bands are one standard deviation over seeds."
    if len(orders) > 1:
        name = "the standard order" if timeline.order is None else f"order {timeline.order}"
        text += f" Only {name} is shown, one of {len(orders)}."
    return text


def _merge_environments(environments: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return every property once, with all its values."""
    values: dict[str, dict[str, None]] = {}
    for environment in environments:
        for name, value in environment.items():
            values.setdefault(name, {})[str(value)] = None
    return [(name, join_names(list(found))) for name, found in values.items()]


T = TypeVar("T")

FORMAT = 1


def format_numbers(content: object) -> str:
    """Return the content of a report, or another dataclass, as JSON: six decimals, lists of numbers on one line."""
    text = json.dumps({"format": FORMAT} | _encode(content), indent=1, ensure_ascii=False, allow_nan=False)
    # A line break is never inside a string, so these are lists without lists or objects in them.
    lists = re.compile(r"\[\n([^\[\]{}]*)\n *\]")
    return lists.sub(lambda found: f"[{' '.join(map(str.strip, found[1].split(chr(10))))}]", text) + "\n"


def parse_numbers(text: str, kind: type[T]) -> T:
    """Return the content of a class that :func:`format_numbers` has written, with numbers rounded as in the file.

    Raises:
        ValueError: The text is not such a file; TypeError and LookupError are possible as well.
    """
    values = json.loads(text)
    if values.pop("format") != FORMAT:
        raise ValueError("it was written by another version of ctta")
    content: T = _decode(kind, values)
    return content


def read_numbers(path: Path, kind: type[T]) -> T:
    """Read ``numbers.json`` of a report as a :class:`ReportContent`, or of a matrix as a ``Matrix``."""
    try:
        return parse_numbers(path.read_text(encoding="utf-8"), kind)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read ({type(error).__name__}: {error}): expected numbers.json of a report"
        ) from error


def _encode(value: Any) -> Any:
    """Return a value as JSON has it: nan is null, and fields that have their default are left out."""
    if is_dataclass(value):
        present = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
        return {name: _encode(each) for name, (each, default) in present.items() if each != default}
    if isinstance(value, tuple | list):
        return [_encode(each) for each in value]
    if isinstance(value, dict):
        return {name: _encode(each) for name, each in value.items()}
    if isinstance(value, float):
        rounded = round(value, NUM_DIGITS)
        return None if isnan(value) else int(rounded) if rounded.is_integer() else rounded
    return value


def _decode(kind: Any, value: Any) -> Any:
    """Return a value of a type from what :func:`_encode` made of it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is float and (value is None or isinstance(value, int | float)):
        return nan if value is None else float(value)
    if origin in (UnionType, Union):
        (inner,) = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else _decode(inner, value)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_decode(*pair) for pair in zip(kinds, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {name: _decode(arguments[1], each) for name, each in value.items()}
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints: dict[str, Any] = get_type_hints(kind)
        return kind(**{name: _decode(hints[name], each) for name, each in value.items()})
    if origin is None and isinstance(kind, type) and type(value) is kind:
        return value
    raise TypeError(f"expected {kind}, got {value!r}"[:200])

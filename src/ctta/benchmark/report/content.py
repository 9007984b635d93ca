"""The content of a report as plain data: tables, curves and the origin of the numbers, by section.

Nothing here is a picture or a page. The files of a report are drawn from it, at once or again from ``numbers.json``
(:mod:`ctta.benchmark.report.numbers_file`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctta.benchmark.report.curves import Timeline, build_timeline
from ctta.benchmark.report.runs import MissingCell, RecordedRun
from ctta.benchmark.report.score_tables import build_class_table, build_score_table, build_summary_table
from ctta.benchmark.report.sections import MethodEntry, Section, get_order, group_into_sections
from ctta.benchmark.report.significance import write_headline
from ctta.benchmark.report.tables import Table
from ctta.benchmark.report.visits import build_visit_table
from ctta.evaluation.display import join_names, strip_hashes
from ctta.evaluation.metrics import Metric, Score


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
    return SectionContent(
        recipes=section.recipes,
        protocol=section.protocol,
        runs=section.runs,
        warnings=section.warnings,
        metric=section.results[0].metric,
        headline=write_headline(entries, section.results[0].metric),
        scores=build_score_table(entries),
        classes=build_class_table(entries),
        summary=build_summary_table(entries),
        timeline=timeline,
        timeline_caption=_describe_timeline(section, timeline),
        rows=tuple(_build_row(entry) for entry in entries),
        streams=tuple(ReportStream(each.stream, each.stream_hash, each.domains) for each in streams.values()),
        networks=tuple(_list_networks(section)),
        environment=tuple(_merge_environments(result.environment for result in section.results)),
        composition=section.composition,
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

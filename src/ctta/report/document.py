"""The content of a report, independent of the format: tables, figures and the origin of the numbers, by section."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ctta.evaluation.metrics import Metric
from ctta.report.curves import Timeline, build_timeline
from ctta.report.layout import infer_layout
from ctta.report.overlays import plot_overlays
from ctta.report.plots import plot_cost, plot_reliability, plot_scores_over_time
from ctta.report.runs import MissingCell, RecordedRun
from ctta.report.score_tables import build_class_table, build_score_table, build_summary_table
from ctta.report.sections import Section, group_into_sections
from ctta.report.significance import write_headline
from ctta.report.tables import Table
from ctta.report.theme import LineStyle, assign_styles, save_figure

_RELIABILITY_CAPTION = "Bars: accuracy by confidence. Ticks: mean confidence. The closer they are, the better."
_COST_CAPTIONS = {
    "lowest": "Time to predict and adapt, without reading the images. Lower left is better.",
    "highest": "Time to predict and adapt, without reading the images. Upper left is better.",
}
_OVERLAYS_CAPTION = (
    "For each method, the scenes whose pixel accuracy (in percent) rose and fell most, among the last segments of "
    "every domain. Black: no label, or no finite prediction."
)


@dataclass(frozen=True)
class ReportFigure:
    """A figure that was saved as PNG and SVG."""

    name: str  # of the files, without extension
    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class SectionReport:
    """The tables and figures of one section."""

    number: int
    section: Section
    metric: Metric
    headline: str
    scores: Table
    scores_over_time: ReportFigure
    classes: Table | None  # for segmentation, and for images of few classes
    overlays: ReportFigure | None  # for segmentation
    summary: Table
    reliability: ReportFigure
    cost: ReportFigure
    streams: tuple[tuple[str, str], ...]  # name and hash
    networks: tuple[tuple[str, str], ...]  # what starts from it, and its fingerprint
    environment: tuple[tuple[str, str], ...]

    @property
    def title(self) -> str:
        """Names of the recipes."""
        return ", ".join(self.section.recipes)

    @property
    def caption(self) -> str:
        """Caption of the table of scores."""
        has_deviation = any(row.num_results > 1 for row in self.scores.rows)
        spread = " ± is the sample standard deviation over the n results (orders and seeds) of a row."
        bold = f"{self.metric.best.title()} in bold, where the lead over every other row is more than noise."
        return f"{self.scores.caption}. {bold}{spread if has_deviation else ''}"


@dataclass(frozen=True)
class ReportDocument:
    """The content of a report."""

    title: str
    sections: tuple[SectionReport, ...]
    runs: tuple[RecordedRun, ...]
    missing: tuple[MissingCell, ...]


def build_document(runs: Sequence[RecordedRun], folder: Path) -> ReportDocument:
    """Return the content of the report on some runs, and save its figures in a folder."""
    sections = group_into_sections(runs)
    styles = assign_styles(entry.label for section in sections for entry in section.entries)
    reports = tuple(
        _build_section(number, section, styles, runs, folder) for number, section in enumerate(sections, start=1)
    )
    missing = tuple(cell for run in runs for cell in run.missing)
    recipes = dict.fromkeys(run.recipe for run in runs)
    return ReportDocument(f"Results: {', '.join(recipes)}", reports, tuple(runs), missing)


def _build_section(
    number: int, section: Section, styles: Mapping[str, LineStyle], runs: Sequence[RecordedRun], folder: Path
) -> SectionReport:
    scores, summary = build_score_table(section.entries), build_summary_table(section.entries)
    timeline, metric = build_timeline(section.entries), section.results[0].metric
    suffix = "" if number == 1 else f"-{number}"
    return SectionReport(
        number=number,
        section=section,
        metric=metric,
        headline=write_headline(section.entries, metric),
        scores=scores,
        scores_over_time=_save_figure(
            plot_scores_over_time(timeline, styles),
            folder / f"{metric.key}-over-time{suffix}",
            f"{metric.title} over time",
            _describe_timeline(section, timeline),
        ),
        classes=build_class_table(section.entries),
        overlays=_build_overlays(section, runs, folder / f"overlays{suffix}"),
        summary=summary,
        reliability=_save_figure(
            plot_reliability(section.entries, styles),
            folder / f"reliability{suffix}",
            "Calibration",
            _RELIABILITY_CAPTION,
        ),
        cost=_save_figure(
            plot_cost(summary, metric, styles), folder / f"cost{suffix}", "Cost", _COST_CAPTIONS[metric.best]
        ),
        streams=tuple(dict.fromkeys((result.stream, result.stream_hash) for result in section.results)),
        networks=tuple(_list_networks(section)),
        environment=tuple(_merge_environments(result.environment for result in section.results)),
    )


def _save_figure(figure: Figure, path: Path, title: str, caption: str) -> ReportFigure:
    """Save a figure under a path without extension."""
    return ReportFigure(path.name, title, caption, save_figure(figure, path.parent, path.name))


def _build_overlays(section: Section, runs: Sequence[RecordedRun], path: Path) -> ReportFigure | None:
    """Return the examples of the section's runs and streams, in the order of its rows; None if there are none."""
    domains = {result.stream_hash: result.domains for result in section.results}
    examples = {run.name: [example for example in run.examples if example.stream_hash in domains] for run in runs}
    rows = dict.fromkeys((entry.run, entry.method) for entry in section.entries)
    selected = [
        replace(example, method=f"{method} ({run})") if len(section.runs) > 1 else example
        for run, method in rows
        for example in examples[run]
        if example.method == method
    ]
    if not selected:
        return None
    figure = plot_overlays(selected, infer_layout([domains[selected[0].stream_hash]]))
    return _save_figure(figure, path, "Best and worst changes", _OVERLAYS_CAPTION)


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
    return [(name, _join_values(list(found))) for name, found in values.items()]


def _join_values(values: Sequence[str], max_values: int = 5) -> str:
    rest = f" and {len(values) - max_values} more" if len(values) > max_values else ""
    return ", ".join(values[:max_values]) + rest

"""A report as it is rendered: its content, and the figures that are drawn from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from ctta.benchmark.report.content import ReportContent, SectionContent
from ctta.benchmark.report.layout import infer_layout
from ctta.benchmark.report.overlays import plot_overlays
from ctta.benchmark.report.plots import plot_cost, plot_reliability, plot_scores_over_time
from ctta.benchmark.report.runs import RecordedRun
from ctta.benchmark.report.sections import Section, group_into_sections
from ctta.benchmark.report.theme import LineStyle, assign_styles, save_figure

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
    """The content of one section and its figures; what numbers.json does not have cannot be drawn again."""

    number: int
    content: SectionContent
    scores_over_time: ReportFigure | None
    overlays: ReportFigure | None  # for segmentation
    reliability: ReportFigure | None
    cost: ReportFigure | None


@dataclass(frozen=True)
class ReportDocument:
    """The content of a report and its figures, by section."""

    content: ReportContent
    sections: tuple[SectionReport, ...]


def draw_document(content: ReportContent, folder: Path, runs: Sequence[RecordedRun] = ()) -> ReportDocument:
    """Draw the figures of a report and save them in a folder.

    Args:
        content: The content of the report.
        folder: Folder to write to.
        runs: The runs of its first sections, for pictures of scenes, which the content does not have.

    Returns:
        The content with its figures.
    """
    styles = assign_styles(row.label for section in content.sections for row in section.rows)
    with_scenes = group_into_sections(runs)
    reports = []
    for number, section in enumerate(content.sections, start=1):
        suffix = "" if number == 1 else f"-{number}"
        report = _draw_section(number, section, styles, folder, suffix)
        if number <= len(with_scenes):
            report = replace(
                report, overlays=_build_overlays(with_scenes[number - 1], runs, folder / f"overlays{suffix}")
            )
        reports.append(report)
    return ReportDocument(content, tuple(reports))


def _draw_section(
    number: int, section: SectionContent, styles: Mapping[str, LineStyle], folder: Path, suffix: str
) -> SectionReport:
    metric, timeline, cost, reliability = section.metric, None, None, None
    if section.timeline:
        timeline = save_report_figure(
            plot_scores_over_time(section.timeline, styles),
            folder / f"{metric.key}-over-time{suffix}",
            f"{metric.title} over time",
            section.timeline_caption,
        )
    if any(row.bins for row in section.rows):
        figure = plot_reliability(section.rows, styles)
        reliability = save_report_figure(figure, folder / f"reliability{suffix}", "Calibration", _RELIABILITY_CAPTION)
    if section.summary:
        figure = plot_cost(section.summary, metric, styles)
        cost = save_report_figure(figure, folder / f"cost{suffix}", "Cost", _COST_CAPTIONS[metric.best])
    return SectionReport(number, section, timeline, None, reliability, cost)


def save_report_figure(figure: Figure, path: Path, title: str, caption: str) -> ReportFigure:
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
    return save_report_figure(figure, path, "Best and worst changes", _OVERLAYS_CAPTION)

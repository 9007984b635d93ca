"""What a report says, before it is a page: for each section tables, pictures, and where the numbers come from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ctta.evaluation.metrics import Metric
from ctta.report.classes import class_table_of
from ctta.report.colors import Style, styles_of
from ctta.report.cost import cost
from ctta.report.curves import TimeLine, time_line
from ctta.report.entries import Entry
from ctta.report.layout import layout_of
from ctta.report.overlays import CAPTION, overlays
from ctta.report.plots import reliability, score_over_time
from ctta.report.runs import MissingCell, Run
from ctta.report.sections import Section, sections_of
from ctta.report.summary import summary_table_of
from ctta.report.svg import write_figure
from ctta.report.tables import Table, score_table_of


@dataclass(frozen=True)
class Picture:
    file: str  # without its ending: there is a .png and a .svg
    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Chapter:
    """One section of the report: results that compare with each other."""

    number: int
    section: Section
    measure: Metric
    headline: str
    scores: Table
    classes: Table | None  # where results are of pixels
    summary: Table
    pictures: tuple[Picture, ...]
    overlays: Picture | None  # where results are of pixels
    streams: tuple[tuple[str, str], ...]  # name and hash
    environment: tuple[tuple[str, str], ...]

    @property
    def title(self) -> str:
        return ", ".join(self.section.recipes)

    @property
    def caption(self) -> str:
        deviation = any(row.count > 1 for row in self.scores.rows)
        spread = " ± is the sample standard deviation over the n results (orders and seeds) of a row."
        return f"{self.scores.caption}. {self.measure.best.title()} in bold.{spread if deviation else ''}"


@dataclass(frozen=True)
class Document:
    title: str
    chapters: tuple[Chapter, ...]
    runs: tuple[Run, ...]
    missing: tuple[MissingCell, ...]


def document_of(runs: Sequence[Run], folder: Path) -> Document:
    """The whole report; its pictures are written into the folder."""
    sections = sections_of(runs)
    styles = styles_of(entry.label for section in sections for entry in section.entries)
    chapters = tuple(_chapter(number + 1, section, styles, runs, folder) for number, section in enumerate(sections))
    missing = tuple(cell for run in runs for cell in run.missing)
    recipes = dict.fromkeys(run.recipe for run in runs)
    return Document(f"Results: {', '.join(recipes)}", chapters, tuple(runs), missing)


def _chapter(number: int, section: Section, styles: Mapping[str, Style], runs: Sequence[Run], folder: Path) -> Chapter:
    scores, summary = score_table_of(section.entries), summary_table_of(section.entries)
    line, measure = time_line(section.entries), section.results[0].metric
    ending = "" if number == 1 else f"-{number}"
    drawings = [
        (
            f"{measure.key}-over-time",
            f"{measure.title} over time",
            _time_caption(section, line),
            score_over_time(line, styles),
        ),
        ("reliability", "Calibration", _RELIABILITY, reliability(section.entries, styles)),
        ("cost", "Cost", _COST[measure.best], cost(summary, measure, styles)),
    ]
    pictures = tuple(
        Picture(f"{name}{ending}", title, caption, write_figure(figure, folder, f"{name}{ending}"))
        for name, title, caption, figure in drawings
    )
    streams = tuple(dict.fromkeys((result.stream, result.stream_hash) for result in section.results))
    environment = tuple(_gathered(result.environment for result in section.results))
    classes = class_table_of(section.entries)
    headline = _headline(scores, measure)
    return Chapter(
        number,
        section,
        measure,
        headline,
        scores,
        classes,
        summary,
        pictures,
        _overlays(section, runs, folder, ending),
        streams,
        environment,
    )


def _overlays(section: Section, runs: Sequence[Run], folder: Path, ending: str) -> Picture | None:
    """The examples of the section's runs and streams, in the order of its rows."""
    domains = {result.stream_hash: result.domains for result in section.results}
    examples = {run.name: [example for example in run.examples if example.stream_hash in domains] for run in runs}
    rows = dict.fromkeys((entry.run, entry.method) for entry in section.entries)
    shown = [
        replace(example, method=f"{method} ({run})") if len(section.runs) > 1 else example
        for run, method in rows
        for example in examples[run]
        if example.method == method
    ]
    if not shown:
        return None
    figure = overlays(shown, layout_of([domains[shown[0].stream_hash]]))
    name = f"overlays{ending}"
    return Picture(name, "Worst and best changes", CAPTION, write_figure(figure, folder, name))


def _headline(table: Table, measure: Metric) -> str:
    """The outcome in a sentence."""
    if len(table.rows) == 1:
        return f"{table.rows[0].label} has a mean {measure.name} of {table.rows[0].cells[-1].text} %."
    best = [row for row in table.rows if row.cells[-1].best]
    if not best:
        return f"All rows have the same mean {measure.name}, {table.rows[0].cells[-1].text} %."
    names = " and ".join(f"{row.label} ({row.run})" if len(table.runs) > 1 else row.label for row in best)
    verb = "has" if len(best) == 1 else "have"
    sentence = f"{names} {verb} the {measure.best} mean {measure.name}, {best[0].cells[-1].text} %"
    sources = [row for row in table.rows if row.label == "Source" and row not in best]
    return f"{sentence}; the network as trained has {sources[0].cells[-1].text} %." if sources else f"{sentence}."


def _time_caption(section: Section, line: TimeLine) -> str:
    orders = {order for entry in section.entries for order in entry.orders}
    marks = "Vertical lines are where the domain changes."
    if any(curve.round_places for curve in line.curves):
        marks = "Vertical lines are where a round begins; thick lines are means of rounds, thin ones of segments."
    shown = f" Shown is order {'standard' if line.order is None else line.order}, one of {len(orders)}."
    band = " Bands are one standard deviation over seeds." if any(curve.deviations for curve in line.curves) else ""
    return f"{marks}{band}{shown if len(orders) > 1 else ''}"


_RELIABILITY = (
    "Bars: share of right predictions, by confidence. Ticks: mean confidence. The closer they are, the better."
)
_COST = {
    best: f"Time of predicting and adapting, without reading the images. {corner} left is better."
    for best, corner in (("lowest", "Lower"), ("highest", "Upper"))
}


def _gathered(environments: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Every fact once, with all the values it had."""
    values: dict[str, dict[str, None]] = {}
    for environment in environments:
        for name, value in environment.items():
            values.setdefault(name, {})[str(value)] = None
    return [(name, _listed(list(found))) for name, found in values.items()]


def _listed(values: Sequence[str], most: int = 5) -> str:
    rest = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(values[:most]) + rest


def over(entry: Entry) -> str:
    """What a row is the mean of, in words."""
    orders = ", ".join("standard" if order is None else str(order) for order in entry.orders)
    words = f"order{'s' if len(entry.orders) > 1 else ''} {orders}"
    if entry.seeds:
        words += f"; seed{'s' if len(entry.seeds) > 1 else ''} {', '.join(str(seed) for seed in entry.seeds)}"
    return words

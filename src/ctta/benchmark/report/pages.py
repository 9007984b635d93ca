"""Draw the figures of a report, and render it as CSV, LaTeX, Markdown and HTML, with all names escaped."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from math import isnan
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from ctta.benchmark.report.content import ReportContent, SectionContent
from ctta.benchmark.report.plots import plot_cost, plot_overlays, plot_reliability, plot_scores_over_time
from ctta.benchmark.report.runs import MissingCell, RecordedRun, Section, group_into_sections
from ctta.benchmark.report.tables import NUM_DIGITS, Table, TableCell, TableRow, infer_layout
from ctta.benchmark.report.theme import LineStyle, assign_styles, build_style_sheet, save_figure

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
        runs: The runs of its first sections, for images of scenes, which the content does not have.

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


_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}

_CSV_NUMBERS = ("value", "deviation", "published", "published_deviation", "difference")


def to_one_line(text: str) -> str:
    """Return a text with line breaks, control characters and repeated spaces replaced by single spaces."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def escape_latex(text: str) -> str:
    """Return a text that LaTeX prints literally."""
    return "".join(_LATEX_ESCAPES.get(letter, letter) for letter in to_one_line(text))


def escape_markdown(text: str) -> str:
    """Return a text that Markdown prints literally, including any HTML in it."""
    # Parentheses are harmless: a link needs an unescaped bracket before them.
    return re.sub(r"([\\`*_{}\[\]#+!|<>&~$])", r"\\\1", to_one_line(text))


def escape_csv(text: str) -> str:
    """Return a text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def render_csv(tables: Sequence[tuple[str, Table]]) -> str:
    """Render titled tables in long format, one line per number, so that different columns fit into one file."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["section", "run", "method", "n", "column", *_CSV_NUMBERS, "best"])
    for section, table in tables:
        for row in table.rows:
            for column, cell in zip(table.columns, row.cells, strict=True):
                names = [escape_csv(name) for name in (section, row.run, row.label)]
                numbers = [_format_csv_number(getattr(cell, name)) for name in _CSV_NUMBERS]
                is_best = "yes" if cell.is_best else ""
                writer.writerow([*names, row.num_results, escape_csv(column.key), *numbers, is_best])
    return buffer.getvalue()


def render_latex(table: Table, caption: str) -> str:
    """Render a booktabs table that fits a page; only the mean has its deviation, as in the paper."""
    columns = [rf"\rotatebox{{70}}{{{escape_latex(column.name)}}}" for column in table.columns]
    headings = ["method", *columns, *(["published", "difference"] if table.has_published else [])]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape_latex(caption)}}}",
        r"\resizebox{\linewidth}{!}{%",
        rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}",
        r"\toprule",
        " & ".join(headings) + r" \\",
    ]
    for run in table.runs:
        lines.append(r"\midrule")
        if len(table.runs) > 1:
            lines.append(rf"\multicolumn{{{len(headings)}}}{{l}}{{\emph{{{escape_latex(run)}}}}} \\")
        lines += [_render_latex_row(row, table) for row in table.rows if row.run == run]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}", r"\end{table}", ""])


def render_markdown(table: Table) -> str:
    """Render a pipe table; the run is a column if there are several."""
    has_several_runs = len(table.runs) > 1
    headings = [*(["run"] if has_several_runs else []), "method", "n", *(column.name for column in table.columns)]
    headings += ["published", "difference"] if table.has_published else []
    num_names = 2 if has_several_runs else 1
    lines = [
        join_pipes([escape_markdown(heading) for heading in headings]),
        join_pipes(["---"] * num_names + ["---:"] * (len(headings) - num_names)),
    ]
    for row in table.rows:
        names = [*([row.run] if has_several_runs else []), row.label]
        fields = [*(escape_markdown(name) for name in names), str(row.num_results)]
        fields += [_render_markdown_cell(cell) for cell in row.cells]
        fields += [row.cells[-1].published_text, row.cells[-1].difference_text] if table.has_published else []
        lines.append(join_pipes(fields))
    return "\n".join(lines)


def render_markdown_report(document: ReportDocument) -> str:
    """Render the whole report as Markdown; it refers to the PNG files of the figures."""
    content = document.content
    parts = [f"# {escape_markdown(content.title)}"]
    if not document.sections:
        parts.append("No cell is complete yet.")
    for report in document.sections:
        if len(document.sections) > 1:
            parts.append(f"## {report.number}. {escape_markdown(report.content.title)}")
        parts += _render_markdown_section(report, "###" if len(document.sections) > 1 else "##")
    if any(run.commands for run in content.runs):
        parts.append("## Commands")
    for run in content.runs:
        if not run.commands:
            continue
        commands = "\n".join(f"    {to_one_line(command)}" for command in run.commands)
        parts.append(f"{escape_markdown(run.name)}:\n\n{commands}")
    return "\n\n".join([*parts, *render_missing_cells(content.missing)]) + "\n"


def render_missing_cells(missing: Sequence[MissingCell]) -> list[str]:
    """Render the section of missing cells as Markdown, if there are any."""
    cells = ((cell.run, cell.cell, cell.reason) for cell in missing)
    lines = [f"- {' · '.join(escape_markdown(text) for text in cell)}" for cell in cells]
    return ["## Missing cells", "\n".join(lines)] if lines else []


def render_html(document: ReportDocument) -> str:
    """Render the whole report as a page without scripts or external resources; every name is escaped."""
    return render_template("page.html", document=document, content=document.content)


def render_template(name: str, **values: Any) -> str:
    """Render a template of this package with the style sheet of reports; every text is escaped."""
    environment = Environment(
        loader=FunctionLoader(_read_resource),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["minus"] = lambda text: text.replace("-", "\N{MINUS SIGN}")
    # Only these are not escaped: our own style sheet, and the SVG of matplotlib, which escapes its text itself.
    style = Markup(build_style_sheet() + "\n" + _read_resource("page.css"))
    return environment.get_template(name).render(**values, style=style, raw=Markup)


def _read_resource(name: str) -> str:
    return (files("ctta.benchmark.report") / name).read_text(encoding="utf-8")


def _format_csv_number(number: float | None) -> str:
    return "" if number is None or isnan(number) else str(round(number, NUM_DIGITS))


def _render_latex_row(row: TableRow, table: Table) -> str:
    *cells, mean = row.cells
    deviation = rf" $\pm$ {mean.deviation_text}" if mean.deviation is not None else ""
    numbers = [_render_latex_number(cell) for cell in cells]
    fields = [escape_latex(row.label), *numbers, _render_latex_number(mean) + deviation]
    if table.has_published:
        fields += [mean.published_text, f"${mean.difference_text}$" if mean.difference_text else ""]
    return " & ".join(fields) + r" \\"


def _render_latex_number(cell: TableCell) -> str:
    return rf"\textbf{{{cell.text}}}" if cell.is_best else cell.text


def _render_markdown_section(report: SectionReport, heading: str) -> list[str]:
    section = report.content
    parts = [f"> **{escape_markdown(warning)}**" for warning in section.warnings]
    parts += [escape_markdown(section.headline), render_markdown(section.scores), section.caption]
    parts += [escape_markdown(note) for note in section.scores.notes]
    if section.scores.has_published_columns:
        parts += ["Published numbers, with ours minus published in parentheses:", _render_published(section.scores)]
    parts.append(f"Stream: {escape_markdown(section.protocol_title)}")
    parts += [escape_markdown(section.composition)] if section.composition else []
    parts += render_markdown_figures(report.scores_over_time)
    if section.visits:
        parts += [f"{heading} Visits", render_markdown(section.visits), f"{section.visits.caption}."]
    if section.classes:
        parts += [f"{heading} Classes", render_markdown(section.classes), f"{section.classes.caption}."]
    parts += render_markdown_figures(report.overlays)
    if section.summary:
        parts += [f"{heading} {section.summary.caption}", render_markdown(section.summary)]
    parts += render_markdown_figures(report.reliability, report.cost)
    parts += [f"{heading} Settings", "\n".join(_render_markdown_settings(section))]
    streams = ((stream.name, stream.hash) for stream in section.streams)
    facts = [
        f"- {escape_markdown(name)}: {escape_markdown(value)}"
        for name, value in (*section.environment, *streams, *section.networks)
    ]
    return [*parts, f"{heading} Environment, stream and network", "\n".join(facts)]


def _render_published(table: Table) -> str:
    """Render a pipe table of published numbers and differences."""
    lines = [join_pipes(["method", *(escape_markdown(column.name) for column in table.columns)])]
    lines.append(join_pipes(["---", *["---:"] * len(table.columns)]))
    for row in table.rows:
        if row.cells[-1].published is not None:
            fields = [f"{cell.published_text} ({cell.difference_text})" if cell.published else "" for cell in row.cells]
            lines.append(join_pipes([escape_markdown(row.label), *fields]))
    return "\n".join(lines)


def render_markdown_figures(*figures: ReportFigure | None) -> list[str]:
    """Render the figures that there are as references to their PNG files, with captions."""
    return [f"![{figure.title}]({figure.name}.png)\n\n{figure.caption}" for figure in figures if figure]


def _render_markdown_settings(section: SectionContent) -> list[str]:
    lines = []
    for row in section.rows:
        name = f"{row.run}: {row.label}" if len(section.runs) > 1 else row.label
        settings = ", ".join(f"{key}={value}" for key, value in row.settings.items()) or "none"
        facts = "; ".join((row.averaged_over, *row.conditions))
        lines.append(f"- **{escape_markdown(name)}** ({facts}): {escape_markdown(settings)}")
    return lines


def _render_markdown_cell(cell: TableCell) -> str:
    text = f"**{cell.text}**" if cell.is_best else " ".join([*cell.mark, cell.text])
    deviation = f" ± {cell.deviation_text}" if cell.deviation is not None else ""
    return f"{text}{deviation}{f' ({escape_markdown(cell.note)})' if cell.note else ''}"


def join_pipes(fields: Sequence[str]) -> str:
    """Return a line of a pipe table."""
    return f"| {' | '.join(fields)} |"

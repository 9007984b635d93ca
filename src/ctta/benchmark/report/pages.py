"""Draw the figures of a report or of a matrix, and render it as CSV, LaTeX, Markdown and HTML, with names escaped."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from math import isnan
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from ctta.benchmark.report.content import ReportContent, SectionContent, format_numbers, parse_numbers
from ctta.benchmark.report.matrix import (
    Matrix,
    MatrixProtocol,
    build_calibration_table,
    build_difference_table,
    build_error_table,
    build_memory_table,
    build_recurrence_table,
    build_time_table,
    write_advice,
)
from ctta.benchmark.report.plots import (
    ReportFigure,
    assign_styles,
    build_style_sheet,
    plot_cost,
    plot_heat_map,
    plot_overlays,
    plot_reliability,
    plot_scores_over_time,
    save_figure,
)
from ctta.benchmark.report.runs import MissingCell, RecordedRun, Section, group_into_sections
from ctta.benchmark.report.tables import Table, TableRow, infer_layout
from ctta.evaluation.display import NUM_DIGITS, format_percent, join_names
from ctta.evaluation.label_maps import SceneExample

_RELIABILITY = "Bars: accuracy by confidence. Ticks: mean confidence. The closer they are, the better."
_COST = {
    "lowest": "Time to predict and adapt, without reading the images. Lower left is better.",
    "highest": "Time to predict and adapt, without reading the images. Upper left is better.",
}
_OVERLAYS = (
    "For each method, the scenes whose pixel accuracy (in percent) rose and fell most, among the last segments of "
    "every domain. Black: no label, or no finite prediction."
)


@dataclass(frozen=True)
class SectionReport:
    """The content of one section and its figures by kind; what numbers.json does not have cannot be drawn again."""

    number: int  # from 1
    content: SectionContent
    figures: Mapping[str, ReportFigure]  # "scores_over_time", "overlays" (for segmentation), "reliability" and "cost"


def draw_sections(content: ReportContent, folder: Path, runs: Sequence[RecordedRun] = ()) -> list[SectionReport]:
    """Draw the figures of a report and save them in a folder; return the sections with their figures.

    The runs are those of the first sections, for images of scenes, which the content does not have.
    """
    styles = assign_styles(row.label for section in content.sections for row in section.rows)
    with_scenes = group_into_sections(runs)
    reports = []
    for number, section in enumerate(content.sections, start=1):
        metric, suffix = section.metric, "" if number == 1 else f"-{number}"
        figures: dict[str, ReportFigure] = {}
        if section.timeline:
            path, title = folder / f"{metric.key}-over-time{suffix}", f"{metric.title} over time"
            figure = plot_scores_over_time(section.timeline, styles)
            figures["scores_over_time"] = save_figure(figure, path, title, section.timeline_caption)
        if any(row.bins for row in section.rows):
            path, figure = folder / f"reliability{suffix}", plot_reliability(section.rows, styles)
            figures["reliability"] = save_figure(figure, path, "Calibration", _RELIABILITY)
        if section.summary:
            path, figure = folder / f"cost{suffix}", plot_cost(section.summary, metric, styles)
            figures["cost"] = save_figure(figure, path, "Cost", _COST[metric.best])
        if number <= len(with_scenes) and (scenes := _select_examples(with_scenes[number - 1], runs)):
            domains = {stream.hash: stream.domains for stream in section.streams}
            path, layout = folder / f"overlays{suffix}", infer_layout([domains[scenes[0].stream_hash]])
            figure = plot_overlays(scenes, layout)
            figures["overlays"] = save_figure(figure, path, "Best and worst changes", _OVERLAYS)
        reports.append(SectionReport(number, section, figures))
    return reports


def _select_examples(section: Section, runs: Sequence[RecordedRun]) -> list[SceneExample]:
    """Return the examples of the section's runs and streams, in the order of its rows."""
    hashes = {result.stream_hash for result in section.results}
    examples = {run.name: [example for example in run.examples if example.stream_hash in hashes] for run in runs}
    return [
        replace(example, method=f"{method} ({run})") if len(section.runs) > 1 else example
        for run, method in dict.fromkeys((entry.run, entry.method) for entry in section.entries)
        for example in examples[run]
        if example.method == method
    ]


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
    rows = []
    for section, table in tables:
        for row in table.rows:
            for column, cell in zip(table.columns, row.cells, strict=True):
                names = [escape_csv(name) for name in (section, row.run, row.label)]
                numbers = [getattr(cell, name) for name in _CSV_NUMBERS]
                texts = ["" if number is None or isnan(number) else round(number, NUM_DIGITS) for number in numbers]
                rows.append([*names, row.num_results, escape_csv(column.key), *texts, "yes" if cell.is_best else ""])
    return _format_csv(["section", "run", "method", "n", "column", *_CSV_NUMBERS, "best"], rows)


def _format_csv(heading: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([heading, *rows])
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


def _render_latex_row(row: TableRow, table: Table) -> str:
    mean = row.cells[-1]
    fields = [rf"\textbf{{{cell.text}}}" if cell.is_best else cell.text for cell in row.cells]
    fields[-1] += rf" $\pm$ {mean.deviation_text}" if mean.deviation is not None else ""
    if table.has_published:
        fields += [mean.published_text, f"${mean.difference_text}$" if mean.difference_text else ""]
    return " & ".join([escape_latex(row.label), *fields]) + r" \\"


def render_markdown(table: Table) -> str:
    """Render a pipe table; the run is a column if there are several."""
    has_several_runs = len(table.runs) > 1
    headings = [*(["run"] if has_several_runs else []), "method", "n", *(column.name for column in table.columns)]
    headings += ["published", "difference"] if table.has_published else []
    rows = []
    for row in table.rows:
        names = [*([row.run] if has_several_runs else []), row.label]
        fields = [*(escape_markdown(name) for name in names), str(row.num_results)]
        for cell in row.cells:
            text = f"**{cell.text}**" if cell.is_best else " ".join([*cell.mark, cell.text])
            deviation = f" ± {cell.deviation_text}" if cell.deviation is not None else ""
            fields.append(f"{text}{deviation}{f' ({escape_markdown(cell.note)})' if cell.note else ''}")
        fields += [row.cells[-1].published_text, row.cells[-1].difference_text] if table.has_published else []
        rows.append(fields)
    return _render_pipes(headings, rows, num_names=2 if has_several_runs else 1)


def _render_pipes(headings: Sequence[str], rows: Iterable[Sequence[str]], num_names: int) -> str:
    """Render a pipe table, whose columns after the names are numbers."""
    marks = ["---"] * num_names + ["---:"] * (len(headings) - num_names)
    lines = [[escape_markdown(heading) for heading in headings], marks, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def render_markdown_report(content: ReportContent, reports: Sequence[SectionReport]) -> str:
    """Render the whole report as Markdown; it refers to the PNG files of the figures."""
    parts = [f"# {escape_markdown(content.title)}"]
    if not reports:
        parts.append("No cell is complete yet.")
    for report in reports:
        if len(reports) > 1:
            parts.append(f"## {report.number}. {escape_markdown(report.content.title)}")
        parts += _render_markdown_section(report, "###" if len(reports) > 1 else "##")
    with_commands = [run for run in content.runs if run.commands]
    parts += ["## Commands"] if with_commands else []
    for run in with_commands:
        parts.append(f"{escape_markdown(run.name)}:\n\n{_render_commands(run.commands)}")
    return "\n\n".join([*parts, *render_missing_cells(content.missing)]) + "\n"


def _render_commands(commands: Sequence[str]) -> str:
    return "\n".join(f"    {to_one_line(command)}" for command in commands)


def render_missing_cells(missing: Sequence[MissingCell]) -> list[str]:
    """Render the section of missing cells as Markdown, if there are any."""
    cells = ((cell.run, cell.cell, cell.reason) for cell in missing)
    lines = [f"- {' · '.join(escape_markdown(text) for text in cell)}" for cell in cells]
    return ["## Missing cells", "\n".join(lines)] if lines else []


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


def _render_markdown_section(report: SectionReport, heading: str) -> list[str]:
    section = report.content
    parts = [f"> **{escape_markdown(warning)}**" for warning in section.warnings]
    parts += [escape_markdown(section.headline), render_markdown(section.scores), section.caption]
    parts += [escape_markdown(note) for note in section.scores.notes]
    if section.scores.has_published_columns:
        parts += ["Published numbers, with ours minus published in parentheses:", _render_published(section.scores)]
    parts.append(f"Stream: {escape_markdown(section.protocol_title)}")
    parts += [escape_markdown(section.composition)] if section.composition else []
    parts += render_markdown_figures(report, "scores_over_time")
    for name, table in (("Visits", section.visits), ("Classes", section.classes)):
        parts += [f"{heading} {name}", render_markdown(table), f"{table.caption}."] if table else []
    parts += render_markdown_figures(report, "overlays")
    if section.summary:
        parts += [f"{heading} {section.summary.caption}", render_markdown(section.summary)]
    parts += render_markdown_figures(report, "reliability", "cost")
    settings = []
    for row in section.rows:
        name = f"{row.run}: {row.label}" if len(section.runs) > 1 else row.label
        values = ", ".join(f"{key}={value}" for key, value in row.settings.items()) or "none"
        how = "; ".join((row.averaged_over, *row.conditions))
        settings.append(f"- **{escape_markdown(name)}** ({how}): {escape_markdown(values)}")
    parts += [f"{heading} Settings", "\n".join(settings)]
    streams = ((stream.name, stream.hash) for stream in section.streams)
    facts = [
        f"- {escape_markdown(name)}: {escape_markdown(value)}"
        for name, value in (*section.environment, *streams, *section.networks)
    ]
    return [*parts, f"{heading} Environment, stream and network", "\n".join(facts)]


def _render_published(table: Table) -> str:
    """Render a pipe table of published numbers and differences."""
    rows = [
        [
            escape_markdown(row.label),
            *(f"{cell.published_text} ({cell.difference_text})" if cell.published else "" for cell in row.cells),
        ]
        for row in table.rows
        if row.cells[-1].published is not None
    ]
    return _render_pipes(["method", *(column.name for column in table.columns)], rows, num_names=1)


def render_markdown_figures(report: SectionReport, *kinds: str) -> list[str]:
    """Render the figures of some kinds that there are as references to their PNG files, with captions."""
    return [report.figures[kind].markdown for kind in kinds if kind in report.figures]


TITLE = "Robustness matrix: which method for which stream"
GUIDE_HEADINGS = ("protocol", "lowest error", "within noise of it", "above Source", "error of Source", "stream")
HEAT_MAP_CAPTION = (
    "Error above Source in points; below zero a method helps. Green: it beats Source by more than noise. Red: it harms "
    "by more than noise. Gray: noise decides, or too few batches."
)


def write_matrix_page(matrix: Matrix, out: Path) -> Path:
    """Write the files of a matrix, from its numbers alone; return the path of the HTML page."""
    out.mkdir(parents=True, exist_ok=True)
    numbers = format_numbers(matrix)
    matrix = parse_numbers(numbers, Matrix)  # rounded, so that a page that is written again is the same
    heat_map = save_figure(plot_heat_map(matrix), out / "heat-map", "Heat map", HEAT_MAP_CAPTION)
    advice = write_advice(matrix)
    guide = [(protocol, _describe_protocol(matrix, protocol)) for protocol in matrix.protocols]
    build = (
        *(build_difference_table, build_error_table, build_calibration_table, build_recurrence_table),
        *(build_time_table, build_memory_table),
    )
    tables = [table for table in (make(matrix) for make in build) if table]
    rows = [
        [f"**{escape_markdown(each.name)}**: {escape_markdown(each.description)}", *map(escape_markdown, fields)]
        for each, fields in guide
    ]
    markdown = [
        f"# {TITLE}",
        *(escape_markdown(sentence) for sentence in advice),
        heat_map.markdown,
        "## Which method for my conditions?",
        _render_pipes(GUIDE_HEADINGS, rows, num_names=len(GUIDE_HEADINGS)),
        "## All numbers",
        *(part for each in tables for part in (f"### {each.caption}", render_markdown(each), *each.notes)),
        "## Commands",
        _render_commands(matrix.commands),
        *render_missing_cells(matrix.missing),
    ]
    contents = {
        "numbers.json": numbers,
        "matrix.csv": render_matrix_csv(matrix),
        "matrix.md": "\n\n".join(markdown) + "\n",
        "matrix.html": render_template(
            "matrix.html",
            matrix=matrix,
            heat_map=heat_map,
            advice=advice,
            guide=guide,
            tables=tables,
            headings=GUIDE_HEADINGS,
        ),
    }
    for name, text in contents.items():
        (out / name).write_text(text, encoding="utf-8")
    return out / "matrix.html"


def render_matrix_csv(matrix: Matrix) -> str:
    """Render one line per protocol and method, with errors and differences as fractions, empty where there is none."""
    records = []
    for protocol in matrix.protocols:
        for label, cell in protocol.cells.items():
            interval, drift = cell.interval, cell.drift
            numbers = {
                "error": cell.error,
                "above_source": cell.above_source,
                "low": interval.low if interval else None,
                "high": interval.high if interval else None,
                "first_visit": cell.visit_errors[0],
                "last_visit": cell.visit_errors[-1],
                "drift_low": drift.low if drift else None,
                "drift_high": drift.high if drift else None,
                "ms_per_image": cell.ms_per_image,
                "calibration_error": None if isnan(cell.calibration_error) else cell.calibration_error,
            }
            records.append(
                {
                    "protocol": escape_csv(protocol.name),
                    "images": protocol.num_images,
                    "visits": protocol.num_visits,
                    "method": escape_csv(label),
                    "n": cell.num_results,
                    "verdict": cell.verdict,
                    "time_to_harm": cell.time_to_harm or "",
                    **{name: "" if number is None else f"{number:.6f}" for name, number in numbers.items()},
                    "peak_mib": "" if cell.peak_mib is None else cell.peak_mib,
                }
            )
    return _format_csv(list(records[0]), (record.values() for record in records))


def _describe_protocol(matrix: Matrix, protocol: MatrixProtocol) -> tuple[str, ...]:
    """Return what to use on a protocol, one text per heading after the first."""
    harmful = [method for method in matrix.methods if (cell := protocol.cells.get(method)) and cell.verdict == "worse"]
    best, *close = protocol.best
    return (
        f"{best} {format_percent(protocol.cells[best].error)}",
        join_names(close) or "none",
        join_names(harmful) or "none",
        format_percent(protocol.source.error),
        f"{protocol.num_images:,} images in {protocol.composition}",
    )

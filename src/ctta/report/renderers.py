"""Render tables and reports as CSV, LaTeX, Markdown and HTML, with all names escaped."""

import csv
import io
import re
from collections.abc import Sequence
from importlib.resources import files
from math import isnan

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ctta.report.document import ReportDocument, ReportFigure, SectionReport
from ctta.report.tables import NUM_DIGITS, Table, TableCell, TableRow
from ctta.report.theme import build_style_sheet

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
        _join_pipes([escape_markdown(heading) for heading in headings]),
        _join_pipes(["---"] * num_names + ["---:"] * (len(headings) - num_names)),
    ]
    for row in table.rows:
        names = [*([row.run] if has_several_runs else []), row.label]
        fields = [*(escape_markdown(name) for name in names), str(row.num_results)]
        fields += [_render_markdown_cell(cell) for cell in row.cells]
        fields += [row.cells[-1].published_text, row.cells[-1].difference_text] if table.has_published else []
        lines.append(_join_pipes(fields))
    return "\n".join(lines)


def render_markdown_report(document: ReportDocument) -> str:
    """Render the whole report as Markdown; it refers to the PNG files of the figures."""
    parts = [f"# {escape_markdown(document.title)}"]
    if not document.sections:
        parts.append("No cell is complete yet.")
    for section in document.sections:
        parts += _render_markdown_section(section)
    if any(run.commands for run in document.runs):
        parts.append("## Commands")
    for run in document.runs:
        if not run.commands:
            continue
        commands = "\n".join(f"    {to_one_line(command)}" for command in run.commands)
        parts.append(f"{escape_markdown(run.name)}:\n\n{commands}")
    if document.missing:
        parts.append("## Missing cells")
        cells = ((cell.run, cell.cell, cell.reason) for cell in document.missing)
        parts.append("\n".join(f"- {' · '.join(escape_markdown(text) for text in cell)}" for cell in cells))
    return "\n\n".join(parts) + "\n"


def render_html(document: ReportDocument) -> str:
    """Render the whole report as a page without scripts or external resources; every name is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["minus"] = lambda text: text.replace("-", "\N{MINUS SIGN}")
    resources = files("ctta.report")
    template = environment.from_string((resources / "page.html").read_text(encoding="utf-8"))
    # Only these are not escaped: our own style sheet, and the SVG of matplotlib, which escapes its text itself.
    style = Markup(build_style_sheet() + "\n" + (resources / "page.css").read_text(encoding="utf-8"))
    return template.render(document=document, style=style, raw=Markup)


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


def _render_markdown_section(report: SectionReport) -> list[str]:
    section = report.section
    parts = [f"## {report.number}. {escape_markdown(report.title)}", escape_markdown(section.title)]
    parts += [f"> **{escape_markdown(warning)}**" for warning in section.warnings]
    parts += [escape_markdown(report.headline), render_markdown(report.scores), report.caption]
    parts += [escape_markdown(note) for note in report.scores.notes]
    if report.scores.has_published_columns:
        parts += ["Published numbers, with ours minus published in parentheses:", _render_published(report.scores)]
    parts.append(_render_markdown_figure(report.scores_over_time))
    if report.classes:
        parts += ["### Classes", render_markdown(report.classes), f"{report.classes.caption}."]
    if report.overlays:
        parts.append(_render_markdown_figure(report.overlays))
    parts += [f"### {report.summary.caption}", render_markdown(report.summary)]
    parts += [_render_markdown_figure(figure) for figure in (report.reliability, report.cost)]
    parts += ["### Settings", "\n".join(_render_markdown_settings(report))]
    facts = [
        f"- {escape_markdown(name)}: {escape_markdown(value)}"
        for name, value in (*report.environment, *report.streams, *report.networks)
    ]
    return [*parts, "### Environment, stream and network", "\n".join(facts)]


def _render_published(table: Table) -> str:
    """Render a pipe table of published numbers and differences."""
    lines = [_join_pipes(["method", *(escape_markdown(column.name) for column in table.columns)])]
    lines.append(_join_pipes(["---", *["---:"] * len(table.columns)]))
    for row in table.rows:
        if row.cells[-1].published is not None:
            fields = [f"{cell.published_text} ({cell.difference_text})" if cell.published else "" for cell in row.cells]
            lines.append(_join_pipes([escape_markdown(row.label), *fields]))
    return "\n".join(lines)


def _render_markdown_figure(figure: ReportFigure) -> str:
    return f"![{figure.title}]({figure.name}.png)\n\n{figure.caption}"


def _render_markdown_settings(report: SectionReport) -> list[str]:
    lines = []
    for entry in report.section.entries:
        name = f"{entry.run}: {entry.label}" if len(report.section.runs) > 1 else entry.label
        settings = ", ".join(f"{key}={value}" for key, value in entry.settings.items()) or "none"
        lines.append(f"- **{escape_markdown(name)}** ({entry.averaged_over}): {escape_markdown(settings)}")
    return lines


def _render_markdown_cell(cell: TableCell) -> str:
    text = f"**{cell.text}**" if cell.is_best else cell.text
    deviation = f" ± {cell.deviation_text}" if cell.deviation is not None else ""
    return f"{text}{deviation}{f' ({escape_markdown(cell.note)})' if cell.note else ''}"


def _join_pipes(fields: Sequence[str]) -> str:
    return f"| {' | '.join(fields)} |"

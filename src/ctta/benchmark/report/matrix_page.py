"""The page of the robustness matrix: content, CSV, Markdown and HTML, from its numbers alone."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from ctta.benchmark.report.content import format_numbers, parse_numbers
from ctta.benchmark.report.matrix import (
    Matrix,
    MatrixProtocol,
    build_difference_table,
    build_error_table,
    build_recurrence_table,
    build_time_table,
    write_advice,
)
from ctta.benchmark.report.pages import (
    ReportFigure,
    escape_csv,
    escape_markdown,
    join_pipes,
    render_markdown,
    render_markdown_figures,
    render_missing_cells,
    render_template,
    save_report_figure,
    to_one_line,
)
from ctta.benchmark.report.plots import plot_heat_map
from ctta.benchmark.report.tables import Table
from ctta.evaluation.display import format_percent, join_names

TITLE = "Robustness matrix: which method for which stream"
GUIDE_HEADINGS = ("protocol", "lowest error", "within noise of it", "above Source", "error of Source", "stream")
HEAT_MAP_CAPTION = (
    "Error above Source in points; below zero a method helps. Green: it beats Source by more than noise. Red: it harms "
    "by more than noise. Gray: noise decides, or too few batches."
)
DIFFERENCE_TEXT = (
    "▼ green: below Source by more than noise, ▲ red: above. Intervals are those of differences on the same batches; "
    "of twenty cells without a true difference, one is colored by chance. Rows: lowest mean first."
)
ERROR_TEXT = (
    "Mean over the segments of the stream. Lowest in bold, where the lead over every other row is more than noise."
)
VISIT_TEXT = (
    "Drift: last visit minus first, with its 95 % interval; Source drifts by chance where visits have other images. "
    "Harm: the first visit above Source in the same visit by more than noise, if the next one is so as well."
)

TIME_TEXT = "Wall-clock time, without reading the images."


@dataclass(frozen=True)
class GuideRow:
    """What to use on a protocol: its name, what it is, and one text per heading after the first."""

    name: str
    description: str
    fields: tuple[str, ...]


@dataclass(frozen=True)
class MatrixPage:
    """The content of the page, independent of the format."""

    matrix: Matrix
    heat_map: ReportFigure
    advice: tuple[str, ...]
    guide: tuple[GuideRow, ...]
    tables: tuple[tuple[Table, str], ...]  # with what a reader must know


def write_matrix_page(matrix: Matrix, out: Path) -> Path:
    """Write the files of a matrix, from its numbers alone.

    Args:
        matrix: The numbers, of at least one protocol.
        out: Folder to write to; created if it does not exist.

    Returns:
        Path of the HTML page.
    """
    out.mkdir(parents=True, exist_ok=True)
    numbers = format_numbers(matrix)
    matrix = parse_numbers(numbers, Matrix)  # rounded, so that a page that is written again is the same
    visits = build_recurrence_table(matrix)
    page = MatrixPage(
        matrix,
        save_report_figure(plot_heat_map(matrix), out / "heat-map", "Heat map", HEAT_MAP_CAPTION),
        tuple(write_advice(matrix)),
        tuple(_describe_protocol(matrix, protocol) for protocol in matrix.protocols),
        (
            (build_difference_table(matrix), DIFFERENCE_TEXT),
            (build_error_table(matrix), ERROR_TEXT),
            *([(visits, VISIT_TEXT)] if visits else []),
            (build_time_table(matrix), TIME_TEXT),
        ),
    )
    contents = {
        "numbers.json": numbers,
        "matrix.csv": render_matrix_csv(matrix),
        "matrix.md": render_matrix_markdown(page),
        "matrix.html": render_template("matrix.html", page=page, headings=GUIDE_HEADINGS),
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
                }
            )
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return buffer.getvalue()


def render_matrix_markdown(page: MatrixPage) -> str:
    """Render the whole page as Markdown; it refers to the PNG file of the heat map."""
    guide = [GUIDE_HEADINGS, ("---",) * len(GUIDE_HEADINGS)]
    for row in page.guide:
        name = f"**{escape_markdown(row.name)}**: {escape_markdown(row.description)}"
        guide.append((name, *(escape_markdown(field) for field in row.fields)))
    parts = [
        f"# {TITLE}",
        *(escape_markdown(sentence) for sentence in page.advice),
        *render_markdown_figures(page.heat_map),
        "## Which method for my conditions?",
        "\n".join(join_pipes(row) for row in guide),
        "## All numbers",
    ]
    for table, text in page.tables:
        parts += [f"### {table.caption}", render_markdown(table), text]
    parts += ["## Commands", "\n".join(f"    {to_one_line(command)}" for command in page.matrix.commands)]
    return "\n\n".join([*parts, *render_missing_cells(page.matrix.missing)]) + "\n"


def _describe_protocol(matrix: Matrix, protocol: MatrixProtocol) -> GuideRow:
    harmful = [method for method in matrix.methods if (cell := protocol.cells.get(method)) and cell.verdict == "worse"]
    best, *close = protocol.best
    return GuideRow(
        protocol.name,
        protocol.description,
        (
            f"{best} {format_percent(protocol.cells[best].error)}",
            join_names(close) or "none",
            join_names(harmful) or "none",
            format_percent(protocol.source.error),
            f"{protocol.num_images:,} images in {protocol.composition}",
        ),
    )

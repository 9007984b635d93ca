"""Print the results of benchmarks."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as TerminalTable
from rich.text import Text

from ctta.benchmark import BenchmarkResult, JobOutcome, MatrixResult
from ctta.benchmark.report import Table, TableCell, TableColumn, score_table
from ctta.benchmark.report.matrix import build_difference_table, write_advice
from ctta.benchmark.report.runs import group_by_method
from ctta.benchmark.report.significance import write_headline
from ctta.cli.console import print_notice, print_text, stdout
from ctta.evaluation.metrics import MIOU
from ctta.evaluation.results import Result
from ctta.evaluation.robustness import Verdict

MAX_HEADING_LENGTH = 5
VERDICT_STYLES: dict[Verdict | None, str] = {"better": "green", "worse": "red"}


def print_failure(outcome: JobOutcome) -> None:
    """Print the error of a cell that failed."""
    if outcome.error:
        retried = " (will be retried)" if outcome.will_retry else ""
        print_notice(f"{outcome.cell.name}: {outcome.error}{retried}")


def print_results(result: BenchmarkResult, *, as_json: bool = False) -> None:
    """Print the table of a benchmark, its outcome and the path of its report, or one line of JSON per cell."""
    if as_json:
        for cell_result in result.results:
            typer.echo(_format_json(cell_result, result.run.folder))
        return
    if result.results:
        print_table(score_table(result.results), stdout)
        print_text(write_headline(group_by_method(result.results), result.results[0].metric))
    if result.report:
        print_text(f"Report: {result.report}")


def print_matrix(result: MatrixResult, *, as_json: bool = False) -> None:
    """Print the error above Source of every method and protocol, what follows from it and the path of the page."""
    if result.matrix is None:
        return
    if as_json:
        for protocol in result.matrix.protocols:
            for label, cell in protocol.cells.items():
                names = {"protocol": protocol.name, "method": label, "verdict": cell.verdict}
                typer.echo(json.dumps({**names, **asdict(cell), "run": str(result.run.folder)}))
        return
    print_table(build_difference_table(result.matrix), stdout)
    for sentence in write_advice(result.matrix):
        print_text(sentence)
    print_text(f"Report: {result.report}")


def exit_on_failures(results: Sequence[BenchmarkResult | MatrixResult]) -> None:
    """Exit with code 1 if a cell failed for good."""
    if num_failed := sum(len(result.failures) for result in results):
        num_cells = sum(len(result.run.cells) for result in results)
        print_notice(f"{num_failed} of {num_cells} cells failed and are missing from the table.")
        raise typer.Exit(1)


def _format_json(result: Result, folder: Path) -> str:
    values: dict[str, Any] = {"error": result.error, "errors": result.errors}
    if result.metric == MIOU:
        values |= {"miou": result.miou, "mious": result.mious, "class_iou": result.class_iou}
    if result.visits:
        values |= {"visits": result.visit_values, "drift": result.drift}
    if result.composition is not None:
        values["composition"] = result.composition.to_json()
    values |= {"calibration_error": result.calibration_error, "step_ratio": result.step_ratio}
    return json.dumps({**result.labels, **values, "images_per_second": result.images_per_second, "run": str(folder)})


def print_table(table: Table, console: Console) -> None:
    """Print a table with a row per method, or transposed where the terminal is too narrow; never cut anything off."""
    drawn = _row_per_method(table)
    needed = Measurement.get(console, console.options.update(max_width=1000), drawn).maximum
    if needed > console.width:
        if console.is_terminal:
            drawn = _column_per_method(table)
        else:
            console.width = needed
    console.print(table.caption, drawn, "", sep="\n")


def _row_per_method(table: Table) -> TerminalTable:
    """Return the table as papers print it, with headings shortened (gaussian_noise is gau)."""
    drawn = TerminalTable(box=None, padding=(0, 1, 0, 0))
    drawn.add_column("", no_wrap=True)
    for column in table.columns:
        drawn.add_column(_heading(column), justify="right", no_wrap=True)
    if table.has_published:
        drawn.add_column("paper", justify="right", no_wrap=True)
    for row in table.rows:
        published = [row.cells[-1].published_text] if table.has_published else []
        drawn.add_row(row.label, *_format_cells(row.cells), *published)
    return drawn


def _column_per_method(table: Table) -> TerminalTable:
    """Return the transposed table, whose headings may wrap."""
    drawn = TerminalTable(box=None, padding=(0, 1, 0, 0))
    drawn.add_column("", no_wrap=True)
    for row in table.rows:
        drawn.add_column(row.label, justify="right")
    texts = [_format_cells(row.cells) for row in table.rows]
    for number, column in enumerate(table.columns):
        drawn.add_row(column.name, *(row[number] for row in texts))
    if table.has_published:
        drawn.add_row("paper", *(row.cells[-1].published_text for row in table.rows))
    return drawn


def _heading(column: TableColumn) -> str:
    if column.short_name or len(column.name) <= MAX_HEADING_LENGTH or column.name[-1].isdigit():
        return column.short_name or column.name
    return column.name[:3]


def _format_cells(cells: tuple[TableCell, ...]) -> list[Text]:
    """Format a row: best values in bold, the mean (which comes last) with its standard deviation."""
    texts = [
        Text(" ".join([*cell.mark, cell.text]), style="bold" if cell.is_best else VERDICT_STYLES.get(cell.verdict, ""))
        for cell in cells
    ]
    if cells[-1].deviation is not None:
        texts[-1].append(f" ±{cells[-1].deviation_text}")
    return texts

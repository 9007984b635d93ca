"""Run benchmark cells with a progress bar, and print their results."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as TerminalTable
from rich.text import Text

from ctta.benchmark import (
    BenchmarkRun,
    Executor,
    JobOutcome,
    ProgressCounter,
    SerialExecutor,
    execute,
    write_run_examples,
)
from ctta.cli.console import interrupt_between_steps, polled_progress_bar, print_notice, print_text, stderr, stdout
from ctta.distributed import rank, world_size
from ctta.errors import ConfigError
from ctta.evaluation.metrics import MIOU
from ctta.evaluation.results import Result
from ctta.report import score_table, write_report
from ctta.report.tables import Cell, Column, Table

MAX_HEADING_LENGTH = 5


def run_and_report(
    runs: Sequence[BenchmarkRun], elsewhere: Executor | None = None, *, report: Path, as_json: bool = False
) -> None:
    """Run every cell, in this process or elsewhere, print a table per run, and write one report of all.

    Exit code 1 if a cell failed for good, 130 after Ctrl-C.
    """
    if elsewhere and world_size() > 1:
        raise ConfigError(
            "torchrun has already started several processes: leave out --workers and --ray, or run without torchrun"
        )
    failed: list[JobOutcome] = []
    try:
        for run in runs:
            failed += _run(run, elsewhere)
    except KeyboardInterrupt:
        print_notice("Stopped. Run the same command again to resume.")
        raise typer.Exit(130) from None
    if rank() == 0:
        _report(runs, report, as_json)
    if failed:
        number = sum(len(run.cells) for run in runs)
        print_notice(f"{len(failed)} of {number} cells failed and are missing from the table.")
        raise typer.Exit(1)


def _report(runs: Sequence[BenchmarkRun], report: Path, as_json: bool) -> None:
    complete = {run.folder: [result for result in run.results() if result.is_complete] for run in runs}
    for folder, results in complete.items():
        if as_json:
            for result in results:
                typer.echo(_json_line(result, folder))
        elif results:
            print_table(score_table(results), stdout)
    if any(complete.values()):
        with stderr.status("Writing the report"):
            for run in runs:
                write_run_examples(run)
            page = write_report(list(complete), report)
        if not as_json:
            print_text(f"Report: {page}")


def _run(run: BenchmarkRun, elsewhere: Executor | None) -> list[JobOutcome]:
    with polled_progress_bar(run.folder.name, run.num_batches, ProgressCounter(run).count):
        if elsewhere:
            return execute(run, elsewhere, on_outcome=_print_failure)
        with interrupt_between_steps() as raise_if_interrupted:
            return execute(run, SerialExecutor(lambda _record: raise_if_interrupted()), on_outcome=_print_failure)


def _print_failure(outcome: JobOutcome) -> None:
    if outcome.error:
        retried = " (will be retried)" if outcome.will_retry else ""
        print_notice(f"{outcome.cell.name}: {outcome.error}{retried}")


def _json_line(result: Result, folder: Path) -> str:
    values: dict[str, Any] = {"error": result.error, "errors": result.errors}
    if result.metric == MIOU:
        values |= {"miou": result.miou, "mious": result.mious, "class_iou": result.class_iou}
    values["calibration_error"] = result.calibration_error
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


def _heading(column: Column) -> str:
    if column.short_name or len(column.name) <= MAX_HEADING_LENGTH or column.name[-1].isdigit():
        return column.short_name or column.name
    return column.name[:3]


def _format_cells(cells: tuple[Cell, ...]) -> list[Text]:
    """Format a row: best values in bold, the mean (which comes last) with its standard deviation."""
    texts = [Text(cell.text, style="bold" if cell.best else "") for cell in cells]
    if cells[-1].deviation is not None:
        texts[-1].append(f" ±{cells[-1].deviation_text}")
    return texts

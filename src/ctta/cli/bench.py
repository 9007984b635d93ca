"""``ctta bench`` and ``ctta report``: run a benchmark, print its results, and write the report of runs."""

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as TerminalTable
from rich.text import Text

from ctta import benchmark
from ctta.benchmark import BenchmarkResult, DetectionResult, JobOutcome, MatrixResult, RunOptions
from ctta.benchmark.detection import DETECTION
from ctta.benchmark.matrix import MATRIX
from ctta.benchmark.plan import describe_left_out
from ctta.benchmark.report import Table, TableCell, TableColumn, read_matrix, score_table, write_matrix, write_report
from ctta.benchmark.report.matrix import RUNS, build_difference_table, is_matrix, write_advice
from ctta.benchmark.report.runs import group_by_method
from ctta.benchmark.report.score_tables import describe_outcome
from ctta.cli.console import (
    exit_on_interrupt,
    interrupt_between_steps,
    print_notice,
    print_rows,
    print_text,
    progress_bar,
    stdout,
)
from ctta.cli.options import command
from ctta.core.options import Option
from ctta.errors import ConfigError
from ctta.evaluation.intervals import Verdict
from ctta.evaluation.metrics import MIOU
from ctta.evaluation.results import Result


@command
def bench(
    *,
    recipe: Annotated[
        str,
        typer.Argument(
            help="Run this benchmark, such as embedded; for a list see: ctta recipes. matrix runs methods on many "
            "protocols, about an hour of one core with the default ones; detection runs those for detectors.",
            metavar="RECIPE",
        ),
    ],
    options: RunOptions,
    as_json: Annotated[bool, Option("Print one line of JSON per cell instead of tables.", name="--json")] = False,
) -> None:
    """Run methods over a benchmark stream and write the results as a resumable run folder.

    After a kill or Ctrl-C, run the same command again to resume: the results
    are identical to those of an uninterrupted run.
    """
    if recipe == DETECTION:
        with exit_on_interrupt(), progress_bar(recipe) as update:
            changes: dict[str, Any] = {"command": shlex.join(["ctta", *sys.argv[1:]]), "on_progress": update}
            found = benchmark.run_detection_benchmark(**vars(options) | changes)
        print_detection(found, as_json=as_json)
        return
    with _execute(recipe, options) as callbacks:
        keywords = vars(options) | callbacks | {"command": shlex.join(["ctta", *sys.argv[1:]])}
        result = benchmark.run_matrix(**keywords) if recipe == MATRIX else benchmark.run(recipe, **keywords)
    if isinstance(result, benchmark.MatrixResult):
        print_matrix(result, as_json=as_json)
    else:
        print_results(result, as_json=as_json)
    exit_on_failures([result])


@contextmanager
def _execute(title: str, options: RunOptions) -> Iterator[dict[str, Any]]:
    """Yield the callbacks of :func:`ctta.benchmark.run` that show the progress and let Ctrl-C end it after a step."""
    with ExitStack() as stack:
        stack.enter_context(exit_on_interrupt())
        update = stack.enter_context(progress_bar(title))
        is_serial = not options.workers and options.ray is None
        checks: list[Callable[[], None]] = []

        def start(run: benchmark.BenchmarkRun) -> None:
            if line := describe_left_out(run.left_out):
                print_notice(line)
            once = dict.fromkeys(cell.method.rpartition(":")[2] for cell in run.cells if cell.seed is None)
            if once and len(options.seeds or ()) > 1:
                print_notice(f"One run for all seeds, as they draw no random numbers: {', '.join(once)}.")
            if is_serial:  # only now: before the first batch, Ctrl-C stops what a recipe measures at once
                checks.append(stack.enter_context(interrupt_between_steps()))

        executor = benchmark.SerialExecutor(lambda _record: checks[0]()) if is_serial else None
        yield {"executor": executor, "on_plan": start, "on_progress": update, "on_outcome": print_failure}


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
        print_text(describe_outcome(group_by_method(result.results)))
    if result.report:
        print_text(f"Report: {result.report}")


def print_detection(result: DetectionResult, *, as_json: bool = False) -> None:
    """Print mAP50 of each method on each part, and its means with intervals, or one line of JSON per method."""
    estimates = result.estimate()
    if as_json:
        for name in result.runs:
            values = {kind: asdict(found[name]) for kind, found in estimates.items()}
            typer.echo(json.dumps({"method": name, "milliseconds": result.milliseconds[name], **values}))
        return
    header, *rows = result.tabulate()
    print_rows(header, rows, keep=header[0])
    columns = ("method", "mAP50", "above " + next(iter(result.runs)), "mAP50-95")
    for kind, found in estimates.items():
        print_text(f"\nMean over parts ({kind}), with 95 % intervals over images:")
        texts = [(each.map50, each.difference, each.map) for each in found.values()]
        rows = [
            (name, *(f"{value.estimate:.1f} [{value.low:.1f}, {value.high:.1f}]" for value in values))
            for name, values in zip(found, texts, strict=True)
        ]
        print_rows(columns, rows, keep="method")


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
    paper = ["paper"] if table.has_published else []
    rows: list[list[Text | str]] = [
        [*_format_cells(row.cells), *(row.cells[-1].published_text for _ in paper)] for row in table.rows
    ]
    labels = [row.label for row in table.rows]
    # As papers print it, with headings shortened (gaussian_noise is gau).
    drawn = _draw([*map(_heading, table.columns), *paper], labels, rows, no_wrap=True)
    needed = Measurement.get(console, console.options.update(max_width=1000), drawn).maximum
    if needed > console.width:
        if console.is_terminal:
            names = [*(column.name for column in table.columns), *paper]
            drawn = _draw(labels, names, zip(*rows, strict=True), no_wrap=False)
        else:
            console.width = needed
    console.print(table.caption, drawn, "", sep="\n")


def _draw(
    headings: Sequence[str], names: Sequence[str], rows: Iterable[Sequence[Text | str]], *, no_wrap: bool
) -> TerminalTable:
    drawn = TerminalTable(box=None, padding=(0, 1, 0, 0))
    drawn.add_column("", no_wrap=True)
    for heading in headings:
        drawn.add_column(heading, justify="right", no_wrap=no_wrap)
    for name, row in zip(names, rows, strict=True):
        drawn.add_row(name, *row)
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


@command
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Read these folders, written by 'ctta bench', ctta.evaluate or ctta.compare, or numbers.json of "
            "earlier reports; one report shows all.",
            metavar="RUN...",
        ),
    ],
    to: Annotated[
        Path | None,
        Option(
            "Write to this folder. Default: report/ in the first folder, or in that of the first numbers.json.",
            "DIR",
            "--out",
        ),
    ] = None,
) -> None:
    """Write the tables and plots of runs as one HTML page, Markdown, LaTeX, CSV, JSON, PNG and SVG.

    The folder of 'ctta bench matrix' gets the page of the matrix; each of its
    protocols, in protocols/, is a run of its own.
    """
    first, *others = folders
    if others and (matrices := [path for path in folders if is_matrix(path)]):
        raise ConfigError(_describe_matrix(matrices[0]))
    out = to or (first.parent if first.is_file() else first) / "report"
    with exit_on_interrupt("Run the same command again."), progress_bar("reading") as update:
        if is_matrix(first):
            page = write_matrix(read_matrix(first, on_progress=update), out)
        else:
            page = write_report(folders, out, on_progress=update)
    print_text(f"Report: {page}")


def _describe_matrix(path: Path) -> str:
    """Return why a matrix cannot be reported beside others."""
    runs = f", or give its runs {path / RUNS}/*" if path.is_dir() else ""
    return f"{path} is a matrix: report it alone{runs}"

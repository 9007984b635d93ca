"""Run the cells of one or several runs before a person's eyes, and show the tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from ctta.benchmark import Ending, Place, Progress, Run, ThisProcess, execute, keep_examples
from ctta.cli.console import err, out, progress_of
from ctta.cli.stopping import stopping_between_steps
from ctta.cli.tables import print_table
from ctta.distributed import rank, world_size
from ctta.evaluation.metrics import MIOU
from ctta.evaluation.results import Result
from ctta.report import score_table, write_report


def run_and_report(runs: Sequence[Run], elsewhere: Place | None = None, *, report: Path, as_json: bool = False) -> None:
    """Run every cell, in this process or elsewhere, print a table per run, and write one report of all.

    Exit code 1 if a cell failed for good, 130 after Ctrl-C.
    """
    if elsewhere and world_size() > 1:
        raise ValueError(
            "torchrun has started processes already, so cells cannot be sent to others: choose one of both"
        )
    failed: list[Ending] = []
    try:
        for run in runs:
            failed += _run(run, elsewhere)
    except KeyboardInterrupt:
        err.print("Stopped; the same command goes on from what was saved.")
        raise typer.Exit(130) from None
    if rank() == 0:
        _report(runs, report, as_json)
    if failed:
        number = sum(len(run.cells) for run in runs)
        err.print(f"{len(failed)} of {number} cells failed; the table is without them.", soft_wrap=True)
        raise typer.Exit(1)


def _report(runs: Sequence[Run], report: Path, as_json: bool) -> None:
    complete = {run.folder: [result for result in run.results() if result.is_complete] for run in runs}
    for folder, results in complete.items():
        if as_json:
            for result in results:
                typer.echo(_line(result, folder))
        elif results:
            print_table(score_table(results), out)
    if any(complete.values()):
        with err.status("Writing the report"):
            for run in runs:
                keep_examples(run)
            page = write_report(list(complete), report)
        if not as_json:
            out.print(f"Report: {page}", soft_wrap=True)


def _run(run: Run, elsewhere: Place | None) -> list[Ending]:
    with progress_of(run.folder.name, run.num_batches, Progress(run).num_batches_done):
        if elsewhere:
            return execute(run, elsewhere, on_ending=_tell_problem)
        with stopping_between_steps() as stop_if_asked:
            return execute(run, ThisProcess(lambda _record: stop_if_asked()), on_ending=_tell_problem)


def _tell_problem(ending: Ending) -> None:
    if ending.problem:
        again = " (tried again)" if ending.is_retried else ""
        err.print(f"{ending.cell.name}: {ending.problem}{again}", soft_wrap=True)


def _line(result: Result, folder: Path) -> str:
    """A result for machines."""
    figures: dict[str, Any] = {"error": result.error, "errors": result.errors}
    if result.measure == MIOU:
        figures |= {"miou": result.miou, "mious": result.mious, "class_iou": result.class_iou}
    figures["calibration_error"] = result.calibration_error
    return json.dumps({**result.labels, **figures, "images_per_second": result.images_per_second, "run": str(folder)})

"""Run the cells of one or several runs before a person's eyes, and show the tables."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from ctta.cli.console import err, out, progress_of
from ctta.cli.tables import print_table
from ctta.grid import Ending, Place, Run, execute
from ctta.report import error_table, write_report


def run_and_report(runs: Sequence[Run], place: Callable[[], Place], *, report: Path, as_json: bool = False) -> None:
    """Run every cell, print a table per run, and write one report of all.

    Exit code 1 if a cell failed for good, 130 after Ctrl-C.
    """
    failed: list[Ending] = []
    try:
        for run in runs:
            with progress_of(run.title, run.num_batches, lambda run=run: run.num_batches_done):  # type: ignore[misc]
                failed += execute(run, place(), on_ending=_tell_problem)
    except KeyboardInterrupt:
        done, total = sum(run.num_batches_done for run in runs), sum(run.num_batches for run in runs)
        err.print(f"Stopped after {done} of {total} batches; the same command goes on from there.")
        raise typer.Exit(130) from None
    for run in runs:
        results = [result for result in run.results() if result.is_complete]
        if as_json:
            for result in results:
                line = {**result.labels, "error": result.error, "errors": result.errors, "folder": str(run.folder)}
                out.print(json.dumps(line), soft_wrap=True)
        elif results:
            print_table(error_table(results), out)
    if any(result.is_complete for run in runs for result in run.results()):
        page = write_report([run.folder for run in runs], report)
        if not as_json:
            out.print(f"Report: {page}", soft_wrap=True)
    if failed:
        err.print(f"{len(failed)} of {sum(len(run.cells) for run in runs)} cells failed; the table is without them.")
        raise typer.Exit(1)


def _tell_problem(ending: Ending) -> None:
    if ending.problem:
        err.print(f"{ending.cell.name}: {ending.problem}" + (" (tried again)" if ending.is_retried else ""))

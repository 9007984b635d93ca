"""``ctta report``: write a report of one or several runs."""

from pathlib import Path
from typing import Annotated

import typer

from ctta.benchmark.report import read_matrix, write_matrix, write_report
from ctta.benchmark.report.matrix import RUNS, is_matrix
from ctta.cli.console import exit_on_interrupt, print_text, progress_bar
from ctta.errors import ConfigError


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
        typer.Option(
            "--out",
            help="Write to this folder. Default: report/ in the first folder, or in that of the first numbers.json.",
            metavar="DIR",
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

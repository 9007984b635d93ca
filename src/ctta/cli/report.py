"""``ctta report``: write a report of one or several runs."""

from pathlib import Path
from typing import Annotated

import typer

from ctta.cli.console import exit_on_interrupt, print_text, progress_bar
from ctta.report import read_matrix, write_matrix, write_report
from ctta.report.matrix import is_matrix


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
            "--out", help="Write to this folder. Default: report/ in the first run, or beside the file.", metavar="DIR"
        ),
    ] = None,
) -> None:
    """Write the tables and plots of runs as one HTML page, Markdown, LaTeX, CSV, JSON, PNG and SVG.

    The folder of 'ctta bench matrix' gets the page of the matrix; each of its
    protocols, in protocols/, is a run of its own.
    """
    first = folders[0].parent if folders[0].is_file() else folders[0]
    out = to or first / "report"
    with exit_on_interrupt("Run the same command again."), progress_bar("reading") as update:
        if len(folders) == 1 and is_matrix(folders[0]):
            page = write_matrix(read_matrix(folders[0], on_progress=update), out)
        else:
            page = write_report(folders, out, on_progress=update)
    print_text(f"Report: {page}")

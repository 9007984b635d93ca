"""``ctta report``: write a report of one or several runs."""

from pathlib import Path
from typing import Annotated

import typer

from ctta.cli.console import exit_on_interrupt, print_text, progress_bar
from ctta.report import write_report


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
    """Write the tables and plots of runs as one HTML page, Markdown, LaTeX, CSV, JSON, PNG and SVG."""
    with exit_on_interrupt("Run the same command again."), progress_bar("reading") as update:
        first = folders[0].parent if folders[0].is_file() else folders[0]
        page = write_report(folders, to or first / "report", on_progress=update)
    print_text(f"Report: {page}")

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
            help="Read these folders, written by 'ctta bench', ctta.evaluate or ctta.compare; one report compares all.",
            metavar="FOLDER...",
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option("--out", help="Write to this folder. Default: report/ in the first run.", metavar="DIR"),
    ] = None,
) -> None:
    """Write the tables and plots of runs as one HTML page, Markdown, LaTeX, CSV, PNG and SVG."""
    with exit_on_interrupt("Run the same command again."), progress_bar("reading") as update:
        page = write_report(folders, to or folders[0] / "report", on_progress=update)
    print_text(f"Report: {page}")

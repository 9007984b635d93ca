"""``ctta report``: a page from one run or several."""

from pathlib import Path
from typing import Annotated

import typer

from ctta.cli.console import out
from ctta.report import write_report


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders that 'ctta bench' wrote; several compare on one page.")
    ],
    to: Annotated[Path | None, typer.Option("--out", help="By default report/ in the first folder.")] = None,
) -> None:
    """Write the tables and pictures of runs: one HTML page, Markdown, LaTeX, CSV, PNG and SVG."""
    out.print(f"Report: {write_report(folders, to or folders[0] / 'report')}", soft_wrap=True)

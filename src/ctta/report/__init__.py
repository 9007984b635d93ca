"""Results in, tables, pictures and a page out.

:func:`write_report` makes everything; :func:`ctta.report.tables.score_table` gives a table to draw elsewhere, and needs
no extra.
"""

from collections.abc import Sequence
from pathlib import Path

from ctta.report.tables import Cell, Column, Row, Table, score_table

__all__ = ["Cell", "Column", "Row", "Table", "score_table", "write_report"]


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write report.html, report.md, table.tex, table.csv and the pictures of one or more runs into a folder.

    Runs of the same protocol share a table, with a group of rows each. Results that did not see the same batches never
    do. Cells that are not complete are listed, and are in no table.

    Args:
        runs: folders that a benchmark wrote.
        out: the folder to write to; made if need be.

    Returns:
        The path of the HTML page.
    """
    try:
        from ctta.report.writing import write
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ctta"):
            raise
        raise ImportError("reports need the extra 'bench': pip install 'ctta[bench]'") from error
    return write(runs, Path(out))

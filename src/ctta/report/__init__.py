"""Reports on benchmark runs and evaluations: tables, plots, and one HTML page.

:func:`write_report` writes everything and needs the extra ``bench``. :func:`score_table` returns a table to render
elsewhere and needs no extra.
"""

from ctta.report.runs import RecordedRun, read_runs
from ctta.report.score_tables import score_table
from ctta.report.tables import Table, TableCell, TableColumn, TableRow
from ctta.report.writer import write_report

__all__ = [
    "RecordedRun",
    "Table",
    "TableCell",
    "TableColumn",
    "TableRow",
    "read_runs",
    "score_table",
    "write_report",
]

"""Reports on benchmark runs and evaluations: tables, plots, and one HTML page.

:func:`write_report` writes everything and needs the extra ``bench``. :func:`score_table` returns a table to render
elsewhere and needs no extra.
"""

from ctta.benchmark.report.matrix import Matrix, MatrixCell, MatrixProtocol, read_matrix
from ctta.benchmark.report.runs import RecordedRun, read_runs
from ctta.benchmark.report.score_tables import score_table
from ctta.benchmark.report.tables import Table, TableCell, TableColumn, TableRow
from ctta.benchmark.report.writer import write_matrix, write_report

__all__ = [
    "Matrix",
    "MatrixCell",
    "MatrixProtocol",
    "RecordedRun",
    "Table",
    "TableCell",
    "TableColumn",
    "TableRow",
    "read_matrix",
    "read_runs",
    "score_table",
    "write_matrix",
    "write_report",
]

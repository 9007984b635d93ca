"""The tables of the robustness matrix, and the sentences that answer which method to use."""

from collections.abc import Callable
from math import inf, nan
from statistics import fmean

from ctta.benchmark.report.matrix import Matrix, MatrixCell, MatrixProtocol
from ctta.benchmark.report.tables import Table, TableCell, TableColumn, TableRow
from ctta.evaluation.display import format_range, join_names

SOURCE = "Source"


def build_difference_table(matrix: Matrix) -> Table:
    """Return the error above Source, in points, with the mean and the worst over the protocols."""

    def make_cell(cell: MatrixCell) -> TableCell:
        note = format_range(cell.interval) if cell.interval else "too few batches"
        return TableCell(100 * cell.above_source, note=note, is_signed=True, verdict=cell.verdict)

    table = _build(matrix, matrix.methods, make_cell, "Error above Source in points, with its 95 % interval")
    rows = []
    for row in table.rows:
        values = [cell.above_source for cell in matrix.row(row.label).values()]
        ends = [TableCell(100 * value, is_signed=True) for value in (fmean(values), max(values))]
        rows.append(TableRow(row.label, row.run, row.num_results, (*row.cells, *ends)))
    columns = (*table.columns, TableColumn("mean", "mean", None), TableColumn("worst", "worst", None))
    return Table(columns, tuple(rows), table.caption)


def build_error_table(matrix: Matrix) -> Table:
    """Return the error in percent; the lowest of a protocol is marked where its lead is more than noise."""
    table = _build(matrix, (SOURCE, *matrix.methods), lambda cell: TableCell(100 * cell.error), "Error in percent")
    best = {each.name: each.best[0] for each in matrix.protocols if len(each.best) == 1}
    rows = []
    for row in table.rows:
        marked = [
            TableCell(cell.value, is_best=best.get(column.key) == row.label)
            for column, cell in zip(table.columns, row.cells, strict=True)
        ]
        rows.append(TableRow(row.label, row.run, row.num_results, tuple(marked)))
    return Table(table.columns, tuple(rows), table.caption)


def build_time_table(matrix: Matrix) -> Table:
    """Return the milliseconds per image."""
    caption = "Milliseconds per image to predict and adapt"
    return _build(matrix, (SOURCE, *matrix.methods), lambda cell: TableCell(cell.ms_per_image, decimals=2), caption)


def build_recurrence_table(matrix: Matrix) -> Table | None:
    """Return first and last visit, drift and time to harm where domains come back; None if they never do."""
    protocols = [protocol for protocol in matrix.protocols if protocol.num_visits > 1]
    if not protocols:
        return None
    columns = [
        TableColumn(f"{protocol.name}: {key}", f"{protocol.name}: {name}", None)
        for protocol in protocols
        for key, name in (
            ("first", "visit 1"),
            ("last", f"visit {protocol.num_visits}"),
            ("drift", "drift"),
            ("time_to_harm", "harm from visit"),
        )
    ]
    rows = []
    for label in (SOURCE, *matrix.methods):
        cells = [cell for protocol in protocols for cell in _build_visit_cells(label, protocol)]
        rows.append(TableRow(label, "", _count_results(matrix, label), tuple(cells)))
    return Table(tuple(columns), tuple(rows), "Streams whose domains come back: error in percent, drift in points")


def _build_visit_cells(label: str, protocol: MatrixProtocol) -> list[TableCell]:
    cell = protocol.cells.get(label)
    if cell is None:
        return [TableCell(nan)] * 4
    first, last = cell.visit_errors[0], cell.visit_errors[-1]
    harm = nan if label == SOURCE else (cell.time_to_harm or inf)
    return [
        TableCell(100 * first),
        TableCell(100 * last),
        TableCell(100 * (last - first), is_signed=True, note=format_range(cell.drift) if cell.drift else ""),
        TableCell(harm, decimals=0, verdict="worse" if cell.time_to_harm else None),
    ]


def write_advice(matrix: Matrix) -> list[str]:
    """Return what the numbers say about the choice of a method, one sentence each.

    Args:
        matrix: The numbers, of at least one protocol.

    Returns:
        Which methods are never above Source, which has the lowest error on average, and which on each protocol.
    """
    complete = [method for method in matrix.methods if len(matrix.row(method)) == len(matrix.protocols)]
    where = (
        f"on all {len(matrix.protocols)} protocols" if len(matrix.protocols) > 1 else f"on {matrix.protocols[0].name}"
    )
    if not complete:
        return [f"No method is complete {where} yet."]
    verdicts = {method: {cell.verdict for cell in matrix.row(method).values()} for method in complete}
    better = [method for method in complete if verdicts[method] == {"better"}]
    known = [method for method in complete if all(cell.interval for cell in matrix.row(method).values())]
    harmless = [method for method in known if "worse" not in verdicts[method] and method not in better]
    sentences = [f"Below Source by more than noise {where}: {join_names(better) or 'no method'}."]
    if harmless:
        sentences.append(f"Never above Source by more than noise: {join_names(harmless)}.")
    first = complete[0]
    row = matrix.row(first)
    mean, worst = fmean(cell.above_source for cell in row.values()), max(row, key=lambda name: row[name].above_source)
    if len(row) > 1:
        sentences.append(
            f"{first} has the lowest mean error over the protocols, {_describe_difference(mean)} Source; its worst is "
            f"{worst}, {_describe_difference(row[worst].above_source)} Source."
        )
    return [*sentences, _describe_best(matrix)]


def _describe_best(matrix: Matrix) -> str:
    """Return which method is best where by more than noise, such as 'EATA on continual and mixed, LAME on sorted'."""
    found: dict[str, list[str]] = {}
    for protocol in matrix.protocols:
        if len(protocol.best) == 1:
            found.setdefault(protocol.best[0], []).append(protocol.name)
    leads = "; ".join(f"{method} on {', '.join(names)}" for method, names in found.items())
    sentence = f"The lowest error by more than noise: {leads or 'no method on any protocol'}."
    num_close = len(matrix.protocols) - sum(map(len, found.values()))
    if num_close == 1:
        where = "the other protocol" if leads else "1 protocol"
    else:
        where = f"{'the other ' if leads else ''}{num_close} protocols"
    close = f" On {where}, the best ones are within noise of each other."
    return sentence + (close if num_close else "")


def _describe_difference(difference: float) -> str:
    points = round(100 * difference, 1)
    return f"{abs(points):.1f} points {'above' if points > 0 else 'below'}" if points else "equal to"


def _build(
    matrix: Matrix, labels: tuple[str, ...], make_cell: Callable[[MatrixCell], TableCell], caption: str
) -> Table:
    """Return a table with a row per method and a column per protocol."""
    rows = []
    for label in labels:
        row = matrix.row(label)
        cells = [make_cell(row[each.name]) if each.name in row else TableCell(nan) for each in matrix.protocols]
        rows.append(TableRow(label, "", _count_results(matrix, label), tuple(cells)))
    columns = tuple(TableColumn(each.name, each.name, short_name=each.name) for each in matrix.protocols)
    return Table(columns, tuple(rows), caption)


def _count_results(matrix: Matrix, label: str) -> int:
    return max(cell.num_results for cell in matrix.row(label).values())

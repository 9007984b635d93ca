"""Tables before anybody draws them: numbers, deviations, best marks and published numbers, each where it belongs.

>>> cell = Cell(16.23, deviation=0.12, published=16.2)
>>> cell.text, cell.deviation_text, cell.difference_text
('16.2', '0.1', '+0.0')
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from ctta.report.entries import Entry, entries_of, same_batches
from ctta.report.layout import Layout, layout_of, spoken
from ctta.report.published import PublishedRow, PublishedTable
from ctta.report.reference import published_table
from ctta.results import Result

NUM_DIGITS = 6  # after the point; what is beyond is float arithmetic, which would print 21.35 as 21.3


@dataclass(frozen=True)
class Cell:
    """One number, with everything a renderer may want to put beside it."""

    value: float
    deviation: float | None = None  # sample standard deviation; None for a single result
    published: float | None = None
    published_deviation: float | None = None
    best: bool = False
    decimals: int = 1
    remark: str = ""  # in words, such as the name of the worst domain

    @property
    def text(self) -> str:
        return f"{round(self.value, NUM_DIGITS):.{self.decimals}f}"

    @property
    def deviation_text(self) -> str:
        return "" if self.deviation is None else f"{self.deviation:.{self.decimals}f}"

    @property
    def published_text(self) -> str:
        return "" if self.published is None else f"{self.published:.{self.decimals}f}"

    @property
    def difference(self) -> float | None:
        """Of the numbers as printed, so that a reader can check it."""
        if self.published is None:
            return None
        return round(float(self.text) - self.published, self.decimals) + 0.0  # never -0.0

    @property
    def difference_text(self) -> str:
        return "" if self.difference is None else f"{self.difference:+.{self.decimals}f}"


@dataclass(frozen=True)
class Column:
    key: str  # as the stream calls it
    name: str  # as a head prints it
    lower_is_better: bool = True


@dataclass(frozen=True)
class Row:
    label: str
    run: str
    count: int  # of results that the cells are means of
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """Methods down, columns across; the cells of a row and the columns pair up."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    caption: str
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.run for row in self.rows))

    @property
    def has_published(self) -> bool:
        return any(cell.published is not None for row in self.rows for cell in row.cells)

    @property
    def has_published_columns(self) -> bool:
        """Whether more than the mean was published."""
        return any(cell.published is not None for row in self.rows for cell in row.cells[:-1])


def error_table(results: Sequence[Result]) -> Table:
    """The paper's table: domains (or rounds, or kinds of corruption) across, methods down, the mean last.

    Results that are not complete are left out, and a note says so. Results that saw different batches under the same
    order do not belong in one table: they raise a ValueError.
    """
    complete = [result for result in results if result.is_complete]
    if not complete:
        raise ValueError(f"a table needs at least one complete result, got {len(results)} that are not complete")
    if not same_batches(complete):
        raise ValueError("these results did not see the same batches: they are not comparable, give each its own table")
    table = error_table_of(entries_of(complete))
    left_out = [f"{result.method}: left out, not complete" for result in results if not result.is_complete]
    return replace(table, notes=(*table.notes, *left_out))


def error_table_of(entries: Sequence[Entry]) -> Table:
    """The same for rows of several runs."""
    layout = layout_of([result.domains for entry in entries for result in entry.results])
    columns = [Column(column, layout.name(column)) for column in layout.columns]
    published, notes = published_table(entries, layout)
    rows = [_error_row(entry, layout, published) for entry in entries]
    caption = f"Error in percent; {layout.describe()}"
    return Table((*columns, Column("mean", "mean")), mark_best(rows, [True] * (len(columns) + 1)), caption, notes)


def _error_row(entry: Entry, layout: Layout, published: PublishedTable | None) -> Row:
    reference = published.rows.get(entry.method) if published else None
    per_result = [column_errors(result, layout) for result in entry.results]
    cells = [_measured([errors[column] for errors in per_result]) for column in layout.columns]
    if reference and layout.by == "domain":
        numbers = reference.by_corruption()
        kinds = [column.split(" ")[0] for column in layout.columns]
        cells = [replace(cell, published=numbers.get(kind)) for cell, kind in zip(cells, kinds, strict=True)]
    mean = _measured([100 * result.error for result in entry.results])
    return Row(entry.label, entry.run, len(entry.results), (*cells, _with_mean(mean, reference)))


def _with_mean(cell: Cell, reference: PublishedRow | None) -> Cell:
    if reference is None:
        return cell
    return replace(cell, published=reference.mean, published_deviation=reference.deviation)


def column_errors(result: Result, layout: Layout) -> dict[str, float]:
    """The mean error of each column's segments, in percent."""
    gathered: dict[str, list[float]] = {column: [] for column in layout.columns}
    for number, (domain, error) in enumerate(zip(result.domains, result.errors, strict=True)):
        gathered[layout.column_of(number, domain)].append(100 * error)
    return {column: fmean(errors) for column, errors in gathered.items()}


def summary_table_of(entries: Sequence[Entry]) -> Table:
    """What a method costs and how far its confidence can be trusted, beside its error."""
    columns: list[tuple[Column, Callable[[Result], float], int]] = [
        (Column("error", "error %"), lambda result: 100 * result.error, 1),
        (Column("calibration_error", "ECE %"), lambda result: 100 * result.calibration_error, 1),
        (Column("ms_per_image", "ms per image"), lambda result: 1000 * result.seconds / result.total.count, 2),
    ]
    rows = []
    for entry in entries:
        cells = [_measured([figure(result) for result in entry.results], digits) for _column, figure, digits in columns]
        memory = Cell(max(result.peak_mib for result in entry.results), decimals=0)
        skipped = sum(result.num_skipped for result in entry.results)
        num_batches = sum(result.num_batches for result in entry.results)
        updates = Cell(skipped, decimals=0, remark=f"of {num_batches}" if skipped else "")
        rows.append(Row(entry.label, entry.run, len(entry.results), (*cells, memory, _worst(entry), updates)))
    names = (
        *(column for column, _figure, _digits in columns),
        Column("peak_mib", "peak memory MiB"),
        Column("worst", "worst domain, error %"),
        Column("skipped", "skipped updates"),
    )
    return Table(names, mark_best(rows, [True, True, True, True, True, False]), "Calibration, cost and worst domain")


def _worst(entry: Entry) -> Cell:
    """The domain with the highest error; in a stream that repeats itself, also the round it was in."""
    layout = layout_of([entry.results[0].domains])
    gathered: dict[str, list[float]] = {}
    for result in entry.results:
        for number, (domain, error) in enumerate(zip(result.domains, result.errors, strict=True)):
            place = f"{domain}, {layout.column_of(number, domain)}" if layout.by == "round" else domain
            gathered.setdefault(place, []).append(100 * error)
    worst = max(gathered, key=lambda place: fmean(gathered[place]))
    return replace(_measured(gathered[worst]), remark=spoken(worst), deviation=None)


def _measured(values: Sequence[float], decimals: int = 1) -> Cell:
    return Cell(fmean(values), stdev(values) if len(values) > 1 else None, decimals=decimals)


def mark_best(rows: Sequence[Row], columns: Sequence[bool]) -> tuple[Row, ...]:
    """The lowest number of each column as printed, ties included; nothing is best where all are equal."""
    marked = [list(row.cells) for row in rows]
    for number, compared in enumerate(columns):
        printed = {float(row.cells[number].text) for row in rows}
        for cells in marked:
            best = compared and len(printed) > 1 and float(cells[number].text) == min(printed)
            cells[number] = replace(cells[number], best=best)
    return tuple(replace(row, cells=tuple(cells)) for row, cells in zip(rows, marked, strict=True))

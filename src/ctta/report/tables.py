"""Tables before anybody draws them: numbers, deviations, best marks and published numbers, each where it belongs.

>>> cell = Cell(16.23, deviation=0.12, published=16.2)
>>> cell.text, cell.deviation_text, cell.difference_text
('16.2', '0.1', '+0.0')
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from statistics import fmean, stdev
from typing import Literal

from ctta.evaluation.results import Result
from ctta.report.entries import Entry, entries_of, same_batches
from ctta.report.layout import Layout, layout_of
from ctta.report.published import PublishedRow, PublishedTable
from ctta.report.reference import published_table

NUM_DIGITS = 6  # after the point; what is beyond is float arithmetic, which would print 21.35 as 21.3
NO_NUMBER = "\N{EN DASH}"


@dataclass(frozen=True)
class Cell:
    """One number, with everything a renderer may want to put beside it; nan where there is none."""

    value: float
    deviation: float | None = None  # sample standard deviation; None for a single result
    published: float | None = None
    published_deviation: float | None = None
    best: bool = False
    decimals: int = 1
    remark: str = ""  # in words, such as the name of the worst domain

    @property
    def text(self) -> str:
        return NO_NUMBER if isnan(self.value) else f"{round(self.value, NUM_DIGITS):.{self.decimals}f}"

    @property
    def deviation_text(self) -> str:
        return "" if self.deviation is None else f"{self.deviation:.{self.decimals}f}"

    @property
    def published_text(self) -> str:
        return "" if self.published is None else f"{self.published:.{self.decimals}f}"

    @property
    def difference(self) -> float | None:
        """Of the numbers as printed, so that a reader can check it."""
        if self.published is None or isnan(self.value):
            return None
        return round(float(self.text) - self.published, self.decimals) + 0.0  # never -0.0

    @property
    def difference_text(self) -> str:
        return "" if self.difference is None else f"{self.difference:+.{self.decimals}f}"


@dataclass(frozen=True)
class Column:
    key: str  # as the stream calls it
    name: str  # as a head prints it
    best: Literal["lowest", "highest"] | None = "lowest"  # None where numbers are not compared
    short_name: str = ""  # for a narrow head, where its first letters would not do


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


def score_table(results: Sequence[Result]) -> Table:
    """The paper's table: domains (or rounds, or kinds of corruption) across, methods down, the mean last.

    The numbers are errors where the results are of images, and mIoU where they are of pixels. Results that are not
    complete are left out, and a note says so. Results that saw different batches under the same order do not belong in
    one table: they raise a ValueError.
    """
    complete = [result for result in results if result.is_complete]
    if not complete:
        raise ValueError(f"a table needs at least one complete result, got {len(results)} that are not complete")
    if not same_batches(complete):
        raise ValueError("these results did not see the same batches: they are not comparable, give each its own table")
    table = score_table_of(entries_of(complete))
    left_out = [f"{result.method}: left out, not complete" for result in results if not result.is_complete]
    return replace(table, notes=(*table.notes, *left_out))


def score_table_of(entries: Sequence[Entry]) -> Table:
    """The same for rows of several runs."""
    measure = entries[0].results[0].metric
    layout = layout_of([result.domains for entry in entries for result in entry.results])
    columns = [
        Column(column, layout.name(column), measure.best, layout.short_name(column)) for column in layout.columns
    ]
    columns.append(Column("mean", "mean", measure.best))
    published, notes = published_table(entries, layout)
    rows = [_score_row(entry, layout, published) for entry in entries]
    caption = f"{measure.title} in percent; {layout.describe()}"
    return Table(tuple(columns), mark_best(rows, columns), caption, notes)


def _score_row(entry: Entry, layout: Layout, published: PublishedTable | None) -> Row:
    reference = published.rows.get(entry.method) if published else None
    per_result = [column_values(result, layout) for result in entry.results]
    cells = [measured([values[column] for values in per_result]) for column in layout.columns]
    if reference and layout.by.startswith("domain"):
        keys = [column if layout.repeats else column.split(" ")[0] for column in layout.columns]
        cells = [replace(cell, published=reference.columns.get(key)) for cell, key in zip(cells, keys, strict=True)]
    mean = measured([100 * result.value for result in entry.results])
    return Row(entry.label, entry.run, len(entry.results), (*cells, _with_mean(mean, reference)))


def _with_mean(cell: Cell, reference: PublishedRow | None) -> Cell:
    if reference is None:
        return cell
    return replace(cell, published=reference.mean, published_deviation=reference.deviation)


def column_values(result: Result, layout: Layout) -> dict[str, float]:
    """The mean figure of each column's segments, in percent."""
    gathered: dict[str, list[float]] = {column: [] for column in layout.columns}
    for number, (domain, value) in enumerate(zip(result.domains, result.values, strict=True)):
        if column := layout.column_of(number, domain):
            gathered[column].append(100 * value)
    return {column: fmean(values) for column, values in gathered.items()}


def measured(values: Sequence[float | None], decimals: int = 1) -> Cell:
    """The mean of several results and their deviation; those that have no such number are left out."""
    known = [value for value in values if value is not None]
    if not known:
        return Cell(nan, decimals=decimals)
    return Cell(fmean(known), stdev(known) if len(known) > 1 else None, decimals=decimals)


def mark_best(rows: Sequence[Row], columns: Sequence[Column]) -> tuple[Row, ...]:
    """The best number of each column as printed, ties included; nothing is best where all are equal."""
    marked = [list(row.cells) for row in rows]
    for number, column in enumerate(columns):
        printed = {float(row.cells[number].text) for row in rows if not isnan(row.cells[number].value)}
        if column.best is None or len(printed) < 2:
            continue
        best = min(printed) if column.best == "lowest" else max(printed)
        for cells in marked:
            is_best = not isnan(cells[number].value) and float(cells[number].text) == best
            cells[number] = replace(cells[number], best=is_best)
    return tuple(replace(row, cells=tuple(cells)) for row, cells in zip(rows, marked, strict=True))

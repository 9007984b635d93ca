"""The table model that all renderers share: numbers, deviations, marks for the best, and published numbers.

>>> cell = TableCell(16.23, deviation=0.12, published=16.2)
>>> cell.text, cell.deviation_text, cell.difference_text
('16.2', '0.1', '+0.0')
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf, isnan, nan
from statistics import fmean, stdev
from typing import Literal

from ctta.evaluation.robustness import Verdict

NUM_DIGITS = 6  # decimals kept before formatting; floating-point noise beyond them would print 21.35 as 21.3
NO_NUMBER = "\N{EN DASH}"
NEVER = "never"
#: Symbols beside the colors of a verdict: the error is below that of the source network, or above it.
MARKS: dict[Verdict | None, str] = {
    "better": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "worse": "\N{BLACK UP-POINTING TRIANGLE}",
}


@dataclass(frozen=True)
class TableCell:
    """One number, with what a renderer may show next to it.

    Attributes:
        value: The number; nan if there is none, and infinity for the time of what never happens.
        deviation: Sample standard deviation; None for a single result.
        published: Published number, if there is one.
        published_deviation: Published standard deviation, if there is one.
        is_best: Whether this is the best number of its column, by more than noise.
        decimals: Number of decimals to print.
        note: Text to add, such as the name of the worst domain.
        is_signed: Whether to print the sign also of positive numbers, as of differences.
        verdict: How the number compares with that of the source network, if the table says so.
    """

    value: float
    deviation: float | None = None
    published: float | None = None
    published_deviation: float | None = None
    is_best: bool = False
    decimals: int = 1
    note: str = ""
    is_signed: bool = False
    verdict: Verdict | None = None

    @property
    def text(self) -> str:
        """The number as printed."""
        if isnan(self.value) or isinf(self.value):
            return NEVER if isinf(self.value) else NO_NUMBER
        number = round(round(self.value, NUM_DIGITS), self.decimals) + 0.0  # never -0.0
        if self.is_signed:
            return f"{number:+.{self.decimals}f}".replace("-", "\N{MINUS SIGN}")
        return f"{number:.{self.decimals}f}"

    @property
    def mark(self) -> str:
        """The symbol of the verdict; empty if there is none."""
        return MARKS.get(self.verdict, "")

    @property
    def deviation_text(self) -> str:
        """The deviation as printed; empty if there is none."""
        return "" if self.deviation is None else f"{self.deviation:.{self.decimals}f}"

    @property
    def published_text(self) -> str:
        """The published number as printed; empty if there is none."""
        return "" if self.published is None else f"{self.published:.{self.decimals}f}"

    @property
    def difference(self) -> float | None:
        """The printed number minus the published one, so that readers can verify it."""
        if self.published is None or isnan(self.value):
            return None
        return round(float(self.text) - self.published, self.decimals) + 0.0  # never -0.0

    @property
    def difference_text(self) -> str:
        """The difference as printed, with its sign; empty if there is none."""
        return "" if self.difference is None else f"{self.difference:+.{self.decimals}f}"


@dataclass(frozen=True)
class TableColumn:
    """A column of a table.

    Attributes:
        key: Identifier, such as the domain as the stream names it.
        name: Heading.
        best: Which number is the best one; None if the numbers are not compared.
        short_name: Heading for narrow tables, if the first letters of `name` would be ambiguous.
    """

    key: str
    name: str
    best: Literal["lowest", "highest"] | None = "lowest"
    short_name: str = ""


@dataclass(frozen=True)
class TableRow:
    """A row of a table: one method of one run.

    Attributes:
        label: Name of the method.
        run: Name of the run.
        num_results: Number of results that the cells are means over.
        cells: One cell per column.
    """

    label: str
    run: str
    num_results: int
    cells: tuple[TableCell, ...]


@dataclass(frozen=True)
class Table:
    """A table with one row per method.

    Attributes:
        columns: Columns, from left to right.
        rows: Rows, from top to bottom.
        caption: What the table shows.
        notes: What a reader must know, one sentence each.
    """

    columns: tuple[TableColumn, ...]
    rows: tuple[TableRow, ...]
    caption: str
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs."""
        return tuple(dict.fromkeys(row.run for row in self.rows))

    @property
    def has_published(self) -> bool:
        """Whether any cell has a published number."""
        return any(cell.published is not None for row in self.rows for cell in row.cells)

    @property
    def has_published_columns(self) -> bool:
        """Whether any cell besides the mean has a published number."""
        return any(cell.published is not None for row in self.rows for cell in row.cells[:-1])


def average(values: Sequence[float | None], decimals: int = 1) -> TableCell:
    """Return a cell with the mean and deviation of the values that are not None."""
    known = [value for value in values if value is not None]
    if not known:
        return TableCell(nan, decimals=decimals)
    return TableCell(fmean(known), stdev(known) if len(known) > 1 else None, decimals=decimals)

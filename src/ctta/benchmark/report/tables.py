"""The table model that all renderers share, and the layout of columns by domain, round or corruption.

>>> cell = TableCell(16.23, deviation=0.12, published=16.2)
>>> cell.text, cell.deviation_text, cell.difference_text
('16.2', '0.1', '+0.0')
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf, isnan, nan
from statistics import fmean, stdev
from typing import Literal

from ctta.data.streams.sequences import corruption_order
from ctta.evaluation.display import NO_NUMBER, NUM_DIGITS
from ctta.evaluation.intervals import Verdict

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


def average(values: Sequence[float], decimals: int = 1) -> TableCell:
    """Return a cell with the mean and deviation of the values that are not nan."""
    known = [value for value in values if not isnan(value)]
    if not known:
        return TableCell(nan, decimals=decimals)
    return TableCell(fmean(known), stdev(known) if len(known) > 1 else None, decimals=decimals)


PAIR = " + "  # between two corruptions of one domain
MAX_COLUMNS = 20  # streams with more domains are grouped by round or by corruption
MAX_ROUNDS = 4  # rounds whose domains have a column each; of ten these are 1, 4, 7 and 10, as in the paper


@dataclass(frozen=True)
class ColumnLayout:
    """The mapping of the segments of a stream to columns."""

    by: Literal["domain", "round", "domain and round", "corruption"]
    columns: tuple[str, ...]  # keys, as the stream names its domains
    period: int  # segments of a round, or of the whole stream
    num_rounds: int = 1

    @property
    def is_repeating(self) -> bool:
        """Whether the stream has several rounds."""
        return self.num_rounds > 1

    def name_round(self, segment: int) -> str:
        """Return the name of the round that a segment belongs to."""
        return f"round {segment // self.period + 1}"

    def name_segment(self, segment: int, domain: str) -> str:
        """Return the domain of a segment, with its round if there are several."""
        return f"{domain}, {self.name_round(segment)}" if self.is_repeating else domain

    def find_column(self, segment: int, domain: str) -> str | None:
        """Return the column that a segment counts toward, or None if its round has no columns."""
        if self.by == "corruption":
            corruption = strip_severity(domain)
            return corruption if corruption in self.columns else corruption.partition(PAIR)[0]
        column = self.name_round(segment) if self.by == "round" else self.name_segment(segment, domain)
        return column if column in self.columns else None

    def format_heading(self, column: str) -> str:
        """Return the heading of a column, without underscores and without a severity that all columns share."""
        domain, comma, number = column.partition(", round ")
        severities = {parse_severity(other.partition(", round ")[0]) for other in self.columns}
        is_shared = self.by.startswith("domain") and len(severities) == 1
        return replace_underscores(f"{strip_severity(domain) if is_shared else domain}{comma}{number}")

    def format_short_heading(self, column: str) -> str:
        """Return a short heading, or an empty string if a renderer may abbreviate the heading freely."""
        if PAIR in column:
            return "+".join(f"{part[:3]}{parse_severity(part)}" for part in column.split(PAIR))
        return self.format_heading(column).replace(", round ", " ") if self.by == "domain and round" else ""

    def describe(self) -> str:
        """Return what a column stands for, as part of a caption; empty if its heading says it all."""
        if self.by == "round":
            return f"each round is the mean of its {self.period} segments" if self.period > 1 else ""
        if self.by == "domain and round":
            *others, last = (str(number) for number in select_rounds(self.num_rounds))
            return f"each domain in rounds {', '.join(others)} and {last}, and the mean of all {self.num_rounds} rounds"
        if self.by == "corruption":
            kind = "pair of corruptions" if any(PAIR in column for column in self.columns) else "corruption"
            return f"each column is the mean over all segments of a {kind}"
        severities = {parse_severity(column) for column in self.columns} - {""}
        return f"severity {severities.pop()}" if len(severities) == 1 else "one column per segment"


def strip_severity(domain: str) -> str:
    """Return a domain without severities: 'fog' for 'fog 5', 'fog + snow' for 'fog 2.25 + snow 1.5'."""
    return re.sub(r" \d+(\.\d+)?(?=$| \+ )", "", domain)


def parse_severity(domain: str) -> str:
    """Return the severity of a domain: '5' for 'fog 5', and an empty string for 'fog' and for two corruptions."""
    return "" if PAIR in domain else domain[len(strip_severity(domain)) :].strip()


def replace_underscores(name: str) -> str:
    """Return a name with spaces in place of underscores."""
    return name.replace("_", " ")


def infer_layout(streams: Sequence[tuple[str, ...]]) -> ColumnLayout:
    """Return the columns for streams with the same domains, in the streams' order if they all have the same one.

    >>> infer_layout([("fog 5", "snow 5")]).columns, infer_layout([("fog 5", "snow 5"), ("snow 5", "fog 5")]).columns
    (('fog 5', 'snow 5'), ('snow 5', 'fog 5'))
    >>> infer_layout([("fog", "snow", "fog", "snow")]).columns
    ('fog, round 1', 'snow, round 1', 'fog, round 2', 'snow, round 2')
    """
    first = streams[0]
    period = find_period(first)
    if period < len(first):
        return _layout_rounds(first[:period], len(first) // period)
    domains = tuple(dict.fromkeys(domain for stream in streams for domain in stream))
    corruptions = tuple(dict.fromkeys(strip_severity(domain) for domain in domains))
    if len(set(streams)) > 1:
        domains, corruptions = _sort_columns(domains), _sort_columns(corruptions)
    if len(domains) == len(first) <= MAX_COLUMNS:
        return ColumnLayout("domain", domains, period)
    if len(corruptions) > MAX_COLUMNS:  # of many pairs, one column for each first corruption
        corruptions = tuple(dict.fromkeys(each.partition(PAIR)[0] for each in corruptions))
    return ColumnLayout("corruption", corruptions, period)


def select_rounds(num_rounds: int) -> list[int]:
    """Return the rounds to show: the first, the last, and evenly spaced ones between them.

    >>> select_rounds(10), select_rounds(3)
    ([1, 4, 7, 10], [1, 2, 3])
    """
    num_shown = min(num_rounds, MAX_ROUNDS)
    return [1 + round(place * (num_rounds - 1) / (num_shown - 1)) for place in range(num_shown)]


def find_period(domains: Sequence[str]) -> int:
    """Return the number of segments after which a stream repeats itself; its length if it does not."""
    count = len(domains)
    candidates = (period for period in range(1, count + 1) if count % period == 0)
    return next(period for period in candidates if list(domains) == list(domains[:period]) * (count // period))


def _layout_rounds(domains: Sequence[str], num_rounds: int) -> ColumnLayout:
    period = len(domains)
    columns = tuple(f"{domain}, round {number}" for number in select_rounds(num_rounds) for domain in domains)
    if period > 1 and len(set(columns)) == len(columns) <= MAX_COLUMNS:
        return ColumnLayout("domain and round", columns, period, num_rounds)
    return ColumnLayout("round", tuple(f"round {number + 1}" for number in range(num_rounds)), period, num_rounds)


def _sort_columns(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return corruptions in their standard order; if there are other domains, in the order of the stream.

    >>> _sort_columns(("fog", "night", "rain", "snow"))    # fog and snow are corruptions too
    ('fog', 'night', 'rain', 'snow')
    """
    ranks = {corruption: rank for rank, corruption in enumerate(corruption_order(None))}
    if not all(strip_severity(column) in ranks for column in columns):
        return columns
    return tuple(sorted(columns, key=lambda column: ranks[strip_severity(column)]))

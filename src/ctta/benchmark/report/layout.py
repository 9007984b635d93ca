"""The columns of a table: one per domain, per round, per domain in selected rounds, or per corruption."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ctta.data.streams.orders import corruption_order

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

"""Which columns a table has: one for each domain, for each round, for each domain in some rounds, or for each kind."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ctta.streams.orders import corruption_order

MOST_COLUMNS = 20  # more domains than this are gathered, by round or by kind
MOST_ROUNDS = 4  # whose domains have a column each; of ten these are 1, 4, 7 and 10, as in the paper


@dataclass(frozen=True)
class Layout:
    """How the segments of a stream become columns."""

    by: Literal["domain", "round", "domain in rounds", "kind"]
    columns: tuple[str, ...]  # as the stream calls them
    period: int  # segments of a round, or of the whole stream
    num_rounds: int = 1

    @property
    def repeats(self) -> bool:
        return self.num_rounds > 1

    def round_of(self, segment: int) -> str:
        return f"round {segment // self.period + 1}"

    def place_of(self, segment: int, domain: str) -> str:
        """A segment's domain, and its round where there are several."""
        return f"{domain}, {self.round_of(segment)}" if self.repeats else domain

    def column_of(self, segment: int, domain: str) -> str | None:
        """The column that a segment counts towards; None for one of a round that has no columns."""
        if self.by == "kind":
            return kind_of(domain)
        column = self.round_of(segment) if self.by == "round" else self.place_of(segment, domain)
        return column if column in self.columns else None

    def name(self, column: str) -> str:
        """The column as its head prints it: without a severity that is the same for all, without underscores."""
        domain, comma, which = column.partition(", round ")
        severities = {severity_of(other.partition(", round ")[0]) for other in self.columns}
        shown = kind_of(domain) if self.by.startswith("domain") and len(severities) == 1 else domain
        return spoken(f"{shown}{comma}{which}")

    def short_name(self, column: str) -> str:
        """The same for where there is little room; empty if a renderer may shorten it as it likes."""
        return self.name(column).replace(", round ", " ") if self.by == "domain in rounds" else ""

    def describe(self) -> str:
        """What a column is, for the caption."""
        if self.by == "round":
            return f"each round is the mean of its {self.period} segments"
        if self.by == "domain in rounds":
            *others, last = (str(number) for number in shown_rounds(self.num_rounds))
            return f"each domain in rounds {', '.join(others)} and {last}, and the mean of all {self.num_rounds} rounds"
        if self.by == "kind":
            return "each column is the mean over all segments of its kind"
        severities = {severity_of(column) for column in self.columns} - {""}
        return f"severity {severities.pop()}" if len(severities) == 1 else "one column for each segment"


def kind_of(domain: str) -> str:
    """'fog' of 'fog 5'."""
    return re.sub(r" \d+$", "", domain)


def severity_of(domain: str) -> str:
    """'5' of 'fog 5', nothing of 'fog'."""
    return domain[len(kind_of(domain)) :].strip()


def spoken(name: str) -> str:
    return name.replace("_", " ")


def layout_of(streams: Sequence[tuple[str, ...]]) -> Layout:
    """The columns for streams that go through the same domains, perhaps in different orders.

    >>> layout_of([("fog 5", "snow 5")] ).columns, layout_of([("fog", "snow", "fog", "snow")]).columns
    (('snow 5', 'fog 5'), ('fog, round 1', 'snow, round 1', 'fog, round 2', 'snow, round 2'))
    """
    first = streams[0]
    period = period_of(first)
    if period < len(first):
        return _layout_of_rounds(first[:period], len(first) // period)
    domains = tuple(dict.fromkeys(domain for stream in streams for domain in stream))
    if len(domains) == len(first) <= MOST_COLUMNS:
        return Layout("domain", _sorted(domains), period)
    return Layout("kind", _sorted(tuple(dict.fromkeys(kind_of(domain) for domain in domains))), period)


def _layout_of_rounds(domains: Sequence[str], num_rounds: int) -> Layout:
    period, shown = len(domains), shown_rounds(num_rounds)
    columns = tuple(f"{domain}, round {number}" for number in shown for domain in domains)
    if period > 1 and len(set(columns)) == len(columns) <= MOST_COLUMNS:
        return Layout("domain in rounds", columns, period, num_rounds)
    return Layout("round", tuple(f"round {number + 1}" for number in range(num_rounds)), period, num_rounds)


def shown_rounds(count: int) -> list[int]:
    """The first, the last, and those at equal distances between them.

    >>> shown_rounds(10), shown_rounds(3)
    ([1, 4, 7, 10], [1, 2, 3])
    """
    shown = min(count, MOST_ROUNDS)
    return [1 + round(place * (count - 1) / (shown - 1)) for place in range(shown)]


def period_of(domains: Sequence[str]) -> int:
    """After how many segments the stream starts anew; its length if it never does."""
    count = len(domains)
    candidates = (period for period in range(1, count + 1) if count % period == 0)
    return next(period for period in candidates if list(domains) == list(domains[:period]) * (count // period))


def _sorted(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Corruptions in their standard order; where there are others, as the stream has them.

    >>> _sorted(("fog", "night", "rain", "snow"))    # fog and snow are corruptions too
    ('fog', 'night', 'rain', 'snow')
    """
    places = {corruption: place for place, corruption in enumerate(corruption_order(None))}
    if not all(kind_of(column) in places for column in columns):
        return columns
    return tuple(sorted(columns, key=lambda column: places[kind_of(column)]))

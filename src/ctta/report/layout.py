"""Which columns a table of errors has: one for each domain, for each round, or for each kind of corruption."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ctta.streams.orders import corruption_order

MOST_COLUMNS = 20  # more domains than this are gathered by kind


@dataclass(frozen=True)
class Layout:
    """How the segments of a stream become columns."""

    by: Literal["domain", "round", "kind"]
    columns: tuple[str, ...]  # as the stream calls them
    period: int  # segments of a round, or of the whole stream

    def column_of(self, segment: int, domain: str) -> str:
        """The column that a segment counts towards."""
        if self.by == "round":
            return f"round {segment // self.period + 1}"
        return domain if self.by == "domain" else kind_of(domain)

    def name(self, column: str) -> str:
        """The column as its head prints it: without a severity that is the same for all, without underscores."""
        severities = {severity_of(other) for other in self.columns}
        shown = kind_of(column) if self.by == "domain" and len(severities) == 1 else column
        return spoken(shown)

    def describe(self) -> str:
        """What a column is, for the caption."""
        if self.by == "round":
            return f"each round is the mean of its {self.period} segments"
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
    (('snow 5', 'fog 5'), ('round 1', 'round 2'))
    """
    first = streams[0]
    period = period_of(first)
    if period < len(first):
        return Layout("round", tuple(f"round {number + 1}" for number in range(len(first) // period)), period)
    domains = tuple(dict.fromkeys(domain for stream in streams for domain in stream))
    if len(domains) == len(first) <= MOST_COLUMNS:
        return Layout("domain", _sorted(domains), period)
    return Layout("kind", _sorted(tuple(dict.fromkeys(kind_of(domain) for domain in domains))), period)


def period_of(domains: Sequence[str]) -> int:
    """After how many segments the stream starts anew; its length if it never does."""
    count = len(domains)
    candidates = (period for period in range(1, count + 1) if count % period == 0)
    return next(period for period in candidates if list(domains) == list(domains[:period]) * (count // period))


def _sorted(columns: tuple[str, ...]) -> tuple[str, ...]:
    """In the standard order of the corruptions; others stay where they are, behind."""
    places = {corruption: place for place, corruption in enumerate(corruption_order(None))}
    return tuple(sorted(columns, key=lambda column: places.get(kind_of(column), len(places))))

"""Which streams a page of the list shows: filters, order and totals, for one process or several."""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any

from fastapi import Query

from ctta.serve.store import StreamSlot

MANY = 500  # streams
SortKey = tuple[Any, ...]
_TOTALS = ("updates", "images", "waiting", "live", "alarms", "harmed", "frozen")


class StreamOrder(StrEnum):
    """Orders of the list."""

    RECENT = "recent"  # the most recently used first
    ALARM = "alarm"  # alarms first, and the highest collapse score first among them
    NAME = "name"
    GAIN = "gain"  # the lowest first


class StreamState(StrEnum):
    """States by which the list can be filtered; a stream may be in several."""

    ALARM = "alarm"
    HARMED = "harmed"
    FROZEN = "frozen"
    LIVE = "live"
    STORED = "stored"


@dataclass(frozen=True)
class StreamQuery:
    """What to list; a dependency of routes."""

    order: StreamOrder = StreamOrder.RECENT
    state: StreamState | None = None
    search: Annotated[str, Query(max_length=64)] = ""  # a part of the name, in upper or lower case
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0
    limit: Annotated[int, Query(ge=1, le=1000)] = 100


@dataclass(frozen=True)
class Listing:
    """The streams that match a query, in order."""

    total: int  # number of streams, also of those that do not match
    totals: Mapping[str, int]  # sums over all streams
    matches: Sequence[tuple[SortKey, str]]  # sort key and name

    def page(self, query: StreamQuery) -> list[str]:
        """Return the names on the page of a query."""
        return [name for _, name in self.matches[query.offset : query.offset + query.limit]]

    def describe(self, streams: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the answer of the API with the streams of a page."""
        return {"total": self.total, "matching": len(self.matches), "totals": self.totals, "streams": streams}


async def list_streams(slots: Iterable[StreamSlot], query: StreamQuery) -> Listing:
    """List the streams of one process; many in a thread, so that other requests need not wait."""
    slots = list(slots)
    return await asyncio.to_thread(_list, slots, query) if len(slots) > MANY else _list(slots, query)


def _list(slots: list[StreamSlot], query: StreamQuery) -> Listing:
    matches, totals, total = [], dict.fromkeys(_TOTALS, 0), 0
    for slot in slots:
        if (summary := slot.last_summary) is None:
            continue  # being created
        states = find_states(slot)
        total += 1
        for name, value in (
            ("updates", summary["updates"]),
            ("images", summary["images"]),
            ("waiting", slot.num_waiting),
            ("live", StreamState.LIVE in states),
            ("alarms", StreamState.ALARM in states),
            ("harmed", StreamState.HARMED in states),
            ("frozen", StreamState.FROZEN in states),
        ):
            totals[name] += value
        if (query.state is None or query.state in states) and query.search.lower() in slot.name.lower():
            matches.append((_sort_key(summary, states, query.order), slot.name))
    return Listing(total, totals, sorted(matches))


def merge_listings(parts: Iterable[Listing]) -> Listing:
    """Return the list of several processes for the same query."""
    parts = list(parts)
    totals = {name: sum(part.totals.get(name, 0) for part in parts) for name in _TOTALS}
    return Listing(sum(part.total for part in parts), totals, sorted(match for part in parts for match in part.matches))


def find_states(slot: StreamSlot) -> set[StreamState]:
    """Return the states of a stream."""
    summary = slot.last_summary or {}
    score, feedback = summary.get("collapse_score"), summary.get("feedback") or {}
    found = {StreamState.LIVE if slot.stream is not None else StreamState.STORED}
    if score is not None and score >= 1:
        found.add(StreamState.ALARM)
    if feedback.get("is_harmful"):
        found.add(StreamState.HARMED)
    if summary.get("frozen"):
        found.add(StreamState.FROZEN)
    return found


def _sort_key(summary: Mapping[str, Any], states: set[StreamState], order: StreamOrder) -> SortKey:
    match order:
        case StreamOrder.RECENT:
            return (-summary["used_at"],)
        case StreamOrder.NAME:
            return natural_key(summary["name"])
        case StreamOrder.GAIN:
            gain = (summary.get("feedback") or {}).get("gain")  # by labels, else as the guard estimates it
            gain = (summary.get("health") or {}).get("estimated_gain") if gain is None else gain
            return (gain is None, gain or 0.0, *natural_key(summary["name"]))
        case StreamOrder.ALARM:
            score = summary.get("collapse_score") or 0.0
            is_alarmed, is_harmed = StreamState.ALARM in states, StreamState.HARMED in states
            # The score only among alarms, so that the other streams do not change places all the time.
            return (not is_alarmed, not is_harmed, -score if is_alarmed else 0.0, *natural_key(summary["name"]))


@lru_cache(maxsize=2**15)
def natural_key(name: str) -> SortKey:
    """Return a key that sorts numbers in names by their value.

    >>> sorted(["camera10", "camera2", "Ward"], key=natural_key)
    ['camera2', 'camera10', 'Ward']
    """
    parts = re.split(r"(\d+)", name.lower())
    return (*((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part), (2, 0, name))

"""Results gathered into the rows of a table: one method of one run, over all its orders and seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ctta.evaluation.results import Result

#: As the paper's tables list them; methods of your own follow.
METHODS = (
    "Source",
    "BN Stats Adapt",
    "Pseudo-label",
    "TENT-online*",
    "TENT-continual",
    "Test Aug",
    "CoTTA: weight-avg",
    "CoTTA: + aug-avg",
    "CoTTA",
)


@dataclass(frozen=True)
class Entry:
    """What one row shows: results that differ in order and seed only."""

    label: str
    run: str
    results: tuple[Result, ...]

    @property
    def method(self) -> str:
        return self.results[0].method

    @property
    def settings(self) -> dict[str, str]:
        """Without the seed, which differs from result to result."""
        return settings_of(self.results[0])

    @property
    def orders(self) -> tuple[int | None, ...]:
        return tuple(dict.fromkeys(order_of(result) for result in self.results))

    @property
    def seeds(self) -> tuple[int, ...]:
        """Empty for a method without randomness."""
        seeds = (result.labels.get("seed") for result in self.results)
        return tuple(dict.fromkeys(seed for seed in seeds if seed is not None))


def order_of(result: Result) -> int | None:
    order: int | None = result.labels.get("order")
    return order


def same_batches(results: Sequence[Result]) -> bool:
    """Whether results may share a table: equal orders mean equal batches, and all go through the same domains."""
    hashes: dict[int | None, str] = {}
    equal = all(hashes.setdefault(order_of(result), result.stream_hash) == result.stream_hash for result in results)
    return equal and len({(len(result.domains), frozenset(result.domains)) for result in results}) == 1


def settings_of(result: Result) -> dict[str, str]:
    return {name: value for name, value in result.settings.items() if name != "seed"}


def entries_of(results: Sequence[Result], run: str = "") -> list[Entry]:
    """The rows of one run, in the paper's order.

    A method that ran with two settings, or on two networks, gets two rows, each named by what differs.
    """
    grouped: dict[tuple[str, str, frozenset[tuple[str, str]]], list[Result]] = {}
    for result in sorted(results, key=_position):
        key = (result.method, result.source, frozenset(settings_of(result).items()))
        grouped.setdefault(key, []).append(result)
    entries = [Entry(group[0].method, run, tuple(group)) for group in grouped.values()]
    places = {method: place for place, method in enumerate(METHODS)}
    entries.sort(key=lambda entry: places.get(entry.method, len(METHODS)))
    return [replace(entry, label=_label(entry, entries)) for entry in entries]


def _position(result: Result) -> tuple[int, int]:
    order, seed = order_of(result), result.labels.get("seed")
    return (-1 if order is None else order, -1 if seed is None else seed)


def _label(entry: Entry, entries: Sequence[Entry]) -> str:
    namesakes = [other for other in entries if other.method == entry.method]
    facts = [{**other.settings, "network": other.results[0].source[:8]} for other in namesakes]
    own = {**entry.settings, "network": entry.results[0].source[:8]}
    differing = [name for name in own if any(fact.get(name) != own[name] for fact in facts)]
    return f"{entry.method} [{', '.join(f'{name}={own[name]}' for name in differing)}]" if differing else entry.method

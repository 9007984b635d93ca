"""Which results may share a table: those of one protocol that saw the same batches under the same order."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ctta.evaluation.results import Result
from ctta.report.entries import Entry, entries_of, same_batches
from ctta.report.runs import Run


@dataclass(frozen=True)
class Section:
    """Results that compare with each other."""

    protocol: str
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...]

    @property
    def results(self) -> tuple[Result, ...]:
        return tuple(result for entry in self.entries for result in entry.results)

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry.run for entry in self.entries))

    @property
    def recipes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(str(result.labels.get("recipe")) for result in self.results))


def protocol_of(result: Result) -> str:
    """The stream in words, whichever order its domains came in.

    >>> re.sub(r" order=\\S+", "", "cifar10c continual severity=5 order=3")
    'cifar10c continual severity=5'
    """
    return re.sub(r" order=\S+", "", result.stream)


def sections_of(runs: Sequence[Run]) -> list[Section]:
    """One section for each protocol, and more where runs of one protocol did not see the same batches."""
    gathered: dict[str, list[list[Entry]]] = {}
    for run in runs:
        for protocol in dict.fromkeys(protocol_of(result) for result in run.results):
            results = [result for result in run.results if protocol_of(result) == protocol]
            for part in _consistent(results):
                _add(gathered.setdefault(protocol, []), entries_of(part, run.name))
    sections = []
    for protocol, parts in gathered.items():
        split = _split_warning(len(parts)) if len(parts) > 1 else ()
        sections += [Section(protocol, tuple(part), (*split, *_warnings(part))) for part in parts]
    return sections


def _consistent(results: Sequence[Result]) -> list[list[Result]]:
    """The results as they are, or one list for each stream if equal orders do not mean equal batches."""
    if same_batches(results):
        return [list(results)]
    hashes = dict.fromkeys(result.stream_hash for result in results)
    return [[result for result in results if result.stream_hash == stream_hash] for stream_hash in hashes]


def _add(parts: list[list[Entry]], entries: list[Entry]) -> None:
    """To the first part that saw the same batches, or as a new one."""
    for part in parts:
        if same_batches([result for entry in (*part, *entries) for result in entry.results]):
            part.extend(entries)
            return
    parts.append(entries)


def _split_warning(count: int) -> tuple[str]:
    return (
        f"Not comparable: under the same name, these results saw {count} different streams (their hashes differ). "
        "Each has a section of its own.",
    )


def _warnings(entries: Sequence[Entry]) -> list[str]:
    """What a reader who compares rows must know."""
    warnings = []
    results = [result for entry in entries for result in entry.results]
    if len({frozenset(entry.orders) for entry in entries}) > 1:
        warnings.append("The rows are means over different orders of the domains; compare them with care.")
    if len({result.source for result in results}) > 1:
        warnings.append("The rows do not all start from the same network (the fingerprints differ).")
    machines = {tuple(str(result.environment.get(fact)) for fact in ("device", "threads")) for result in results}
    if len(machines) > 1:
        warnings.append("The rows were not all measured on the same device and threads: times do not compare.")
    return warnings

"""Read the folders that benchmarks and evaluations wrote, and group their results into rows and sections.

Cells that cannot be used are listed with the reason. An entry is one method of a run; a section holds the entries that
are comparable with each other.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ctta.errors import ConfigError, DataError
from ctta.evaluation.journal import read_result
from ctta.evaluation.label_maps import SceneExample, load_examples
from ctta.evaluation.results import Result

FORMAT = 1
#: Is told how much is done, and how much there is to do.
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class MissingCell:
    """A cell (method, order, seed) that is left out of the tables, and the reason."""

    run: str
    cell: str
    reason: str


@dataclass(frozen=True)
class RecordedRun:
    """A benchmark run, or evaluations, read from disk.

    Attributes:
        name: Name of the run; unique among the runs of a report.
        recipe: Name of the benchmark's recipe; of evaluations, the name of the folder.
        commands: All commands that wrote to the folder; none are known of evaluations.
        options: Options of the benchmark.
        results: Complete results.
        missing: Cells without a complete result.
        examples: Scenes to show, for results of segmentation.
    """

    name: str
    recipe: str
    commands: tuple[str, ...]
    options: dict[str, Any]
    results: tuple[Result, ...]
    missing: tuple[MissingCell, ...] = ()
    examples: tuple[SceneExample, ...] = ()


def read_runs(folders: Sequence[Path], *, on_progress: OnProgress | None = None) -> list[RecordedRun]:
    """Read runs, each once, under names that distinguish them.

    Args:
        folders: Folders that a benchmark, :func:`ctta.evaluate` or :func:`ctta.compare` wrote, or that hold several
            evaluations; repeated ones are ignored.
        on_progress: Called after each cell with the number of cells read and in total.

    Returns:
        The runs, in the order of the folders.

    Raises:
        ConfigError: If there is no folder.
        DataError: If a folder holds no run, or one that cannot be read.
    """
    if isinstance(folders, str | Path):
        raise TypeError(f"expected a sequence of folders, got {folders!r}: use [{folders!r}]")
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    if not paths:
        raise ConfigError("no runs given: expected at least one folder that a benchmark wrote")
    found = {path: _find_cells(path) for path in paths}
    num_cells, num_read = sum(len(cells) for cells, _ in found.values()), 0
    runs = []
    for path, name in zip(paths, _make_unique_names(paths), strict=True):
        cells, is_benchmark = found[path]
        about = read_run_file(path) if is_benchmark else dict[str, Any](recipe=name, commands=[], options={})
        results: list[Result] = []
        missing: list[MissingCell] = []
        for cell in cells:
            outcome = _read_cell(cell)
            num_read += 1
            if on_progress:
                on_progress(num_read, num_cells)
            if isinstance(outcome, Result):
                results.append(outcome)
            else:
                missing.append(MissingCell(name, cell.name, outcome))
        runs.append(
            RecordedRun(
                name=name,
                recipe=about["recipe"],
                commands=tuple(about["commands"]),
                options=about["options"],
                results=tuple(results),
                missing=tuple(missing),
                examples=tuple(load_examples(path)),
            )
        )
    return runs


def _find_cells(folder: Path) -> tuple[list[Path], bool]:
    """Return the folders of the cells, and whether they are those of a benchmark."""
    is_evaluation = (folder / "about.json").is_file()
    evaluations = [folder] if is_evaluation else sorted(path.parent for path in folder.glob("*/about.json"))
    if (folder / "run.json").exists() or not evaluations:
        return sorted(path for path in (folder / "cells").glob("*") if path.is_dir()), True
    return evaluations, False


_FIELDS = {"recipe": str, "options": dict, "commands": list}


def read_run_file(folder: Path) -> dict[str, Any]:
    """Return what ``run.json`` records about a run: recipe, options, threads and commands."""
    path = folder / "run.json"
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{folder} has no run.json, and no about.json of an evaluation: expected a folder that 'ctta bench', "
            "ctta.evaluate(folder=...) or ctta.compare(folder=...) wrote"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}): delete it and run the benchmark again") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise DataError(f"{path} was written by another version of ctta: run the benchmark again")
    if damaged := [name for name, kind in _FIELDS.items() if not isinstance(about.get(name), kind)]:
        raise DataError(f"{path} is damaged (no usable {', '.join(damaged)}): delete it and run the benchmark again")
    return about


def _read_cell(cell: Path) -> Result | str:
    """Return the result of a cell, or the reason why there is none."""
    if not (cell / "about.json").is_file():
        return "not started"
    try:
        result = read_result(cell)
    except DataError as error:
        return f"cannot be read: {error}"
    if not result.is_complete:
        return f"{len(result.batches)} of {result.num_batches} batches done"
    return result if result.is_labeled else "has no labels, and so no error to report"


def _make_unique_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest suffixes of the paths that differ, such as 'monday/cifar10c' and 'tuesday/cifar10c'."""
    depth = 1
    while len({"/".join(path.parts[-depth:]) for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


#: Order of the rows, as in the tables of the CoTTA paper; other methods follow.
METHOD_ORDER = (
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
class MethodEntry:
    """One method of one run: the results that differ only in order and seed. It becomes a row of a table."""

    label: str
    run: str
    results: tuple[Result, ...]

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.results[0].method

    @property
    def is_source(self) -> bool:
        """Whether this is the source network, by its name."""
        return self.method.casefold() == "source"

    @property
    def settings(self) -> dict[str, str]:
        """Hyperparameters without the seed, which varies between results."""
        return _get_settings(self.results[0])

    @property
    def conditions(self) -> tuple[str, ...]:
        """How the stream treated the model, in words; empty if it waited for every step."""
        ratios = sorted({result.step_ratio for result in self.results})
        return () if ratios == [1] else (f"one step per {' or '.join(map(str, ratios))} batches",)

    @property
    def orders(self) -> tuple[int | None, ...]:
        """Domain orders of the results; None is the standard order."""
        return tuple(dict.fromkeys(get_order(result) for result in self.results))

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the results; empty for a deterministic method."""
        seeds = (result.labels.get("seed") for result in self.results)
        return tuple(dict.fromkeys(seed for seed in seeds if seed is not None))

    @property
    def averaged_over(self) -> str:
        """Orders and seeds that the row is a mean over, in words; 'one run' for an evaluation that names none."""
        if not any("order" in result.labels for result in self.results):
            return "one run" if len(self.results) == 1 else f"{len(self.results)} runs"
        orders = ", ".join("standard" if order is None else str(order) for order in self.orders)
        if len(self.orders) > 1:
            text = f"orders {orders}"
        else:
            text = "standard order" if self.orders == (None,) else f"order {orders}"
        if self.seeds:
            text += f"; seed{'s' if len(self.seeds) > 1 else ''} {', '.join(str(seed) for seed in self.seeds)}"
        return text


@dataclass(frozen=True)
class Section:
    """Entries of one protocol that are comparable with each other."""

    protocol: str
    entries: tuple[MethodEntry, ...]
    warnings: tuple[str, ...]

    @property
    def results(self) -> tuple[Result, ...]:
        """All results of the entries."""
        return tuple(result for entry in self.entries for result in entry.results)

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs."""
        return tuple(dict.fromkeys(entry.run for entry in self.entries))


def get_order(result: Result) -> int | None:
    """Return the domain order of a result; None is the standard order."""
    order: int | None = result.labels.get("order")
    return order


def get_protocol(result: Result) -> str:
    """Return the stream's description without the order of its domains, such as 'cifar10c continual severity=5'."""
    return re.sub(r" order=\S+", "", result.stream)


def saw_same_batches(results: Sequence[Result]) -> bool:
    """Return whether results may share a table: equal orders have equal batches, and all have the same domains."""
    hashes: dict[int | None, str] = {}
    is_equal = all(hashes.setdefault(get_order(result), result.stream_hash) == result.stream_hash for result in results)
    return is_equal and len({(len(result.domains), frozenset(result.domains)) for result in results}) == 1


def group_by_method(results: Sequence[Result], run: str = "") -> list[MethodEntry]:
    """Group the results of one run into entries, in the order of the paper; methods that it does not have come last.

    A method that ran with two settings or on two networks gets two entries, labeled by what differs.
    """
    grouped: dict[tuple[str, str, frozenset[tuple[str, str]]], list[Result]] = {}
    for result in sorted(results, key=_order_and_seed):
        key = (result.method, result.source, frozenset(_get_settings(result).items()))
        grouped.setdefault(key, []).append(result)
    entries = [MethodEntry(group[0].method, run, tuple(group)) for group in grouped.values()]
    ranks = {method: rank for rank, method in enumerate(METHOD_ORDER)}
    # Others by name, whichever was complete first.
    entries.sort(key=lambda entry: (0 if entry.is_source else ranks.get(entry.method, len(ranks)), entry.method))
    return [replace(entry, label=_make_label(entry, entries)) for entry in entries]


def group_into_sections(runs: Sequence[RecordedRun]) -> list[Section]:
    """Return one section per protocol, or several where runs of one protocol saw different batches."""
    grouped: dict[str, list[list[MethodEntry]]] = {}
    for run in runs:
        for protocol in dict.fromkeys(get_protocol(result) for result in run.results):
            results = [result for result in run.results if get_protocol(result) == protocol]
            for comparable in _split_by_stream(results):
                _add_entries(grouped.setdefault(protocol, []), group_by_method(comparable, run.name))
    sections = []
    for protocol, parts in grouped.items():
        warning = (
            f"Not comparable: results of this protocol saw {len(parts)} different streams (their hashes differ). "
            "Each stream has its own section."
        )
        split = [warning] if len(parts) > 1 else []
        sections += [Section(protocol, tuple(part), (*split, *_find_warnings(part))) for part in parts]
    return sections


def _get_settings(result: Result) -> dict[str, str]:
    return {name: value for name, value in result.settings.items() if name != "seed"}


def _order_and_seed(result: Result) -> tuple[int, int]:
    order, seed = get_order(result), result.labels.get("seed")
    return (-1 if order is None else order, -1 if seed is None else seed)


def _make_label(entry: MethodEntry, entries: Sequence[MethodEntry]) -> str:
    """Return the method's name, followed by what distinguishes the entry from others of the same method."""
    properties = [
        {**other.settings, "network": other.results[0].source[:8]} for other in entries if other.method == entry.method
    ]
    own = {**entry.settings, "network": entry.results[0].source[:8]}
    differing = [name for name in own if any(other.get(name) != own[name] for other in properties)]
    return f"{entry.method} [{', '.join(f'{name}={own[name]}' for name in differing)}]" if differing else entry.method


def _split_by_stream(results: Sequence[Result]) -> list[list[Result]]:
    """Return one list of all results, or one per stream if equal orders do not have equal batches."""
    if saw_same_batches(results):
        return [list(results)]
    hashes = dict.fromkeys(result.stream_hash for result in results)
    return [[result for result in results if result.stream_hash == stream_hash] for stream_hash in hashes]


def _add_entries(parts: list[list[MethodEntry]], entries: list[MethodEntry]) -> None:
    """Add entries to the first part that saw the same batches, or as a new part."""
    for part in parts:
        if saw_same_batches([result for entry in (*part, *entries) for result in entry.results]):
            part.extend(entries)
            return
    parts.append(entries)


def _find_warnings(entries: Sequence[MethodEntry]) -> list[str]:
    """Return what limits the comparison of the rows."""
    warnings = []
    results = [result for entry in entries for result in entry.results]
    if len({frozenset(entry.orders) for entry in entries}) > 1:
        warnings.append("The rows are means over different orders of the domains; compare them with care.")
    if len({result.source for result in results}) > 1:
        warnings.append("The rows start from different source networks (their fingerprints differ).")
    machines = {tuple(str(result.environment.get(fact)) for fact in ("device", "threads")) for result in results}
    if len(machines) > 1:
        warnings.append("The rows were measured on different devices or numbers of threads; times are not comparable.")
    return warnings

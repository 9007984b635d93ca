"""Why the tables of two runs disagree: what the runs differ in, first what explains most."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from ctta.benchmark.report.runs import find_cells
from ctta.errors import DataError
from ctta.evaluation.display import render_text_table
from ctta.evaluation.facts import read_facts
from ctta.evaluation.reading import read_result
from ctta.evaluation.results import Result

#: Whether a difference changes the row of Source too, or only methods that adapt.
Reach = Literal["every row", "rows that adapt"]
MAX_TEXT = 100
#: Differences of pixels below this are rounding.
MIN_RANGE, MIN_MEAN = 0.02, 0.02
#: How many times as large they may be between batches of other images.
SAMPLING = 10.0


@dataclass(frozen=True)
class Difference:
    """Something in which two runs differ.

    Attributes:
        subject: What differs, such as ``"weights"`` or ``"settings of TENT"``.
        first: What the first run has.
        second: What the second run has.
        reach: Which rows it changes.
    """

    subject: str
    first: str
    second: str
    reach: Reach


@dataclass(frozen=True, repr=False)
class RunDifferences:
    """The rows of two runs beside each other, and why they disagree; printed, it is a page of text.

    Attributes:
        names: Names of the runs.
        errors: Mean error of each method in both runs, for the methods that both have.
        missing: Methods that only one run has, with the name of that run.
        differences: What differs, first what explains most.
        same: What was compared and is the same.
        unknown: What one of the runs did not record.
    """

    names: tuple[str, str]
    errors: Mapping[str, tuple[float, float]]
    missing: Mapping[str, str]
    differences: tuple[Difference, ...]
    same: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def source_gap(self) -> float | None:
        """By how much the errors of Source differ; None if not both runs have it."""
        return measure_source_gap(self.errors)

    @property
    def explanation(self) -> str:
        """What the first difference is, and what the row of Source says about it."""
        if not self.differences:
            return "The runs differ in nothing that is recorded." if self.errors else "The runs share no method."
        first, gap = self.differences[0], self.source_gap
        if gap is None:
            evidence = "neither row of Source is there to tell" if self.errors else "they share no method"
        elif first.reach == "every row":
            evidence = f"Source, which does not adapt, differs by {100 * gap:+.1f} points"
        else:
            evidence = f"Source differs by {100 * gap:+.1f} points only, so that it is about how methods adapt"
        return f"What explains most: {first.subject} ({evidence})."

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON."""
        return asdict(self) | {"explanation": self.explanation}

    def __repr__(self) -> str:
        lines = [f"a: {self.names[0]}", f"b: {self.names[1]}", ""]
        if self.errors:
            rows = [
                {"error %": name, "a": f"{100 * a:.1f}", "b": f"{100 * b:.1f}", "b - a": f"{100 * (b - a):+.1f}"}
                for name, (a, b) in self.errors.items()
            ]
            lines += [render_text_table(rows), ""]
        lines += [f"Only in {run}: {method}." for method, run in self.missing.items()]
        lines.append(self.explanation)
        for number, each in enumerate(self.differences, 1):
            lines += [f"{number}. {each.subject}, changes {each.reach}", f"   a: {each.first}", f"   b: {each.second}"]
        if self.same:
            lines.append(f"The same: {', '.join(self.same)}.")
        if self.unknown:
            lines.append(f"Not recorded in one of them: {', '.join(self.unknown)}.")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Cell:
    """A result with the facts in its folder."""

    result: Result
    facts: dict[str, Any]


def diff_runs(first: Path, second: Path) -> RunDifferences:
    """Compare two runs: the rows that both have, and what they differ in.

    Args:
        first: A folder that ``ctta bench``, :func:`ctta.evaluate` or :func:`ctta.compare` wrote.
        second: Another one.

    Returns:
        The differences, first what explains most: if the errors of Source differ more than the rest of the table, what
        changes every row comes first, else what changes adaptation.

    Raises:
        DataError: A folder holds no complete evaluation.
    """
    runs = [_read_cells(Path(folder)) for folder in (first, second)]
    shared = [name for name in runs[0] if name in runs[1]]
    errors = {
        name: (fmean(cell.result.value for cell in runs[0][name]), fmean(cell.result.value for cell in runs[1][name]))
        for name in shared
    }
    missing = {name: str(first) for name in runs[0] if name not in runs[1]}
    missing |= {name: str(second) for name in runs[1] if name not in runs[0]}
    found, same, unknown = _compare(runs[0], runs[1], shared)
    gap = measure_source_gap(errors)
    rest = [abs(b - a - (gap or 0.0)) for name, (a, b) in errors.items() if not _is_source(name)]
    is_common = gap is None or not rest or abs(gap) > fmean(rest)
    leading: Reach = "every row" if is_common else "rows that adapt"
    ordered = sorted(found, key=lambda each: (each.subject == "versions", each.reach != leading))
    return RunDifferences((str(first), str(second)), errors, missing, tuple(ordered), tuple(same), tuple(unknown))


def measure_source_gap(errors: Mapping[str, tuple[float, float]]) -> float | None:
    """Return by how much the errors of Source differ between two runs; None if they do not share it.

    Args:
        errors: Errors of each method in both runs.
    """
    gaps = [b - a for name, (a, b) in errors.items() if _is_source(name)]
    return gaps[0] if gaps else None


def _is_source(name: str) -> bool:
    return name.lower() == "source"


def _read_cells(folder: Path) -> dict[str, list[_Cell]]:
    """Return the complete evaluations of a run by the name of their method."""
    cells: dict[str, list[_Cell]] = {}
    for path in find_cells(folder):
        if (path / "about.json").is_file() and (result := read_result(path)).is_complete and result.is_labeled:
            cells.setdefault(result.method, []).append(_Cell(result, read_facts(path)))
    if not cells:
        raise DataError(
            f"{folder} holds no complete evaluation with labels: expected a folder that 'ctta bench', "
            "ctta.evaluate(folder=...) or ctta.compare(folder=...) wrote"
        )
    return cells


#: What is compared once per run, most telling first: its name, where it is, and which rows it changes.
_SUBJECTS: tuple[tuple[str, Callable[[_Cell], Any], Reach], ...] = (
    ("normalization", lambda cell: _format_normalization(cell.facts), "every row"),
    ("input range", lambda cell: cell.facts.get("input"), "every row"),
    ("weights", lambda cell: _format_weights(cell), "every row"),
    ("domains", lambda cell: list(cell.result.domains), "every row"),
    ("images", lambda cell: cell.facts.get("images"), "every row"),
    ("order", lambda cell: cell.facts.get("order"), "rows that adapt"),
    ("batch size", lambda cell: _get_batch_size(cell), "rows that adapt"),
    ("classes per batch", lambda cell: _get_composition(cell, "classes_per_batch"), "rows that adapt"),
    ("reset at every domain", lambda cell: cell.result.reset_at_domain, "rows that adapt"),
    ("steps per batch", lambda cell: cell.result.step_ratio, "rows that adapt"),
    ("versions", lambda cell: dict(cell.result.environment), "every row"),
)


def _compare(
    first: Mapping[str, Sequence[_Cell]], second: Mapping[str, Sequence[_Cell]], shared: Sequence[str]
) -> tuple[list[Difference], list[str], list[str]]:
    a, b = next(iter(first.values()))[0], next(iter(second.values()))[0]
    found: list[Difference] = []
    same: list[str] = []
    unknown: list[str] = []
    for subject, get, reach in _SUBJECTS:
        values = get(a), get(b)
        if None in values:
            unknown.append(subject)
        elif _is_same(subject, *values):
            same.append(subject)
        else:
            found.append(Difference(subject, *_format_values(*values), reach))
    implied = _find_implied({each.subject for each in found}, a, b)
    found = [each for each in found if each.subject not in implied]
    for name in shared:
        one, other = first[name][0], second[name][0]
        for subject, values in (
            ("settings", (one.result.settings, other.result.settings)),
            ("trained tensors", (one.facts.get("trained"), other.facts.get("trained"))),
            ("seeds and orders", (_list_labels(first[name]), _list_labels(second[name]))),
        ):
            if None in values:
                unknown.append(f"{subject} of {name}")
            elif values[0] != values[1]:
                found.append(Difference(f"{subject} of {name}", *_format_values(*values), "rows that adapt"))
    return found, same, unknown


def _find_implied(subjects: set[str], a: _Cell, b: _Cell) -> set[str]:
    """Return which of the subjects that differ only follow from others."""
    implied = set()
    if "images" in subjects:
        implied.add("order")
    if "batch size" in subjects and "order" not in subjects:
        implied.add("classes per batch")
    # The range is that of the first batch, which has other images then.
    is_other_batch = bool(subjects & {"order", "batch size"}) and not subjects & {"images", "domains"}
    if is_other_batch and "input range" in subjects and _is_same_range(a.facts["input"], b.facts["input"], SAMPLING):
        implied.add("input range")
    return implied


def _is_same(subject: str, a: Any, b: Any) -> bool:
    return _is_same_range(a, b, 1.0) if subject == "input range" else bool(a == b)


def _is_same_range(a: Mapping[str, Any], b: Mapping[str, Any], factor: float) -> bool:
    gaps = [abs(a[end] - b[end]) for end in ("low", "high")]
    means = [abs(x - y) for x, y in zip(a["mean"], b["mean"], strict=False)]
    return bool(a["size"] == b["size"]) and max(gaps) < factor * MIN_RANGE and max(means) < factor * MIN_MEAN


def _format_normalization(facts: Mapping[str, Any]) -> str | None:
    if "normalization" not in facts:
        return None
    found = facts["normalization"]
    return "none in front of the network" if found is None else f"mean {found['mean']}, std {found['std']}"


def _format_weights(cell: _Cell) -> str:
    if "weights" not in cell.facts:
        return cell.result.source
    return f"{cell.facts['network']} {cell.facts['weights'][:16]}"


def _get_composition(cell: _Cell, name: str) -> Any:
    return None if cell.result.composition is None else getattr(cell.result.composition, name)


def _get_batch_size(cell: _Cell) -> Any:
    return cell.facts.get("batch_size") or _get_composition(cell, "batch_size")


def _list_labels(cells: Sequence[_Cell]) -> list[str]:
    return sorted(f"order {each.result.labels.get('order')} seed {each.result.labels.get('seed')}" for each in cells)


def _format_values(a: Any, b: Any) -> tuple[str, str]:
    """Return two different values as text; of mappings and lists only where they differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
        first, second = (", ".join(f"{n} {v[n]}" if n in v else f"no {n}" for n in names) for v in (a, b))
        return first, second
    if isinstance(a, list) and isinstance(b, list):
        only = [[item for item in one if item not in other] for one, other in ((a, b), (b, a))]
        if any(only):
            first, second = (f"{len(v)}, of them only here: {_join(o)}" for v, o in zip((a, b), only, strict=True))
            return first, second
        return f"{_join(a)}", f"{_join(b)} (the same in another order)"
    first, second = (f"{each:.4g}" if isinstance(each, float) else str(each) for each in (a, b))
    return first, second


def _join(items: Sequence[Any]) -> str:
    text = ", ".join(map(str, items)) or "none"
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"

"""Read the folders that benchmarks and evaluations wrote; cells that cannot be used are listed with the reason."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctta.errors import ConfigError, DataError
from ctta.evaluation.examples import SceneExample, load_examples
from ctta.evaluation.reading import read_result
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
    num_cells, num_read = sum(len(_find_cells(path)[0]) for path in paths), 0

    def count_cell() -> None:
        nonlocal num_read
        num_read += 1
        if on_progress:
            on_progress(num_read, num_cells)

    names = _make_unique_names(paths)
    return [read_run(path, name, on_cell=count_cell) for path, name in zip(paths, names, strict=True)]


def read_run(folder: Path, name: str | None = None, *, on_cell: Callable[[], None] | None = None) -> RecordedRun:
    """Read one run; its name defaults to that of the folder.

    Args:
        folder: The folder of the run.
        name: Name of the run.
        on_cell: Called after each cell.

    Returns:
        The run.
    """
    name = name or folder.resolve().name
    cells, is_benchmark = _find_cells(folder)
    about: dict[str, Any] = {"recipe": name, "commands": [], "options": {}}
    if is_benchmark:
        about = read_run_file(folder)
    results: list[Result] = []
    missing: list[MissingCell] = []
    for cell in cells:
        outcome = _read_cell(cell)
        if on_cell:
            on_cell()
        if isinstance(outcome, Result):
            results.append(outcome)
        else:
            missing.append(MissingCell(name, cell.name, outcome))
    return RecordedRun(
        name=name,
        recipe=about["recipe"],
        commands=tuple(about["commands"]),
        options=about["options"],
        results=tuple(results),
        missing=tuple(missing),
        examples=tuple(load_examples(folder)),
    )


def _find_cells(folder: Path) -> tuple[list[Path], bool]:
    """Return the folders of the cells, and whether they are those of a benchmark."""
    if (folder / "run.json").exists() or not (evaluations := find_evaluations(folder)):
        return sorted(path for path in (folder / "cells").glob("*") if path.is_dir()), True
    return evaluations, False


def find_evaluations(folder: Path) -> list[Path]:
    """Return the folder of an evaluation itself, or those of the evaluations in it, sorted by name."""
    if (folder / "about.json").is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/about.json"))


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

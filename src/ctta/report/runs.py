"""Folders that a benchmark wrote, read back; cells that cannot be used are named, not hidden."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctta.evaluation.examples import SceneExample, load_examples
from ctta.evaluation.results import Result, read_result

FORMAT = 1


@dataclass(frozen=True)
class MissingCell:
    """A cell (method, order, seed) that is in no table, and why."""

    run: str
    cell: str
    reason: str


@dataclass(frozen=True)
class Run:
    """One run of a benchmark: how it was started, its complete results, and what is missing."""

    name: str
    recipe: str
    commands: tuple[str, ...]  # all that filled the folder
    options: dict[str, Any]
    results: tuple[Result, ...]
    missing: tuple[MissingCell, ...] = ()
    examples: tuple[SceneExample, ...] = ()  # scenes to look at, where results are of pixels


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Every run once, under a name that tells it from the others."""
    if isinstance(folders, str | Path):
        raise TypeError(f"runs must be a sequence of folders, got {folders!r}: give [{folders!r}]")
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    if not paths:
        raise ValueError("no run was given: name at least one folder that a benchmark wrote")
    return [read_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def read_run(folder: Path, name: str | None = None) -> Run:
    """One run's folder."""
    name = name or folder.resolve().name
    try:
        about = json.loads((folder / "run.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no run.json: give the folder that a benchmark wrote") from None
    except ValueError as error:
        raise ValueError(f"{folder / 'run.json'} is damaged ({error}): start the run again") from error
    if about.get("format") != FORMAT:
        raise ValueError(f"{folder / 'run.json'} was written by another version of ctta")
    results: list[Result] = []
    missing: list[MissingCell] = []
    cells = sorted(path for path in (folder / "cells").glob("*") if path.is_dir())
    for cell in cells:
        outcome = _usable(cell)
        if isinstance(outcome, Result):
            results.append(outcome)
        else:
            missing.append(MissingCell(name, cell.name, outcome))
    examples = tuple(load_examples(folder))
    return Run(
        name, about["recipe"], tuple(about["commands"]), about["options"], tuple(results), tuple(missing), examples
    )


def _usable(cell: Path) -> Result | str:
    """The cell's result, or why there is none."""
    if not (cell / "about.json").is_file():
        return "not started"
    try:
        result = read_result(cell)
    except (ValueError, TypeError, KeyError) as error:  # whatever a damaged file may give
        return f"cannot be read: {error}"
    return result if result.is_complete else f"{len(result.batches)} of {result.num_batches} batches done"


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ: 'monday/cifar10c' and 'tuesday/cifar10c'."""
    depth = 1
    while len(names := {"/".join(path.parts[-depth:]) for path in paths}) < len(paths):
        depth += 1
    assert len(names) == len(paths)
    return ["/".join(path.parts[-depth:]) for path in paths]

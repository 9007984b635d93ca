"""A run: the cells of a table, in a folder that can be gone on with."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ctta.grid.cell import Cell
from ctta.grid.places import Ending, Place
from ctta.journal import write_atomically
from ctta.recipes import RECIPES, Options
from ctta.results import Result, read_result

FORMAT = 1
ATTEMPTS = 3


@dataclass(frozen=True)
class Run:
    """A folder and the cells that are to be in it."""

    folder: Path
    cells: tuple[Cell, ...]
    num_batches: int  # of all cells

    @property
    def title(self) -> str:
        return self.folder.name

    @property
    def num_batches_done(self) -> int:
        """So far, counted in the files, wherever the cells are running."""
        return sum(_lines(Path(cell.folder) / "batches.jsonl") for cell in self.cells)

    def results(self) -> list[Result]:
        """What is there, complete or not, in the order of the cells."""
        folders = [Path(cell.folder) for cell in self.cells]
        return [read_result(folder) for folder in folders if (folder / "about.json").exists()]


def plan(
    folder: Path,
    recipe: str,
    options: Options,
    *,
    methods: Sequence[str] | None = None,
    orders: Sequence[int | None] | None = None,
    seeds: Sequence[int] | None = None,
    threads: int,
    save_every: float = 20.0,
    command: str = "",
) -> Run:
    """Decide which cells to run, and note it in the folder.

    A folder that already holds a run of the same recipe, options and threads is gone on with, and may get further
    methods, orders and seeds; one with other options is refused.
    """
    if recipe not in RECIPES:
        raise ValueError(f"there is no recipe {recipe!r}; there are {', '.join(RECIPES)}")
    task = RECIPES[recipe](options)
    methods = tuple(methods or task.methods)
    if unknown := [method for method in methods if method not in task.rows]:
        raise ValueError(f"{recipe} has no method {unknown[0]!r}; it has {', '.join(task.rows)}")
    orders = tuple(orders or task.orders)
    lengths = {order: len(task.stream(order)) for order in orders}  # also finds missing data, before anything starts
    cells = []
    for method in methods:
        for order in orders:
            for seed in (seeds or task.seeds) if task.rows[method].is_random else (None,):
                place = folder.absolute() / "cells" / _name(method, order, seed)
                cells.append(Cell(recipe, options, method, order, seed, threads, str(place), save_every))
    _note(folder, {"recipe": recipe, "options": asdict(options), "threads": threads}, command)
    return Run(folder, tuple(cells), sum(lengths[cell.order] for cell in cells))


def execute(run: Run, place: Place, *, on_ending: Callable[[Ending], None] | None = None) -> list[Ending]:
    """Run every cell that is not complete; those that failed for good.

    A cell whose process died is tried again, a few times; whatever fails, the others go on.
    """
    waiting = list(run.cells)
    attempts = dict.fromkeys(run.cells, 0)
    failed: list[Ending] = []
    num_running = 0
    try:
        while waiting or num_running:
            while waiting and num_running < place.size:
                cell = waiting.pop(0)
                attempts[cell] += 1
                place.start(cell)
                num_running += 1
            ending = place.next_ending()
            num_running -= 1
            if ending.died and attempts[ending.cell] < ATTEMPTS:
                ending = replace(ending, is_retried=True)
                waiting.append(ending.cell)
            elif ending.problem:
                failed.append(ending)
            if on_ending:
                on_ending(ending)
    finally:
        place.stop()
    return failed


def _name(method: str, order: int | None, seed: int | None) -> str:
    which = "standard" if order is None else f"order{order}"
    return f"{method}-{which}" + ("" if seed is None else f"-seed{seed}")


def _note(folder: Path, asked: dict[str, Any], command: str) -> None:
    path = folder / "run.json"
    asked = json.loads(json.dumps({"format": FORMAT, **asked}))
    if path.exists():
        there = json.loads(path.read_text())
        if different := [key for key, value in asked.items() if there.get(key) != value]:
            raise ValueError(
                f"{folder} holds a run with another {different[0]} ({there.get(different[0])}, now "
                f"{asked[different[0]]}): give another folder with --out, or delete that one"
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({**asked, "command": command}, indent=1))


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0

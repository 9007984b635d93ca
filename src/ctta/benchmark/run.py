"""A run: the cells of a table, in a folder that can be gone on with."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ctta.benchmark.cell import Cell
from ctta.benchmark.executors import Ending, Place
from ctta.benchmark.recipes import Options, build
from ctta.checkpoint.fingerprint import fingerprint
from ctta.distributed import rank
from ctta.distributed.collectives import run_on_rank_zero
from ctta.evaluation.journal import write_atomically
from ctta.evaluation.results import Result, read_result
from ctta.models import to_device

FORMAT = 1
ATTEMPTS = 3


@dataclass(frozen=True)
class Run:
    """A folder and the cells that are to be in it."""

    folder: Path
    cells: tuple[Cell, ...]
    num_batches: int  # of all cells

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
    """Decide which cells to run, and note it in the folder; mistakes are found here, before anything starts.

    A folder that already holds a run of the same recipe, options and threads is gone on with, and may get further
    methods, orders and seeds; one with other options, or of another network, is refused.
    """
    task = build(recipe, options)
    methods, orders, seeds = (
        _distinct(name, given, default)
        for name, given, default in (
            ("methods", methods, task.methods),
            ("orders", orders, task.orders),
            ("seeds", seeds, task.seeds),
        )
    )
    if unknown := [method for method in methods if method not in task.rows]:
        raise ValueError(f"{recipe} has no method {unknown[0]!r}; it has {', '.join(task.rows)}")
    streams = {order: task.stream(order) for order in orders}
    net = to_device(task.network(), options.device)
    for method in methods:
        task.rows[method].model(net, 0)
    cells = []
    for method in methods:
        for order in orders:
            for seed in seeds if task.rows[method].is_random else (None,):
                place = folder.absolute() / "cells" / _name(method, order, seed)
                cells.append(Cell(recipe, options, method, order, seed, threads, str(place), save_every))
    asked = {"recipe": recipe, "options": asdict(options), "threads": threads}
    commands = _earlier_commands(folder, asked)
    run = Run(folder, tuple(cells), sum(len(streams[cell.order]) for cell in cells))
    _check_same(run, fingerprint(net), {order: stream.hash for order, stream in streams.items()})
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        commands = list(dict.fromkeys([*commands, command]))
        write_atomically(folder / "run.json", json.dumps({"format": FORMAT, **asked, "commands": commands}, indent=1))
    return run


def _distinct(name: str, given: Sequence[Any] | None, default: Sequence[Any]) -> tuple[Any, ...]:
    if given is not None and len(given) == 0:
        raise ValueError(f"{name} is an empty list: leave it out, or name some")
    return tuple(dict.fromkeys(default if given is None else given))


def _check_same(run: Run, network: str, hashes: dict[int | None, str]) -> None:
    """Complete cells are not run again, so they must be of the network and the streams of today."""
    for result in run.results():
        if (result.source, result.stream_hash) != (network, hashes[result.labels["order"]]):
            raise ValueError(
                f"{run.folder} holds results of another network or other data: give another folder with --out, "
                "or delete that one"
            )


def execute(run: Run, place: Place, *, on_ending: Callable[[Ending], None] | None = None) -> list[Ending]:
    """Run every cell that is not complete; those that failed for good.

    A cell whose process died is tried again, a few times; whatever fails, the others go on.
    """
    complete = run_on_rank_zero(lambda: [cell.is_complete for cell in run.cells])
    waiting = [cell for cell, is_complete in zip(run.cells, complete, strict=True) if not is_complete]
    attempts = dict.fromkeys(waiting, 0)
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


def _earlier_commands(folder: Path, asked: dict[str, Any]) -> list[str]:
    """Those that have filled the folder so far; refused if they asked for something else."""
    path = folder / "run.json"
    if not path.exists():
        return []
    there = json.loads(path.read_text())
    now = json.loads(json.dumps({"format": FORMAT, **asked}))
    if different := sorted(_flat(now).items() - _flat(there).items()):
        name, value = different[0]
        raise ValueError(
            f"{folder} holds a run with another {name} ({_flat(there).get(name)}, now {value}): "
            "give another folder with --out, or delete that one"
        )
    commands: list[str] = there["commands"]
    return commands


def _flat(asked: dict[str, Any]) -> dict[str, str]:
    """The options each by its name."""
    options: dict[str, Any] = asked["options"]
    return {name: str(value) for name, value in {**asked, **options}.items() if name != "options"}


class Progress:
    """Counts the batches done, in the cells' files, wherever the cells are running."""

    def __init__(self, run: Run) -> None:
        self.files = [Path(cell.folder) / "batches.jsonl" for cell in run.cells]
        self._counted: dict[Path, tuple[int, int]] = {}  # how many bytes of a file were looked at, and their lines

    def num_batches_done(self) -> int:
        for path in self.files:
            size = path.stat().st_size if path.exists() else 0
            looked_at, lines = self._counted.get(path, (0, 0))
            if size < looked_at:  # cut back to its last state
                looked_at, lines = 0, 0
            if size > looked_at:
                with path.open("rb") as file:
                    file.seek(looked_at)
                    lines += file.read(size - looked_at).count(b"\n")
            self._counted[path] = (size, lines)
        return sum(lines for _size, lines in self._counted.values())

"""Where cells run: what every place offers, and the nearest one, this process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ctta.benchmark.cell import Cell
from ctta.evaluation.results import BatchRecord


@dataclass(frozen=True)
class Ending:
    """How an attempt at a cell ended; without a problem, its result is there."""

    cell: Cell
    problem: str | None = None
    died: bool = False  # the process is gone, which another attempt may well survive
    is_retried: bool = False


class Place(Protocol):
    """Somewhere to run cells."""

    size: int  # how many at a time

    def start(self, cell: Cell) -> None: ...

    def next_ending(self) -> Ending:
        """Wait until one of those started has ended."""

    def stop(self) -> None:
        """End all that still run; what they have written stays."""


def attempt(cell: Cell, on_batch: Callable[[BatchRecord], None] | None = None) -> str | None:
    """Run a cell; what went wrong, in a line, or None."""
    try:
        cell.run(on_batch)
    except Exception as error:  # whatever it is, it is reported and the other cells go on
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


class ThisProcess:
    """One cell after the other, here.

    Args:
        on_batch: called after each batch; where it raises KeyboardInterrupt, the cell is saved first.
    """

    size = 1

    def __init__(self, on_batch: Callable[[BatchRecord], None] | None = None) -> None:
        self.on_batch = on_batch

    def start(self, cell: Cell) -> None:
        self._cell = cell

    def next_ending(self) -> Ending:
        return Ending(self._cell, attempt(self._cell, self.on_batch))

    def stop(self) -> None:
        pass

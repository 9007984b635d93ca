"""Whom a stream is computed with: by default nobody.

A model has a ``company``. What a step asks of it is in :mod:`ctta.whole_batch`; here is what is done around steps, by
the model itself, by saving and by whoever sends streams through it. :mod:`ctta.distributed` has the company of several
processes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class Alone:
    """One process, which gets every batch whole."""

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes files."""
        return True

    @contextmanager
    def step(self, model: Any, x: Tensor) -> Iterator[Tensor]:
        """Around a step: checks the input, and gives the rows to compute on; none, where the whole batch is empty."""
        model.check_input(x)
        yield x

    def rows(self, count: int) -> slice:
        """Which rows of a batch of so many this process is to be called with."""
        return slice(None)

    def all_rows(self, here: Tensor) -> Tensor:
        """What was computed for the rows of all processes, from that for this one's."""
        return here

    def of_each_part(self, action: Callable[[], T]) -> list[T]:
        """What an action gives for the rows of each process, in the order of the rows; plain JSON."""
        return [action()]

    def of_the_first(self, action: Callable[[], T]) -> T:
        """What an action gives on the first process, which alone does it; plain JSON."""
        return action()

    def take_over(self, model: Any) -> None:
        """Give a model the state that it has on the first process."""


ALONE = Alone()

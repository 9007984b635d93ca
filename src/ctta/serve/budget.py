"""How much of its time a stream may spend on adapting."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SAVED_UP = 10.0  # seconds of wall time whose share may be spent at once


class TimeBudget:
    """A share of wall time, saved up while there is nothing to do.

    Args:
        share: seconds of adapting per second; None for as much as it takes.
        clock: tells the time.

    >>> now = 0.0
    >>> budget = TimeBudget(0.5, clock=lambda: now)
    >>> with budget.spending():
    ...     now = 20.0
    >>> budget.is_exhausted
    True
    >>> now = 60.0
    >>> budget.is_exhausted
    False
    """

    def __init__(self, share: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"the budget is a share of time above 0 and up to 1, got {share!r}")
        self.share, self._clock = share, clock
        self._credit, self._counted_at = SAVED_UP * (share or 0), clock()

    @property
    def is_exhausted(self) -> bool:
        """Whether the next update has to be left out."""
        if self.share is None:
            return False
        now = self._clock()
        self._credit = min(self._credit + (now - self._counted_at) * self.share, SAVED_UP * self.share)
        self._counted_at = now
        return self._credit <= 0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Around an update."""
        started = self._clock()
        try:
            yield
        finally:
            self._credit -= self._clock() - started

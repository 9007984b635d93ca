"""When to save a state: now and then, and seldom enough where that takes long."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

LARGEST_SHARE = 0.05  # of the time spent on saving


class SavingPace:
    """Says when the next save is due.

    Args:
        every: seconds between two saves; 0 for whenever asked.
    """

    def __init__(self, every: float) -> None:
        self.every, self._wait, self._saved_at = every, every, time.monotonic()

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._saved_at >= self._wait

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save, to see how long it takes."""
        started = time.monotonic()
        yield
        self._saved_at = time.monotonic()
        self._wait = max(self.every, (self._saved_at - started) / LARGEST_SHARE) if self.every else 0.0

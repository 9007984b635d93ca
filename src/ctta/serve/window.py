"""What a stream may use: a window of its last images, and a share of the time for updates."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ctta.errors import ConfigError

# Chosen by benchmarks/choose/window.py; see docs/results/choices.md.
DEFAULT_WINDOW_SIZE = 16
DEFAULT_BATCH_STATS = 0.5
DEFAULT_UPDATE_EVERY = 4  # images
MIN_BATCH_SIZE = 4  # images from which on their statistics beat the source's

MAX_SAVINGS = 10.0  # seconds of wall time whose budget can be saved up


class SampleWindow:
    """The newest images of a stream, oldest first, so that a single image has a batch to be normalized with.

    Args:
        size: Maximum number of images; with 0 every request is a batch by itself.
        update_every: Images between two updates; a request that fills the window always causes one.
    """

    def __init__(self, size: int, update_every: int) -> None:
        self.size, self.update_every = size, update_every
        self.images: Tensor | None = None
        self.num_since_update = 0

    def make_batch(self, x: Tensor) -> Tensor:
        """Return the new images, preceded by as many old ones of the same shape as the window has room for."""
        count = self._num_old(x)
        return x if self.images is None or not count else torch.cat([self.images[-count:].to(x), x])

    def is_large_enough(self, x: Tensor) -> bool:
        """Return whether the batch of new images can be normalized with its own statistics."""
        return self._num_old(x) + len(x) >= min(MIN_BATCH_SIZE, self.size)

    def _num_old(self, x: Tensor) -> int:
        if self.images is None or self.images.shape[1:] != x.shape[1:]:
            return 0
        return min(len(self.images), max(0, self.size - len(x)))

    def is_update_due(self, num_new: int) -> bool:
        """Return whether the stream should update once that many new images have arrived."""
        return self.num_since_update + num_new >= self.update_every

    def push(self, x: Tensor, *, updated: bool) -> None:
        """Add new images, and record whether the stream was updated."""
        if self.size:
            # A new tensor: copies of the window keep the old one.
            self.images = self.make_batch(x)[-self.size :].clone(memory_format=torch.contiguous_format)
        self.num_since_update = 0 if updated else self.num_since_update + len(x)

    def clear(self) -> None:
        """Remove all images."""
        self.images, self.num_since_update = None, 0


class TimeBudget:
    """A fraction of wall time that a stream may spend on updates; unused time is saved up to a limit.

    Args:
        fraction: Seconds of updates per second; None for no limit.
        clock: Returns the time in seconds.

    >>> now = 0.0
    >>> budget = TimeBudget(0.5, clock=lambda: now)
    >>> with budget.spend():
    ...     now = 20.0
    >>> budget.is_exhausted
    True
    >>> now = 60.0
    >>> budget.is_exhausted
    False
    """

    def __init__(self, fraction: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        if fraction is not None and not 0 < fraction <= 1:
            raise ConfigError(f"the time budget must be a fraction above 0 and up to 1, got {fraction!r}")
        self.fraction, self._clock = fraction, clock
        self._credit, self._counted_at = MAX_SAVINGS * (fraction or 0), clock()

    @property
    def is_exhausted(self) -> bool:
        """Whether the next update has to be skipped."""
        if self.fraction is None:
            return False
        now = self._clock()
        self._credit = min(self._credit + (now - self._counted_at) * self.fraction, MAX_SAVINGS * self.fraction)
        self._counted_at = now
        return self._credit <= 0

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Charge the time that the block takes."""
        started = self._clock()
        try:
            yield
        finally:
            self._credit -= self._clock() - started

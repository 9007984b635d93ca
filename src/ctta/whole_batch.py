"""What a step asks of its whole batch, of which this process may hold some rows only.

A method computes on the rows that it is given. Only where rows meet (a mean that it branches on, statistics, noise with
a value for every pixel, the sum of gradients) is the whole batch asked for, and it is asked here. By default the rows
at hand are all there are, and each answer is torch's own. :mod:`ctta.distributed` puts another :class:`WholeBatch` in
its place for the time of a step, so that neither methods nor layers know of other processes.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class WholeBatch:
    """The rows at hand are the whole batch, and all views of it are this process's to compute."""

    is_divided = False  # whether other processes hold further rows

    def total(self, count: int) -> int:
        """How many there are in the batch, where the rows at hand have so many."""
        return count

    def mean(self, here: Tensor) -> Tensor:
        """The mean over the batch, from that over the rows at hand; without gradient."""
        return here

    def all(self, truths: Tensor) -> bool:
        """Whether it holds for every row; a single truth is the batch's own."""
        return bool(truths.all())

    def any(self, truths: Tensor) -> bool:
        """Whether it holds for some row."""
        return bool(truths.any())

    def only(self, rows: Tensor) -> AbstractContextManager[None]:
        """Within, the batch is that of the chosen rows, which the caller picks out of those at hand."""
        return nullcontext()

    def var_mean(self, values: Tensor, axes: list[int]) -> tuple[Tensor, Tensor]:
        """Variance (divided by the number) and mean along these axes, of which one is the batch's; differentiable."""
        variance, mean = torch.var_mean(values, axes, correction=0, keepdim=True)
        return variance, mean

    def randn(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Normal noise for the rows at hand, each value decided by its place in the batch."""
        return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)

    def share_of(self, loss: Tensor) -> Tensor:
        """What the mean loss over the rows at hand adds to that of the batch."""
        return loss

    def add_up_gradients_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give each parameter the gradient of the batch's loss."""

    def own_views(self, views: Sequence[T]) -> Sequence[T]:
        """Those that this process computes; at least one, if there are any."""
        return views

    def sum_of_views(self, own: Tensor, num_views: int) -> Tensor:
        """The sum over all views, from that over this process's own."""
        return own


_WHOLE = WholeBatch()
#: Of the call and not of a model, since layers and views are asked too.
_current: ContextVar[WholeBatch] = ContextVar("_current", default=_WHOLE)


def whole_batch() -> WholeBatch:
    """The batch of the step that is going on."""
    return _current.get()


def is_being_shared() -> bool:
    """Whether a step that several processes share is going on."""
    return _current.get() is not _WHOLE


@contextmanager
def sharing(batch: WholeBatch) -> Iterator[None]:
    """Within, this is what :func:`whole_batch` gives."""
    token = _current.set(batch)
    try:
        yield
    finally:
        _current.reset(token)

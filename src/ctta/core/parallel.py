"""The call in progress, and the seam between one process and many.

A network is called on a batch, on views of it stacked, or on a part of it; :class:`Call` says on which, and whose
statistics count. A method computes on the rows it is given. Wherever rows interact (a mean that a gate compares,
BatchNorm statistics, per-pixel noise, the sum of gradients, the average over views) it asks :func:`current_reducer`.
What happens around a step (agreeing on an error, who writes files) is up to the model's :class:`Coordinator`. The
defaults here serve a single process and add nothing to torch's own results; :mod:`ctta.distributed` implements both on
``torch.distributed``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

T = TypeVar("T")


class Coordinator(ABC):
    """Coordinate the processes that compute one stream, around its steps."""

    @property
    @abstractmethod
    def is_rank_zero(self) -> bool:
        """Whether this process is the one that writes files."""

    @abstractmethod
    def fail_together(self) -> AbstractContextManager[None]:
        """Return a context that raises on every process if its body raises on one."""

    @abstractmethod
    def step(self, model: Any, x: Tensor) -> AbstractContextManager[Tensor]:
        """Return a context around one step that gives the rows to compute on; none if the whole batch is empty."""

    @abstractmethod
    def local_rows(self, num_rows: int) -> slice:
        """Return the rows of a batch of ``num_rows`` that this process must be called with."""

    @abstractmethod
    def all_gather(self, local: Tensor) -> Tensor:
        """Concatenate the rows of all processes in the order of the batch."""

    @abstractmethod
    def all_gather_object(self, action: Callable[[], T]) -> list[T]:
        """Run an action on every process and return the results in the order of the rows; they must be plain JSON."""

    @abstractmethod
    def run_on_rank_zero(self, action: Callable[[], T]) -> T:
        """Run an action on rank 0 only and return its result on every process; it must be plain JSON."""

    @abstractmethod
    def broadcast_state_(self, model: Any) -> None:
        """Give a model the state that it has on rank 0."""


class SingleProcess(Coordinator):
    """One process that gets every batch whole."""

    @property
    @override
    def is_rank_zero(self) -> bool:
        return True

    @override
    def fail_together(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def step(self, model: Any, x: Tensor) -> AbstractContextManager[Tensor]:
        return nullcontext(x)

    @override
    def local_rows(self, num_rows: int) -> slice:
        return slice(None)

    @override
    def all_gather(self, local: Tensor) -> Tensor:
        return local

    @override
    def all_gather_object(self, action: Callable[[], T]) -> list[T]:
        return [action()]

    @override
    def run_on_rank_zero(self, action: Callable[[], T]) -> T:
        return action()

    @override
    def broadcast_state_(self, model: Any) -> None:
        pass


SINGLE_PROCESS = SingleProcess()


class BatchReducer(ABC):
    """Reduce over the whole batch of a step, of which this process may hold only some rows."""

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Whether other processes hold further rows of the batch."""

    @abstractmethod
    def total_count(self, local: int) -> int:
        """Return how many elements the whole batch has if the local rows have ``local``."""

    @abstractmethod
    def mean(self, local: Tensor) -> Tensor:
        """Return the mean over the batch from the mean over the local rows, without gradient."""

    @abstractmethod
    def all(self, flags: Tensor) -> bool:
        """Return whether a flag is set for every row; a scalar flag already speaks for the batch."""

    @abstractmethod
    def any(self, flags: Tensor) -> bool:
        """Return whether a flag is set for at least one row."""

    @abstractmethod
    def max(self, local: Tensor) -> Tensor:
        """Return the elementwise maximum over the batch from that over the local rows, without gradient."""

    @abstractmethod
    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of the whole batch from the local ones; differentiable.

        A loss that is computed from all rows, equally on every process, gets the gradient that it has on one process.
        """

    @abstractmethod
    def local(self, rows: Tensor) -> Tensor:
        """Return the local rows of what was computed from :meth:`gather`; at least one row."""

    @abstractmethod
    def subset(self, rows: Tensor) -> AbstractContextManager[None]:
        """Return a context in which the batch consists of the local rows where the mask ``rows`` is set."""

    @abstractmethod
    def var_mean(self, values: Tensor, dim: list[int]) -> tuple[Tensor, Tensor]:
        """Return the biased variance and the mean over ``dim``, which includes the batch; differentiable."""

    @abstractmethod
    def randn_like(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Return normal noise for the local rows, each value determined by its position in the batch."""

    @abstractmethod
    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the contribution of the local mean loss to the batch's mean loss."""

    @abstractmethod
    def all_reduce_gradients_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give each parameter the gradient of the batch's loss."""

    @abstractmethod
    def local_views(self, views: Sequence[T]) -> Sequence[T]:
        """Return the views that this process computes; at least one if there are any."""

    @abstractmethod
    def sum_views(self, local: Tensor, num_views: int) -> Tensor:
        """Return the sum over all views from the sum over the local ones."""


class LocalReducer(BatchReducer):
    """The local rows are the whole batch, and every view is computed here."""

    @property
    @override
    def is_sharded(self) -> bool:
        return False

    @override
    def total_count(self, local: int) -> int:
        return local

    @override
    def mean(self, local: Tensor) -> Tensor:
        return local

    @override
    def all(self, flags: Tensor) -> bool:
        return read_flags(flags.all())[0]

    @override
    def any(self, flags: Tensor) -> bool:
        return read_flags(flags.any())[0]

    @override
    def max(self, local: Tensor) -> Tensor:
        return local

    @override
    def gather(self, rows: Tensor) -> Tensor:
        return rows

    @override
    def local(self, rows: Tensor) -> Tensor:
        return rows

    @override
    def subset(self, rows: Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def var_mean(self, values: Tensor, dim: list[int]) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(values, dim, correction=0, keepdim=True)
        return variance, mean

    @override
    def randn_like(self, values: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randn(values.shape, generator=generator, device=values.device, dtype=values.dtype)

    @override
    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss

    @override
    def all_reduce_gradients_(self, parameters: Sequence[nn.Parameter]) -> None:
        pass

    @override
    def local_views(self, views: Sequence[T]) -> Sequence[T]:
        return views

    @override
    def sum_views(self, local: Tensor, num_views: int) -> Tensor:
        return local


_LOCAL = LocalReducer()
#: The mean and the variance that each BatchNorm of a network normalized by.
RecordedStatistics = dict[nn.Module, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Call:
    """What a call of a network is about besides its input; layers, views and losses ask :func:`current_call`.

    These are properties of the call, not of a layer: a layer serves calls of any size, on any number of views.

    Attributes:
        reducer: How to reduce over the batch, of which other processes may hold rows.
        num_images: The images of the step in progress, however many rows reach a layer; None outside of a step.
        full_batch_size: The images that a full step is for, as a guard says; fewer take smaller steps. None for as many
            as the method says.
        num_parts: Treat the batch as this many equal parts, such as views, each normalized by its own batch statistics;
            None for one part.
        fraction: The fraction of the batch in every BatchNorm that uses batch statistics, whatever its own; with 0 it
            uses its running statistics. A layer that keeps none uses the batch's in any case. None for its own.
        record: Where each BatchNorm leaves what it normalizes by, in a call without gradients; None for nowhere.
        fixed_statistics: What a network recorded earlier, to blend with instead of the running statistics.
        is_tracking: Whether running statistics that follow the stream follow this batch.
        batch_facts: What a method tells norm hooks of its own about the batch, such as the predicted classes.
        features: Where the classifier leaves its input; None for nowhere.
        saved_models: States of models, by id, that a surrounding block restores if it fails.
        waiting_checks: Conditions on the input, each with what makes the error to raise if it does not hold, which wait
            for the next :func:`read_flags`; None if the input is checked at once.
    """

    reducer: BatchReducer = _LOCAL
    num_images: int | None = None
    full_batch_size: int | None = None
    num_parts: int | None = None
    fraction: float | None = None
    record: RecordedStatistics | None = None
    fixed_statistics: Mapping[nn.Module, tuple[Tensor, Tensor]] | None = None
    is_tracking: bool = False
    batch_facts: Any = None
    features: list[Tensor] | None = None
    saved_models: Mapping[int, Any] = field(default_factory=dict)
    waiting_checks: list[tuple[Tensor, Callable[[], Exception]]] | None = None

    @property
    def has_other_statistics(self) -> bool:
        """Whether statistics are others than those of the batch as a whole, or recorded."""
        return any(value is not None for value in (self.num_parts, self.fraction, self.record))


_NO_CALL = Call()
# A context variable rather than an argument, because hooks of layers ask for it, and threads share layers.
_current: ContextVar[Call] = ContextVar("_current", default=_NO_CALL)


def current_call() -> Call:
    """Return the call in progress."""
    return _current.get()


def current_reducer() -> BatchReducer:
    """Return the reducer of the step in progress."""
    return _current.get().reducer


@contextmanager
def change_call(**changes: Any) -> Iterator[None]:
    """Change fields of the :func:`current_call` within the context.

    Args:
        **changes: Fields of :class:`Call`.

    >>> with change_call(num_images=8):
    ...     current_call().num_images
    8
    """
    token = _current.set(replace(_current.get(), **changes))
    try:
        yield
    finally:
        _current.reset(token)


class StopPassError(Exception):
    """Raised by a hook to end a pass of which nothing else is needed; a network of several passes ends each of them."""


def check_flag(flag: Tensor, make_error: Callable[[], Exception]) -> None:
    """Raise an error unless a flag is set: at once, or with the next :func:`read_flags` of the step in progress.

    Args:
        flag: A boolean scalar on any device.
        make_error: Returns what to raise.
    """
    waiting = current_call().waiting_checks
    if waiting is not None:
        waiting.append((flag, make_error))
    elif not flag:
        raise make_error()


def read(*tensors: Tensor) -> list[Tensor]:
    """Read tensors on the host in one transfer, together with the checks that wait for it.

    An accelerator stalls at each read, so a step reads what it needs at once.

    Args:
        *tensors: Tensors of any shapes and dtypes.

    Returns:
        The tensors on the CPU, without a graph; those that are there already are not copied.

    Raises:
        Exception: The error of a check that does not hold.
    """
    waiting = current_call().waiting_checks or []
    pending = [*(flag for flag, _ in waiting), *(tensor.detach() for tensor in tensors)]
    elsewhere = [tensor for tensor in pending if tensor.device.type != "cpu"]
    if elsewhere:
        # As bytes, since a common dtype would round: of an integer and a bfloat16 it is bfloat16.
        parts = [tensor.reshape(-1).view(torch.uint8).to(elsewhere[0].device) for tensor in elsewhere]
        copied = iter(torch.cat(parts).cpu().split([len(part) for part in parts]))
        pending = [
            tensor if tensor.device.type == "cpu" else next(copied).clone().view(tensor.dtype).view(tensor.shape)
            for tensor in pending
        ]
    checks = [make_error for _, make_error in waiting]
    waiting.clear()
    for make_error, holds in zip(checks, pending, strict=False):
        if not holds:
            raise make_error()
    return pending[len(checks) :]


def read_flags(*flags: Tensor) -> list[bool]:
    """Return the values of boolean scalars, see :func:`read`.

    Args:
        *flags: The scalars.
    """
    return [bool(flag) for flag in read(*flags)]


def in_shared_step() -> bool:
    """Return whether a step that several processes share is in progress."""
    return current_reducer() is not _LOCAL


def replicated() -> AbstractContextManager[None]:
    """Let every process compute the same thing within the context, such as a step on a memory that all of them hold.

    Nothing is reduced there: a batch consists of the given rows alone.
    """
    return change_call(reducer=LocalReducer())  # not the default itself, since the surrounding step is still shared

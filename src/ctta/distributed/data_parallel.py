"""One stream that several ranks compute together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from ctta.core.model import AdaptiveModel
from ctta.core.parallel import BatchReducer, Coordinator, change_call, in_shared_step
from ctta.core.validation import check_choice, check_integer
from ctta.distributed.collectives import (
    TIMEOUT,
    DistributedError,
    all_gather_object,
    all_gather_rows,
    all_gather_stack,
    broadcast_first_row,
    init,
    local_rows,
    rank,
    run_on_rank_zero,
    shutdown,
    world_size,
)
from ctta.distributed.consistency import broadcast_model_, checksum, compare_checksums, hash_repr, sum_bits
from ctta.distributed.reducers import ShardedReducer, ViewShardedReducer
from ctta.errors import ConfigError, InputError
from ctta.nn import has_running_statistics

T = TypeVar("T")
Model = TypeVar("Model", bound=AdaptiveModel)


def data_parallel(
    model: Model, *, shard: Literal["batch", "views"] = "batch", check_every: int = 100, timeout: float = TIMEOUT
) -> Model:
    """Let the ranks of ``torchrun`` compute one stream together; results equal those of one process up to rounding.

    The model starts on every rank from rank 0's state. From then on all ranks call it together, each with its rows of
    every batch (see :func:`ctta.distributed.shard`; their numbers may differ, and may be 0), and get the logits of
    these rows. Without ``torchrun``, a process has all rows, and nothing changes.

    Args:
        model: Model of any method, built alike on every rank.
        shard: What the ranks divide: the rows of a ``"batch"``, or the ``"views"`` that CoTTA and TestAug average over.
            With ``"views"``, every rank is called with the whole batch, and gets all logits.
        check_every: Number of steps after which the weights of all ranks are compared; a difference stops all ranks.
        timeout: Seconds after which a rank that does not answer is considered lost; has an effect only in the first
            call, which joins the process group.

    Returns:
        The same model.

    Raises:
        TypeError: If it is not an adaptive model.
        ConfigError: If this model cannot be computed by several ranks.
        DistributedError: If the ranks have built different models.

    >>> import ctta
    >>> model = data_parallel(ctta.Tent(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))))
    >>> model(ctta.distributed.shard(torch.randn(8, 4))).shape
    torch.Size([8, 3])
    """
    if not isinstance(model, AdaptiveModel):
        raise TypeError(f"data_parallel takes an adaptive model, such as ctta.CoTTA(net), got {type(model).__name__}")
    check_choice("shard", shard, ("batch", "views"))
    check_integer("check_every", check_every, 1)
    if shard == "batch" and not has_running_statistics(model.source):
        raise ConfigError(
            "a BatchNorm layer has no running statistics, without which batch statistics cannot be combined over "
            "ranks: use shard='views', or layers with track_running_stats=True"
        )
    init(timeout)
    if world_size() > 1:
        if not model.supports_data_parallel:
            raise ConfigError(
                f"a {type(model).__name__} model decides by its local rows, so ranks would disagree: use data_parallel "
                "on the model inside it, or run it on one process"
            )
        model.coordinator = ProcessGroup(shard, check_every)
        model.coordinator.broadcast_state_(model)
    return model


@dataclass(frozen=True)
class ProcessGroup(Coordinator):
    """The processes of ``torchrun``; see :func:`data_parallel`.

    Attributes:
        shard: What the ranks divide.
        check_every: Number of steps between two comparisons of the weights.
    """

    shard: Literal["batch", "views"]
    check_every: int

    @property
    @override
    def is_rank_zero(self) -> bool:
        return rank() == 0

    @contextmanager
    @override
    def fail_together(self) -> Iterator[None]:
        if in_shared_step():  # the rows were checked with the step
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        succeeded = all_gather_stack(torch.tensor(int(failure is None))).tolist()
        if failure is not None:
            raise failure
        if not all(succeeded):
            raise InputError(f"rank {succeeded.index(0)} was given a bad batch; no rank predicted or changed anything")

    @contextmanager
    @override
    def step(self, model: Any, x: Tensor) -> Iterator[Tensor]:
        if in_shared_step():  # a step within a step, on the same rows
            yield x
            return
        sizes = self._agree_on_sizes(model, x)
        if sum(sizes) == 0:
            yield x
            return
        # A rank without rows computes on a row of another rank, since the network may fail on made-up values.
        rows = x if all(sizes) else broadcast_first_row(next(i for i, count in enumerate(sizes) if count), x)
        reducer: BatchReducer = ShardedReducer(sizes) if self.shard == "batch" else ViewShardedReducer()
        try:
            with change_call(reducer=reducer):
                yield x if len(x) else rows
        except BaseException:
            # The other ranks may be anywhere in the step; once this one has left, their next collective fails at once.
            shutdown()
            raise

    @override
    def local_rows(self, num_rows: int) -> slice:
        return local_rows(num_rows) if self.shard == "batch" else slice(None)

    @override
    def all_gather(self, local: Tensor) -> Tensor:
        return all_gather_rows(local) if self.shard == "batch" else local

    @override
    def all_gather_object(self, action: Callable[[], T]) -> list[T]:
        results = all_gather_object(action)
        return results if self.shard == "batch" else results[:1]

    @override
    def run_on_rank_zero(self, action: Callable[[], T]) -> T:
        return run_on_rank_zero(action)

    @override
    def broadcast_state_(self, model: Any) -> None:
        broadcast_model_(model)

    def _agree_on_sizes(self, model: AdaptiveModel, x: Tensor) -> tuple[int, ...]:
        """Return the number of rows of each rank, after checking that all ranks are at the same step."""
        # A frozen model stays at its step, so that it would be checked at every call.
        is_check_due = model.num_steps % self.check_every == 0 and not model.frozen
        values = sum_bits(x) if self.shard == "views" else 0
        layout = hash_repr((x.dtype, x.shape[1:]))
        local = [len(x), layout, values, model.num_steps, checksum(model) if is_check_due else 0]
        gathered = all_gather_stack(torch.tensor(local)).tolist()
        sizes, layouts, values_of_ranks, steps, checksums = zip(*gathered, strict=True)
        if len(set(layouts)) > 1:
            raise InputError(
                f"the ranks were given rows of different shapes or dtypes (this rank {tuple(x.shape)} {x.dtype}): "
                "shard the same batch on every rank"
            )
        if len(set(steps)) > 1:
            raise DistributedError(f"the ranks are at different steps {steps}: all ranks must call the model together")
        compare_checksums(list(checksums), model.num_steps)
        if self.shard == "views" and len(set(sizes)) > 1:
            raise InputError(f"with shard='views' every rank takes the whole batch, got {sizes} rows")
        if len(set(values_of_ranks)) > 1:
            raise InputError(
                "with shard='views' every rank takes the whole batch, and the ranks were given different ones: call "
                "model(x), not model(shard(x))"
            )
        return sizes

"""One stream on several ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ctta.base import AdaptiveModel
from ctta.distributed.collectives import (
    all_gather_object,
    all_gather_rows,
    all_gather_stack,
    broadcast_row,
    run_on_rank_zero,
)
from ctta.distributed.consistency import checksum, copy_from_first_rank_, digest, raise_unless_same, sum_of_bits
from ctta.distributed.process_group import TIMEOUT, DistributedError, init, rank, shutdown, world_size
from ctta.distributed.reducers import ShardedReducer, ViewShardedReducer
from ctta.errors import ConfigError, InputError
from ctta.norms import has_running_statistics
from ctta.parallel import BatchReducer, Coordinator, in_shared_step, use_reducer
from ctta.validation import check_choice, check_integer

T = TypeVar("T")
Model = TypeVar("Model", bound=AdaptiveModel)


def data_parallel(
    model: Model, *, shard: Literal["batch", "views"] = "batch", check_every: int = 100, timeout: float = TIMEOUT
) -> Model:
    """Let the ranks of ``torchrun`` compute one stream together; but for rounding, all is as on one process.

    The model is returned, and starts on every rank from rank 0's state. From then on all ranks call it together, each
    with its rows of every batch (see :func:`ctta.distributed.shard`; their numbers may differ, and may be 0), and get
    the predictions of these rows. By itself, without ``torchrun``, a process has all rows, and nothing changes.

    Args:
        model: of any method, built alike on every rank.
        shard: what the ranks divide: the rows of a ``"batch"``, or the ``"views"`` that CoTTA and TestAug average over.
            Then every rank is called with the whole batch, and gets all predictions.
        check_every: after so many steps, the weights of all ranks are compared; a difference ends them all.
        timeout: seconds to wait for a rank that does not answer; of the first call, which joins the ranks.

    >>> import ctta
    >>> model = data_parallel(ctta.Tent(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))))
    >>> model(ctta.distributed.shard(torch.randn(8, 4))).shape
    torch.Size([8, 3])
    """
    if not isinstance(model, AdaptiveModel):
        raise TypeError(f"data_parallel takes a model that adapts, such as ctta.CoTTA(net), got {type(model).__name__}")
    check_choice("shard", shard, ("batch", "views"))
    check_integer("check_every", check_every, 1)
    if shard == "batch" and not has_running_statistics(model.source):
        raise ValueError(
            "a BatchNorm layer keeps no running statistics, and without them the batch's cannot be put together from "
            "several ranks: use shard='views', or layers with track_running_stats=True"
        )
    init(timeout)
    if world_size() > 1:
        if not model.supports_data_parallel:
            raise ConfigError(
                f"a {type(model).__name__} model decides by the rows of its own process, so ranks would decide "
                "differently: share the model inside it without it, or run it on one process"
            )
        model.coordinator = ProcessGroup(shard, check_every)
        model.coordinator.broadcast_state_(model)
    return model


@dataclass(frozen=True)
class ProcessGroup(Coordinator):
    """The processes of ``torchrun``; see :func:`data_parallel`."""

    shard: Literal["batch", "views"]
    check_every: int

    @property
    def is_rank_zero(self) -> bool:
        return rank() == 0

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        if in_shared_step():  # within a step, on rows that were checked with it
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
            raise InputError(
                f"rank {succeeded.index(0)} was given a bad batch, so no rank predicted or changed anything"
            )

    @contextmanager
    def step(self, model: Any, x: Tensor) -> Iterator[Tensor]:
        if in_shared_step():  # a step within a step, on the same rows
            yield x
            return
        sizes = self._agreed_sizes(model, x)
        if sum(sizes) == 0:
            yield x
            return
        # A rank without rows computes on one of another's: made-up values might be none that the network can take.
        rows = x if all(sizes) else broadcast_row(next(number for number, count in enumerate(sizes) if count), x)
        reducer: BatchReducer = ShardedReducer(sizes) if self.shard == "batch" else ViewShardedReducer()
        try:
            with use_reducer(reducer):
                yield x if len(x) else rows
        except BaseException:
            # The others may be anywhere in the step; without this rank they find out at once, and need not wait for it.
            shutdown()
            raise

    def local_rows(self, num_rows: int) -> slice:
        return local_rows(num_rows) if self.shard == "batch" else slice(None)

    def all_gather(self, local: Tensor) -> Tensor:
        return all_gather_rows(local) if self.shard == "batch" else local

    def all_gather_object(self, action: Callable[[], T]) -> list[T]:
        found = all_gather_object(action)
        return found if self.shard == "batch" else found[:1]

    def run_on_rank_zero(self, action: Callable[[], T]) -> T:
        return run_on_rank_zero(action)

    def broadcast_state_(self, model: Any) -> None:
        copy_from_first_rank_(model)

    def _agreed_sizes(self, model: AdaptiveModel, x: Tensor) -> tuple[int, ...]:
        """How many rows each rank has, once all are known to be at the same step."""
        # A frozen model stays at its step, so it would be due at every call.
        is_due = model.num_steps % self.check_every == 0 and not model.frozen
        values = sum_of_bits(x) if self.shard == "views" else 0
        kind = digest((x.dtype, x.shape[1:]))
        local = [len(x), kind, values, model.num_steps, checksum(model) if is_due else 0]
        gathered = all_gather_stack(torch.tensor(local)).tolist()
        sizes, kinds, values_of_ranks, steps, checksums = zip(*gathered, strict=True)
        if len(set(kinds)) > 1:
            raise ValueError(
                f"the ranks were given rows of different shapes or dtypes (here {tuple(x.shape)} {x.dtype}), and one "
                "batch has one: cut the same batch on every rank"
            )
        if len(set(steps)) > 1:
            raise DistributedError(f"the ranks are at different steps {steps}: all must call the model together")
        raise_unless_same(list(checksums), model.num_steps)
        if self.shard == "views" and len(set(sizes)) > 1:
            raise ValueError(f"with shard='views' every rank gets the whole batch, got {sizes} rows")
        if len(set(values_of_ranks)) > 1:
            raise ValueError(
                "with shard='views' every rank gets the whole batch, and the ranks were given different ones: call "
                "model(x), not model(shard(x))"
            )
        return sizes


def local_rows(count: int) -> slice:
    """Of a batch of so many rows, those of this rank; no rank has more than one above another."""
    each, left = divmod(count, world_size())
    start = rank() * each + min(rank(), left)
    return slice(start, start + each + (rank() < left))

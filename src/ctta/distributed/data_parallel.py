"""One stream on several ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ctta.base import AdaptiveModel
from ctta.company import Alone
from ctta.distributed.exchange import gathered, gathered_rows, of_the_first, outcomes, row_from
from ctta.distributed.part_of_batch import PartOfBatch
from ctta.distributed.same_state import checksum, copy_from_first_rank_, digest, raise_unless_same, sum_of_bits
from ctta.distributed.share_of_views import ShareOfViews
from ctta.distributed.world import TIMEOUT, DistributedError, join, leave, rank, size
from ctta.guard import Guarded
from ctta.norms import keeps_running_statistics
from ctta.validation import check_choice, whole_number
from ctta.whole_batch import WholeBatch, is_being_shared, sharing

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
    whole_number("check_every", check_every, 1)
    if shard == "batch" and not keeps_running_statistics(model.source):
        raise ValueError(
            "a BatchNorm layer keeps no running statistics, and without them the batch's cannot be put together from "
            "several ranks: use shard='views', or layers with track_running_stats=True"
        )
    join(timeout)
    if size() > 1:
        if isinstance(model, Guarded):
            raise ValueError(
                "a guard judges by the rows of its own process, so ranks would decide differently: share the method "
                "without it, or run the guarded model on one process"
            )
        model.company = Ranks(shard, check_every)
        model.company.take_over(model)
    return model


@dataclass(frozen=True)
class Ranks(Alone):
    """The processes of ``torchrun``; see :func:`data_parallel`."""

    shard: Literal["batch", "views"]
    check_every: int

    @property
    def is_first(self) -> bool:
        return rank() == 0

    @contextmanager
    def step(self, model: Any, x: Tensor) -> Iterator[Tensor]:
        if is_being_shared():  # a step within a step, on the same rows
            yield x
            return
        sizes = self._agreed_sizes(model, x)
        if sum(sizes) == 0:
            yield x
            return
        # A rank without rows computes on one of another's: made-up values might be none that the network can take.
        rows = x if all(sizes) else row_from(next(number for number, count in enumerate(sizes) if count), x)
        batch: WholeBatch = PartOfBatch(sizes) if self.shard == "batch" else ShareOfViews()
        try:
            with sharing(batch):
                yield x if len(x) else rows
        except BaseException:
            # The others may be anywhere in the step; without this rank they find out at once, and need not wait for it.
            leave()
            raise

    def rows(self, count: int) -> slice:
        return own_rows(count) if self.shard == "batch" else slice(None)

    def all_rows(self, here: Tensor) -> Tensor:
        return gathered_rows(here) if self.shard == "batch" else here

    def of_each_part(self, action: Callable[[], T]) -> list[T]:
        found = outcomes(action)
        return found if self.shard == "batch" else found[:1]

    def of_the_first(self, action: Callable[[], T]) -> T:
        return of_the_first(action)

    def take_over(self, model: Any) -> None:
        copy_from_first_rank_(model)

    def _agreed_sizes(self, model: AdaptiveModel, x: Tensor) -> tuple[int, ...]:
        """How many rows each rank has, once all have found theirs good and are at the same step."""
        refusal: Exception | None = None
        told = [0] * 6
        try:
            model.check_input(x)
            # A frozen model stays at its step, so it would be due at every call.
            is_due = model.num_steps % self.check_every == 0 and not model.frozen
            values = sum_of_bits(x) if self.shard == "views" else 0
            kind = digest((x.dtype, x.shape[1:]))
            told = [1, len(x), kind, values, model.num_steps, checksum(model) if is_due else 0]
        except Exception as error:
            refusal = error
        rows = gathered(torch.tensor(told)).tolist()
        if refusal is not None:
            raise refusal
        accepts, sizes, kinds, values_of_ranks, steps, checksums = zip(*rows, strict=True)
        if not all(accepts):
            raise ValueError(f"rank {accepts.index(0)} was given a bad batch, so no rank predicted or changed anything")
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


def own_rows(count: int) -> slice:
    """Of a batch of so many rows, those of this rank; no rank has more than one above another."""
    each, left = divmod(count, size())
    start = rank() * each + min(rank(), left)
    return slice(start, start + each + (rank() < left))

"""Reducers over ranks: the rows of a batch, or the views of a batch, divided among them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from ctta.distributed.collectives import all_gather_stack, all_gather_with_grad, all_reduce_sum
from ctta.distributed.process_group import rank, world_size
from ctta.parallel import LocalReducer, use_reducer

T = TypeVar("T")
BUCKET = 1 << 23  # gradient values that travel together: what is copied at a time stays small


@dataclass(frozen=True)
class ShardedReducer(LocalReducer):
    """This rank's rows of the batch.

    A rank without any computes on a row of another's all the same, so that it comes to the same exchanges, and that row
    counts nothing: in means, statistics and gradients a rank weighs as much as it has rows. All rows of a batch have
    the same number of elements, so weighing by rows weighs pixels rightly too.
    """

    sizes: tuple[int, ...]  # rows of each rank

    @property
    def is_sharded(self) -> bool:
        return True

    @property
    def here(self) -> int:
        """How many rows of the batch are on this rank."""
        return self.sizes[rank()]

    def total_count(self, local: int) -> int:
        return local // max(1, self.here) * sum(self.sizes)

    def mean(self, local: Tensor) -> Tensor:
        weighted = local.double() * self.here if self.here else torch.zeros_like(local, dtype=torch.float64)
        return (all_reduce_sum(weighted) / sum(self.sizes)).to(local.dtype)

    def all(self, flags: Tensor) -> bool:
        return not self.any(~flags)

    def any(self, flags: Tensor) -> bool:
        if flags.ndim == 0:
            return bool(flags)
        return bool(all_gather_stack(flags[: self.here].any().long()).any())

    @contextmanager
    def subset(self, rows: Tensor) -> Iterator[None]:
        counts = all_gather_stack(rows[: self.here].sum()).tolist()
        with use_reducer(ShardedReducer(tuple(counts))):
            yield

    def var_mean(self, values: Tensor, dim: list[int]) -> tuple[Tensor, Tensor]:
        variances, means = all_gather_with_grad(torch.stack(super().var_mean(values, dim))).unbind(1)
        weights = torch.tensor(self.sizes).to(means).div_(sum(self.sizes)).view(-1, *[1] * (means.ndim - 1))
        mean = (weights * means).sum(0)
        # Within ranks and between them, rather than by sums of squares, which cancel where the mean is large.
        return (weights * (variances + (means - mean).square())).sum(0), mean

    def randn_like(self, values: Tensor, generator: torch.Generator) -> Tensor:
        if self.here == 0:
            return torch.zeros_like(values)
        whole = torch.randn(
            (sum(self.sizes), *values.shape[1:]), generator=generator, device=values.device, dtype=values.dtype
        )
        return whole.narrow(0, sum(self.sizes[: rank()]), self.here)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * (self.here / sum(self.sizes))

    def all_reduce_gradients_(self, parameters: Sequence[nn.Parameter]) -> None:
        device = parameters[0].device
        # A parameter without gradient on every rank keeps none: for an optimiser that is not the same as zero.
        used = all_reduce_sum(torch.tensor([parameter.grad is not None for parameter in parameters]).long().to(device))
        trained = [parameter for parameter, count in zip(parameters, used.tolist(), strict=True) if count]
        for bucket in buckets(trained):
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            total = all_reduce_sum(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))


def buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters in order, cut where the device or dtype changes or a bucket is full."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        is_full = sum(each.numel() for each in bucket) + parameter.numel() > BUCKET
        if bucket and (is_full or (parameter.device, parameter.dtype) != (bucket[0].device, bucket[0].dtype)):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


class ViewShardedReducer(LocalReducer):
    """Every so many-th view is this rank's; all else each rank does for itself, and comes to the same.

    In turns and not in runs, because views that follow each other, as scales do, cost about the same.
    """

    def local_views(self, views: Sequence[T]) -> Sequence[T]:
        # A rank without view takes the first: only so does it know the shape of an answer.
        return views[rank() :: world_size()] or views[:1]

    def sum_views(self, local: Tensor, num_views: int) -> Tensor:
        return all_reduce_sum(local if rank() < num_views else local.zero_())

"""Reducers for ranks that divide the rows, or the views, of a batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.parallel import LocalReducer, change_call
from ctta.distributed.collectives import all_gather_stack, all_gather_with_grad, all_reduce_sum, rank, world_size

T = TypeVar("T")
BUCKET_SIZE = 1 << 23  # gradient values per collective, which bounds the memory of the copies


@dataclass(frozen=True)
class ShardedReducer(LocalReducer):
    """Reduce over ranks that each hold some rows of the batch.

    A rank without rows computes on a row of another rank, so that it takes part in the same collectives, and that row
    has weight zero: in means, statistics and gradients a rank is weighted by its number of rows. All rows of a batch
    have the same number of elements, so that this weights pixels correctly too.

    Attributes:
        sizes: Number of rows of each rank.
    """

    sizes: tuple[int, ...]

    @property
    @override
    def is_sharded(self) -> bool:
        return True

    @property
    def num_local(self) -> int:
        """Number of rows of this rank."""
        return self.sizes[rank()]

    @override
    def total_count(self, local: int) -> int:
        return local // max(1, self.num_local) * sum(self.sizes)

    @override
    def mean(self, local: Tensor) -> Tensor:
        weighted = local.double() * self.num_local if self.num_local else torch.zeros_like(local, dtype=torch.float64)
        return (all_reduce_sum(weighted) / sum(self.sizes)).to(local.dtype)

    @override
    def all(self, flags: Tensor) -> bool:
        return not self.any(~flags)

    @override
    def any(self, flags: Tensor) -> bool:
        if flags.ndim == 0:
            return bool(flags)
        return bool(all_gather_stack(flags[: self.num_local].any().long()).any())

    @override
    def max(self, local: Tensor) -> Tensor:
        return all_gather_stack(local if self.num_local else torch.full_like(local, -torch.inf)).amax(0)

    @override
    def gather(self, rows: Tensor) -> Tensor:
        rows = rows[: self.num_local]
        missing = rows.new_zeros(max(self.sizes) - len(rows), *rows.shape[1:])
        parts = all_gather_with_grad(torch.cat([rows, missing]))
        return torch.cat([part[:size] for part, size in zip(parts, self.sizes, strict=True)])

    @override
    def local(self, rows: Tensor) -> Tensor:
        # A rank without rows needs one for the shape of its result.
        return rows.narrow(0, sum(self.sizes[: rank()]), self.num_local) if self.num_local else rows[:1]

    @contextmanager
    @override
    def subset(self, rows: Tensor) -> Iterator[None]:
        counts = all_gather_stack(rows[: self.num_local].sum()).tolist()
        with change_call(reducer=ShardedReducer(tuple(counts))):
            yield

    @override
    def var_mean(self, values: Tensor, dim: list[int]) -> tuple[Tensor, Tensor]:
        variances, means = all_gather_with_grad(torch.stack(super().var_mean(values, dim))).unbind(1)
        weights = torch.tensor(self.sizes).to(means).div_(sum(self.sizes)).view(-1, *[1] * (means.ndim - 1))
        mean = (weights * means).sum(0)
        # Variance within plus variance between ranks; sums of squares would cancel where the mean is large.
        return (weights * (variances + (means - mean).square())).sum(0), mean

    @override
    def randn_like(self, values: Tensor, generator: torch.Generator) -> Tensor:
        if self.num_local == 0:
            return torch.zeros_like(values)
        # For the whole batch, so that a row gets the same noise on any number of ranks.
        noise = torch.randn(
            (sum(self.sizes), *values.shape[1:]), generator=generator, device=values.device, dtype=values.dtype
        )
        return noise.narrow(0, sum(self.sizes[: rank()]), self.num_local)

    @override
    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * (self.num_local / sum(self.sizes))

    @override
    def all_reduce_gradients_(self, parameters: Sequence[nn.Parameter]) -> None:
        device = parameters[0].device
        # A parameter without gradient on every rank keeps none: for an optimizer that differs from zero.
        used = all_reduce_sum(torch.tensor([parameter.grad is not None for parameter in parameters]).long().to(device))
        trained = [parameter for parameter, count in zip(parameters, used.tolist(), strict=True) if count]
        for bucket in split_into_buckets(trained):
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            total = all_reduce_sum(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))


def split_into_buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters in order, split where the device or dtype changes or a bucket is full."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        is_full = sum(each.numel() for each in bucket) + parameter.numel() > BUCKET_SIZE
        if bucket and (is_full or (parameter.device, parameter.dtype) != (bucket[0].device, bucket[0].dtype)):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


class ViewShardedReducer(LocalReducer):
    """Divide the views among ranks that all hold the whole batch; everything else is computed by every rank alike.

    Rank r of n takes every n-th view from the r-th on, rather than consecutive ones, because neighbors, such as scales,
    cost about the same.
    """

    @override
    def local_views(self, views: Sequence[T]) -> Sequence[T]:
        # A rank without views computes the first one, which it needs for the shape of the result.
        return views[rank() :: world_size()] or views[:1]

    @override
    def sum_views(self, local: Tensor, num_views: int) -> Tensor:
        return all_reduce_sum(local if rank() < num_views else local.zero_())

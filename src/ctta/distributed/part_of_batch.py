"""A batch whose rows lie on several ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ctta.distributed.exchange import all_gather, gathered, summed
from ctta.distributed.world import rank
from ctta.whole_batch import WholeBatch, sharing

BUCKET = 1 << 23  # gradient values that travel together: what is copied at a time stays small


@dataclass(frozen=True)
class PartOfBatch(WholeBatch):
    """This rank's rows of the batch.

    A rank without any computes on a row of another's all the same, so that it comes to the same exchanges, and that row
    counts nothing: in means, statistics and gradients a rank weighs as much as it has rows. All rows of a batch have
    the same number of elements, so weighing by rows weighs pixels rightly too.
    """

    sizes: tuple[int, ...]  # rows of each rank

    is_divided = True

    @property
    def here(self) -> int:
        """How many rows of the batch are on this rank."""
        return self.sizes[rank()]

    def total(self, count: int) -> int:
        return count // max(1, self.here) * sum(self.sizes)

    def mean(self, here: Tensor) -> Tensor:
        weighted = here.double() * self.here if self.here else torch.zeros_like(here, dtype=torch.float64)
        return (summed(weighted) / sum(self.sizes)).to(here.dtype)

    def all(self, truths: Tensor) -> bool:
        return not self.any(~truths)

    def any(self, truths: Tensor) -> bool:
        if truths.ndim == 0:
            return bool(truths)
        return bool(gathered(truths[: self.here].any().long()).any())

    @contextmanager
    def only(self, rows: Tensor) -> Iterator[None]:
        counts = gathered(rows[: self.here].sum()).tolist()
        with sharing(PartOfBatch(tuple(counts))):
            yield

    def var_mean(self, values: Tensor, axes: list[int]) -> tuple[Tensor, Tensor]:
        variances, means = all_gather(torch.stack(super().var_mean(values, axes))).unbind(1)
        weights = torch.tensor(self.sizes).to(means).div_(sum(self.sizes)).view(-1, *[1] * (means.ndim - 1))
        mean = (weights * means).sum(0)
        # Within ranks and between them, rather than by sums of squares, which cancel where the mean is large.
        return (weights * (variances + (means - mean).square())).sum(0), mean

    def randn(self, like: Tensor, generator: torch.Generator) -> Tensor:
        if self.here == 0:
            return torch.zeros_like(like)
        whole = torch.randn(
            (sum(self.sizes), *like.shape[1:]), generator=generator, device=like.device, dtype=like.dtype
        )
        return whole.narrow(0, sum(self.sizes[: rank()]), self.here)

    def share_of(self, loss: Tensor) -> Tensor:
        return loss * (self.here / sum(self.sizes))

    def add_up_gradients_(self, parameters: Sequence[nn.Parameter]) -> None:
        device = parameters[0].device
        # A parameter without gradient on every rank keeps none: for an optimiser that is not the same as zero.
        used = summed(torch.tensor([parameter.grad is not None for parameter in parameters]).long().to(device))
        trained = [parameter for parameter, count in zip(parameters, used.tolist(), strict=True) if count]
        for bucket in buckets(trained):
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            total = summed(torch.cat([gradient.reshape(-1) for gradient in gradients]))
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

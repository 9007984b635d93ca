"""Statistics of recent images, that replace the source's the more, the further they are from them (VANE)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ctta.nn import BatchStatistics, NormHook
from ctta.nn.moments import batch_var_mean, pass_with_gradient

#: The weight of earlier images in a new domain: they may have more classes than its first batch, but not its shift.
KEPT_AT_CHANGE = 0.25
# What the layers need to know about the batch in progress; None outside of a step.
_batch: ContextVar["FollowedBatch | None"] = ContextVar("_batch", default=None)


class FollowedBatch(NamedTuple):
    """A batch whose statistics count.

    Attributes:
        num_images: Its images.
        worth: How many images drawn independently they are worth: those of one class say little about the others.
        is_new_domain: Whether it begins a domain, for which the statistics of the images before count less.
        is_view: Whether this is a view of the batch, which the statistics do not remember.
    """

    num_images: int
    worth: float
    is_new_domain: bool = False
    is_view: bool = False


@contextmanager
def follow_shift(batch: FollowedBatch) -> Iterator[None]:
    """Let layers with :class:`ShiftStatistics` follow the batch, or a view of it, within the context."""
    token = _batch.set(batch)
    try:
        yield
    finally:
        _batch.reset(token)


class ShiftStatistics(NormHook, nn.Module):
    """A forward pre-hook of one BatchNorm that normalizes by statistics between the source's and those of the stream.

    Within :func:`follow_shift` it averages the statistics of recent images, each batch by its worth. The layer then
    normalizes by (1-m) * source + m * recent with m = d / (d + tolerance) * n / (n + prior), where d is the distance of
    the recent statistics from the source's, and n the worth of what they are made from. Outside of the context the
    layer normalizes by what it used last, its ``running_mean`` and ``running_var``.

    Args:
        module: The layer; its running statistics are the source's.
        tolerance: The distance at which the stream counts as much as the source.
        prior: How many images the source counts for.
        horizon: How many images the average remembers; more, where images depend on each other.
    """

    source_mean: Tensor
    source_var: Tensor
    mean: Tensor
    variance: Tensor
    worth: Tensor

    def __init__(self, module: _BatchNorm, tolerance: float, prior: float, horizon: float) -> None:
        super().__init__()
        assert module.running_mean is not None and module.running_var is not None, "checked when the method is built"
        self.tolerance, self.prior, self.horizon = tolerance, prior, horizon
        self.register_buffer("source_mean", module.running_mean.clone())
        self.register_buffer("source_var", module.running_var.clone())
        self.register_buffer("mean", module.running_mean.clone())
        self.register_buffer("variance", module.running_var.clone())
        self.register_buffer("worth", torch.zeros((), dtype=module.running_var.dtype))

    @override
    def forward(self, module: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        BatchStatistics.set_mode_(module, by_layer=False)
        if (batch := _batch.get()) is None:
            return None
        batch_variance, batch_mean = batch_var_mean(inputs[0].to(self.mean.dtype))
        # Between forgetting by images, as domains change, and by independent ones, as classes must balance.
        kept = math.exp(-math.sqrt(batch.num_images * batch.worth) / self.horizon) * self.worth
        if batch.is_new_domain:
            kept = KEPT_AT_CHANGE * kept
        share = batch.worth / (kept + batch.worth)
        old_mean, old_variance = self.mean.view_as(batch_mean), self.variance.view_as(batch_variance)
        mean = old_mean.lerp(batch_mean, share)
        between = share * (1 - share) * (batch_mean - old_mean).square()
        variance = old_variance.lerp(batch_variance, share) + between
        if not batch.is_view:
            self.mean, self.variance = mean.detach().flatten(), variance.detach().flatten()
            self.worth = kept + batch.worth
        fraction = self._weigh(mean.detach().flatten(), variance.detach().flatten(), kept + batch.worth)
        mean = self.source_mean.view_as(mean).lerp(mean, fraction)
        variance = self.source_var.view_as(variance).lerp(variance, fraction)
        # Replaced, not written to, since a graph may still need them.
        module.running_mean, module.running_var = mean.detach().flatten(), variance.detach().flatten()
        return pass_with_gradient(module, inputs, mean, variance)

    def _weigh(self, mean: Tensor, variance: Tensor, worth: Tensor) -> Tensor:
        """Return m, the fraction of recent statistics in those to normalize by."""
        tiny = torch.finfo(mean.dtype).tiny
        source_var = self.source_var.clamp_min(tiny)
        of_means = ((mean - self.source_mean).square() / source_var).mean()
        of_variances = (variance.clamp_min(tiny) / source_var).log().square().mean()
        distance = of_means + of_variances
        # A channel that is constant in the source may be at an infinite distance.
        weight = torch.where(distance.isinf(), 1.0, distance / (distance + self.tolerance).clamp_min(tiny))
        return weight * worth / (worth + self.prior)


def use_shift_statistics_(net: nn.Module, tolerance: float, prior: float, horizon: float) -> nn.ModuleList:
    """Let every BatchNorm with running statistics follow the shift; return the state, which the method must hold."""
    found = []
    for module in net.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            found.append(ShiftStatistics(module, tolerance, prior, horizon))
            module.register_forward_pre_hook(found[-1])
    return nn.ModuleList(found)

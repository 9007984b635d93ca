"""Statistics of recent images, whose weight beside the source's increases with their distance (VANE)."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ctta.core.parallel import change_call, current_call
from ctta.methods.vane.constants import OLD_DOMAIN_WEIGHT
from ctta.nn import BatchStatistics, NormHook, attach_norm_hooks_
from ctta.nn.moments import attach_statistics_gradient, batch_var_mean, image_var_mean
from ctta.nn.norm import unmask_running_statistics


class LayerState(NamedTuple):
    """The statistics of a layer after a batch.

    Attributes:
        mean: The mean of recent images (C).
        variance: Their variance (C).
        effective_sample_size: How many independent images they are made from.
        used_mean: The mean that the layer normalized by (C), between the source's and the recent one.
        used_variance: The variance likewise (C).
    """

    mean: Tensor
    variance: Tensor
    effective_sample_size: Tensor
    used_mean: Tensor
    used_variance: Tensor


@dataclass(frozen=True)
class FollowedBatch:
    """A batch whose statistics count.

    Attributes:
        num_images: Its images.
        effective_sample_size: How many independently drawn images they are worth: those of one class say little about
            the others.
        is_new_domain: Whether it begins a domain, for which the statistics of the images before count less.
        is_view: Whether this is a view of the batch, which the statistics do not remember.
        layers: The states of the layers after the batch, which each of them adds.
    """

    num_images: int
    effective_sample_size: float
    is_new_domain: bool = False
    is_view: bool = False
    layers: dict[nn.Module, LayerState] = field(default_factory=dict)


class StopPassError(Exception):
    """Raised to end a pass of which nothing else is needed."""


class MeasureDeviation(NormHook):
    """A forward pre-hook of the source's BatchNorms for :func:`measure_deviations`, which the first one answers."""

    @override
    def before(self, layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        found = current_call().batch_facts
        if not isinstance(found, list):
            return
        assert layer.running_mean is not None and layer.running_var is not None, "hooked with running statistics only"
        variance, mean = image_var_mean(inputs[0].detach().to(layer.running_mean.dtype))
        squared = (variance + (mean - layer.running_mean).square()) / (layer.running_var + layer.eps)
        found.append(squared.median(1).values)
        raise StopPassError


@torch.no_grad()
def measure_deviations(source: nn.Module, x: Tensor) -> Tensor:
    """Return how far each row of a batch is from what the source saw in training (N).

    It is the mean square of the values in the first BatchNorm about the source's mean, in units of its variance, of the
    median channel. The pass of the source ends there. It is the largest over the parts of a row, such as frames, and 0
    if no BatchNorm has a part of each row.
    """
    found: list[Tensor] = []
    with change_call(batch_facts=found), suppress(StopPassError):
        source(x)
    if not found or len(found[0]) % len(x):
        return x.new_zeros(len(x), dtype=torch.float32)
    return found[0].view(len(x), -1).amax(1)


class ShiftStatistics(NormHook, nn.Module):
    """A forward pre-hook of one BatchNorm that normalizes by statistics between the source's and those of the stream.

    In a call on a :class:`FollowedBatch` it averages the statistics of recent images, each batch by its effective
    sample size. The layer then normalizes by (1-m) * source + m * recent, m = d / (d + tolerance) * n / (n + prior),
    where d is the distance of the recent statistics from the source's, and n their effective sample size. A call
    changes nothing: :func:`store_layers_` takes over what the batch has collected. In other calls the layer normalizes
    by what was stored last, its ``running_mean`` and ``running_var``.

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
    worth: Tensor  # the effective sample size; files have it by this name

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
    def before(self, module: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        BatchStatistics.set_mode_(module, by_layer=False)
        unmask_running_statistics(module)
        batch = current_call().batch_facts
        if not isinstance(batch, FollowedBatch):
            return None
        old_mean, old_variance, old_size = self.mean, self.variance, self.worth
        if module in batch.layers:  # which the network uses twice
            old_mean, old_variance, old_size = batch.layers[module][:3]
        batch_variance, batch_mean = batch_var_mean(inputs[0].to(self.mean.dtype))
        size = batch.effective_sample_size
        # Between forgetting by images, as domains change, and by independent ones, as classes must balance.
        kept = math.exp(-math.sqrt(batch.num_images * size) / self.horizon) * old_size
        if batch.is_new_domain:
            kept = OLD_DOMAIN_WEIGHT * kept
        share = size / (kept + size)
        old_mean, old_variance = old_mean.view_as(batch_mean), old_variance.view_as(batch_variance)
        mean = old_mean.lerp(batch_mean, share)
        between = share * (1 - share) * (batch_mean - old_mean).square()
        variance = old_variance.lerp(batch_variance, share) + between
        recent = mean.detach().flatten(), variance.detach().flatten(), kept + size
        fraction = self._weigh(*recent)
        mean = self.source_mean.view_as(mean).lerp(mean, fraction)
        variance = self.source_var.view_as(variance).lerp(variance, fraction)
        used = mean.detach().flatten(), variance.detach().flatten()
        if not batch.is_view:
            batch.layers[module] = LayerState(*recent, *used)
        # Attributes hide the buffers of the same names for this call.
        vars(module).update(running_mean=used[0], running_var=used[1])
        return attach_statistics_gradient(module, inputs, mean, variance)

    @override
    def after(self, module: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        unmask_running_statistics(module)

    def _weigh(self, mean: Tensor, variance: Tensor, effective_sample_size: Tensor) -> Tensor:
        """Return m, the fraction of recent statistics in those to normalize by."""
        tiny = torch.finfo(mean.dtype).tiny
        source_var = self.source_var.clamp_min(tiny)
        of_means = ((mean - self.source_mean).square() / source_var).mean()
        of_variances = (variance.clamp_min(tiny) / source_var).log().square().mean()
        distance = of_means + of_variances
        # A channel that is constant in the source may be at an infinite distance.
        weight = torch.where(distance.isinf(), 1.0, distance / (distance + self.tolerance).clamp_min(tiny))
        return weight * effective_sample_size / (effective_sample_size + self.prior)


def use_shift_statistics_(net: nn.Module, tolerance: float, prior: float, horizon: float) -> nn.ModuleList:
    """Let every BatchNorm with running statistics follow the shift; return the state, which the method must hold."""
    return attach_norm_hooks_(
        net, lambda layer: ShiftStatistics(layer, tolerance, prior, horizon), skip_without_statistics=True
    )


def store_layers_(net: nn.Module, statistics: nn.ModuleList, layers: Mapping[nn.Module, LayerState]) -> None:
    """Take over the states of the layers after a batch; tensors are replaced, since a graph may still need them."""
    followed = [each for each in net.modules() if isinstance(each, _BatchNorm) and each.running_mean is not None]
    for module, hook in zip(followed, statistics, strict=True):
        if (state := layers.get(module)) is not None:
            hook.mean, hook.variance, hook.worth = state[:3]
            module.running_mean, module.running_var = state.used_mean, state.used_variance

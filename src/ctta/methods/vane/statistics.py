"""Statistics of recent images, which count beside the source's where they are far from these (VANE)."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ctta.core.parallel import StopPassError, change_call, current_call, current_reducer
from ctta.methods.vane.constants import LARGEST_MOVE
from ctta.nn import BatchStatistics, NormHook, attach_norm_hooks_
from ctta.nn.moments import attach_statistics_gradient, batch_var_mean, image_var_mean
from ctta.nn.norm import unmask_running_statistics


class LayerState(NamedTuple):
    """The statistics of a layer after a batch.

    Attributes:
        mean: The mean of recent images (C).
        variance: Their variance (C).
        scatter: How much the moments of one image scatter about these, in the unit of the distance.
        distance: The distance of these from the source's beyond what is expected without a shift.
        used_mean: The mean that the layer normalized by (C).
        used_variance: The variance likewise (C).
    """

    mean: Tensor
    variance: Tensor
    scatter: Tensor
    distance: Tensor
    used_mean: Tensor
    used_variance: Tensor


@dataclass(frozen=True)
class FollowedBatch:
    """A batch whose statistics count.

    Attributes:
        share: The share of the batch in the statistics of recent images.
        effective_sample_size: How many independently drawn images those are worth.
        fraction: How far every layer moves from the source's statistics toward the recent ones.
        is_view: Whether this is a view of the batch, which the statistics do not remember. It follows the batch itself.
        layers: The states of the layers after the batch, which each of them adds.
    """

    share: float
    effective_sample_size: float
    fraction: Tensor
    is_view: bool = False
    layers: dict[nn.Module, LayerState] = field(default_factory=dict)


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
    median channel. The pass of the source ends there. It is the largest over the parts of a row, such as frames or the
    windows of a large image, and 0 if no BatchNorm has a part of each row.
    """
    found: list[Tensor] = []
    with change_call(batch_facts=found), suppress(StopPassError):
        source(x)
    if not found or len(found[0]) % len(x):
        return x.new_zeros(len(x), dtype=torch.float32)
    return torch.stack(found).view(len(found), len(x), -1).amax((0, 2))


class ShiftStatistics(NormHook, nn.Module):
    """A forward pre-hook of one BatchNorm that normalizes by statistics between the source's and those of the stream.

    In a call on a :class:`FollowedBatch` it averages the statistics of recent images, each batch by its effective
    sample size. The layer then normalizes by (1-m) * source + m * recent, where m is the fraction of the batch, and
    measures how far the recent statistics are from the source's, beyond what is expected without a shift. A call
    changes nothing: :func:`store_layers_` takes over what the batch has collected. In other calls the layer normalizes
    by what was stored last, its ``running_mean`` and ``running_var``.

    Args:
        module: The layer; its running statistics are the source's.
    """

    source_mean: Tensor
    source_var: Tensor
    mean: Tensor
    variance: Tensor
    scatter: Tensor

    def __init__(self, module: _BatchNorm) -> None:
        super().__init__()
        assert module.running_mean is not None and module.running_var is not None, "checked when the method is built"
        self.register_buffer("source_mean", module.running_mean.clone())
        self.register_buffer("source_var", module.running_var.clone())
        self.register_buffer("mean", module.running_mean.clone())
        self.register_buffer("variance", module.running_var.clone())
        self.register_buffer("scatter", torch.zeros((), dtype=module.running_var.dtype))

    @override
    def before(self, module: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        BatchStatistics.set_mode_(module, by_layer=False)
        unmask_running_statistics(module)
        batch = current_call().batch_facts
        if not isinstance(batch, FollowedBatch):
            return None
        known = batch.layers.get(module)
        old = self if known is None or batch.is_view else known  # a network may use a layer twice
        values = inputs[0].to(self.mean.dtype)
        if batch.is_view and known is not None:
            batch_variance, batch_mean = (each.flatten() for each in batch_var_mean(values))
            mean = old.mean.lerp(batch_mean, batch.share)
            second_moment = batch_variance + (batch_mean - mean).square()
            variance = (old.variance + (old.mean - mean).square()).lerp(second_moment, batch.share)
        else:
            of_images, reducer = image_var_mean(values), current_reducer()
            between, batch_mean = (each[0] for each in reducer.var_mean(of_images[1], [0]))
            mean = old.mean.lerp(batch_mean, batch.share)
            # What each image contributes to the variance about the mean.
            contributions = of_images[0] + (of_images[1] - mean).square()
            spread, second_moment = (each[0] for each in reducer.var_mean(contributions, [0]))
            variance = (old.variance + (old.mean - mean).square()).lerp(second_moment, batch.share)
            with torch.no_grad():
                # The layer adds eps as well: a channel that is constant in the source would be infinitely far.
                unit = self.source_var + module.eps
                of_means = (between + (batch_mean - mean).square()) / unit
                of_variances = (spread + (second_moment - variance).square()) / (variance + module.eps).square()
                scatter = old.scatter.lerp((of_means + of_variances).mean(), batch.share)
                size = batch.effective_sample_size
                of_means = (mean - self.source_mean).square() / unit
                of_variances = ((variance + module.eps) / unit).log().square()
                # Beside the images seen, as if two had scattered as pixels do, by 1 in mean and in variance each.
                noise = (scatter + 4 / size) / size
                distance = ((of_means + of_variances).mean() - noise).clamp_min(0)
        used_mean = self.source_mean.lerp(mean, batch.fraction)
        used_variance = self.source_var.lerp(variance, batch.fraction)
        used = used_mean.detach(), used_variance.detach()
        if not batch.is_view:
            batch.layers[module] = LayerState(mean.detach(), variance.detach(), scatter, distance, *used)
        # Attributes hide the buffers of the same names for this call.
        vars(module).update(running_mean=used[0], running_var=used[1])
        shape = (1, -1) + (1,) * (values.ndim - 2)
        return attach_statistics_gradient(module, inputs, used_mean.view(shape), used_variance.view(shape))

    @override
    def after(self, module: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        unmask_running_statistics(module)


def measure_fraction(distances: Sequence[Tensor], tolerance: float) -> Tensor:
    """Return how far all layers move toward recent statistics, from the distance of each layer.

    All move as far, since a layer has learned to read what the layers before it put out; and the less, the more layers
    there are, since the errors of their statistics add up. The median tells a shift from what single layers show also
    for clean images, where the source was trained on augmented ones.
    """
    squared = torch.stack(tuple(distances)).median().square()
    farthest = min(1.0, LARGEST_MOVE / math.sqrt(len(distances)))
    return farthest * squared / (squared + max(tolerance**2, torch.finfo(squared.dtype).tiny))


def use_shift_statistics_(net: nn.Module) -> nn.ModuleList:
    """Let every BatchNorm with running statistics follow the shift; return the state, which the method must hold."""
    return attach_norm_hooks_(net, ShiftStatistics, skip_without_statistics=True)


def store_layers_(net: nn.Module, statistics: nn.ModuleList, layers: Mapping[nn.Module, LayerState]) -> None:
    """Take over the states of the layers after a batch; tensors are replaced, since a graph may still need them."""
    followed = [each for each in net.modules() if isinstance(each, _BatchNorm) and each.running_mean is not None]
    for module, hook in zip(followed, statistics, strict=True):
        if (state := layers.get(module)) is not None:
            hook.mean, hook.variance, hook.scatter = state[:3]
            module.running_mean, module.running_var = state.used_mean, state.used_variance

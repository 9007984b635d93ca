"""Running statistics that follow the stream, and batch statistics blended in other ways than by their mean."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ctta.core.parallel import current_call, current_reducer
from ctta.nn import BatchStatistics, NormHook, renormalize
from ctta.nn.moments import attach_statistics_gradient, batch_var_mean, fix_stride_of_one, image_var_mean

Center = Literal["mean", "median"]


@dataclass(frozen=True)
class RunningStatistics(NormHook):
    """A forward pre-hook of a BatchNorm whose running statistics follow the batches of calls that track.

    Outside of that context the layer normalizes by its running statistics, and a prediction depends on one image only.
    The statistics are the layer's own ``running_mean`` and ``running_var``, so a copy of a network has its own, and
    they are saved and deployed with it. They are replaced, not written to, since a graph may still need them.

    Attributes:
        momentum: The fraction of the batch in the update.
        normalize_by: Within the context, normalize by the updated ``"running"`` statistics, with the gradient of the
            batch's part (RoTTA); or by the ``"batch"``, as BatchNorm does in training.
        shrink: The k of instance-aware normalization (NOTE): statistics of an image that differ from the layer's by
            more than k standard errors move toward the image's. None for a network that was trained without it.
        always: Whether every batch counts as one of the context.
    """

    momentum: float
    normalize_by: Literal["running", "batch"] = "running"
    shrink: float | None = None
    always: bool = False

    @override
    def before(self, module: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Update the statistics if they are tracked, and rescale the input unless it needs nothing else."""
        x, num_spatial = inputs[0], inputs[0].ndim - 2
        BatchStatistics.set_mode_(module, by_layer=False)
        assert module.running_mean is not None and module.running_var is not None, "checked when the method is built"
        values = x.to(module.running_mean.dtype)
        if current_call().is_tracking or self.always:
            mean, variance = self.update_(module, values)
            if self.shrink is None and self.normalize_by == "running":
                return attach_statistics_gradient(module, inputs, mean, variance)  # the layer has them now
            if self.shrink is None and self.can_normalize_by_layer_(module, x):
                return None
        elif self.shrink is None:
            return None
        else:
            along_channels = (-1,) + (1,) * num_spatial
            mean, variance = module.running_mean.view(along_channels), module.running_var.view(along_channels)
        if self.shrink is not None and num_spatial and values[0, 0].numel() > 1:
            mean, variance = self.adjust_to_instances(values, mean, variance, module.eps, self.shrink)
        rescaled = renormalize(module, values, mean, variance, num_spatial)
        return (fix_stride_of_one(rescaled).to(x.dtype), *inputs[1:])

    def can_normalize_by_layer_(self, module: _BatchNorm, x: Tensor) -> bool:
        """Return whether the layer itself can normalize by the statistics of the batch; set its mode to do so."""
        by_layer = not current_reducer().is_sharded and x.numel() > x.shape[1]
        BatchStatistics.set_mode_(module, by_layer)
        return by_layer

    def update_(self, module: _BatchNorm, values: Tensor) -> tuple[Tensor, Tensor]:
        """Update the running statistics; return the mean and the variance to normalize by, with gradient."""
        assert module.running_mean is not None and module.running_var is not None
        # What the layer computes itself, by its own statistics of the batch, needs no graph here.
        needs_graph = self.normalize_by == "running" or self.shrink is not None or current_reducer().is_sharded
        with torch.set_grad_enabled(torch.is_grad_enabled() and needs_graph):
            variance, mean = batch_var_mean(values)
        unbiased = variance * unbias(current_reducer().total_count(values.numel()) // values.shape[1])
        # RoTTA keeps the biased variance; BatchNorm in training keeps the unbiased one and normalizes by the other.
        kept = variance if self.normalize_by == "running" else unbiased
        new_mean = module.running_mean.view_as(mean).lerp(mean, self.momentum)
        new_variance = module.running_var.view_as(variance).lerp(kept, self.momentum)
        if self.momentum:
            module.running_mean, module.running_var = new_mean.detach().flatten(), new_variance.detach().flatten()
        if self.normalize_by == "running":
            return new_mean, new_variance
        return mean, variance if self.shrink is None else unbiased

    @staticmethod
    def adjust_to_instances(
        values: Tensor, mean: Tensor, variance: Tensor, eps: float, k: float
    ) -> tuple[Tensor, Tensor]:
        """Return statistics per image: the given ones, moved toward the image's own where these are far away."""
        num_values = values[0, 0].numel()
        own_variance, own_mean = (each.view(*each.shape, *[1] * (values.ndim - 2)) for each in image_var_mean(values))
        own_variance = own_variance * unbias(num_values)
        mean_error = ((variance + eps) / num_values).sqrt()
        variance_error = (variance + eps) * (2 / (num_values - 1)) ** 0.5
        adjusted = variance + soft_shrink(own_variance - variance, k * variance_error)
        return mean + soft_shrink(own_mean - mean, k * mean_error), adjusted.relu()


def soft_shrink(x: Tensor, threshold: Tensor) -> Tensor:
    """Move x toward zero by a threshold, and no further than zero."""
    return F.relu(x - threshold) - F.relu(-x - threshold)


def unbias(count: int) -> float:
    """Return the factor that makes a variance over ``count`` values unbiased; 1 for a single value."""
    return count / max(count - 1, 1)


def running_statistics(net: nn.Module) -> list[Tensor]:
    """Return the running means and variances of every BatchNorm that keeps any."""
    layers = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    found = [tensor for layer in layers for tensor in (layer.running_mean, layer.running_var)]
    return [tensor for tensor in found if tensor is not None]


@dataclass(frozen=True)
class BlendedStatistics(BatchStatistics):
    """A forward pre-hook of a BatchNorm that blends the source's statistics with other ones of the batch.

    Attributes:
        fraction: The fraction of the batch statistics.
        prior: How many images the source's statistics count for; the fraction is then n / (prior + n) for n images.
        center: The batch's ``"mean"`` with its unbiased variance, or its ``"median"`` with the mean squared distance
            from it.
    """

    is_traceable = False
    prior: int | None = None
    center: Center = "mean"

    @override
    def before(self, module: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        x, batch = inputs[0], current_reducer()
        self.set_mode_(module, by_layer=False)
        assert module.running_mean is not None and module.running_var is not None, "checked when the method is built"
        num_images, along_channels = batch.total_count(len(x)), (-1,) + (1,) * (x.ndim - 2)
        fraction = self.choose_fraction(module, num_images)
        if self.prior is not None:
            fraction = num_images / (self.prior + num_images)
        if fraction == 0:
            return None
        values = x.to(module.running_mean.dtype)
        center, variance = self.measure(values)
        mean = module.running_mean.view(along_channels).lerp(center, fraction)
        variance = module.running_var.view(along_channels).lerp(variance, fraction)
        return (fix_stride_of_one(renormalize(module, values, mean, variance, x.ndim - 2)).to(x.dtype), *inputs[1:])

    def measure(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the center and the variance of the whole batch."""
        batch = current_reducer()
        if self.center == "mean":
            variance, mean = batch_var_mean(values)
            return mean, variance * unbias(batch.total_count(values.numel()) // values.shape[1])
        flat = batch.gather(values).transpose(0, 1).flatten(1)
        median = flat.median(1, keepdim=True).values
        shape = (1, -1) + (1,) * (values.ndim - 2)
        return median.view(shape), (flat - median).square().mean(1).view(shape)

"""Statistics of the inputs of BatchNorm layers, and gradients through them, in few passes over the values.

``torch.var_mean`` over the images takes longer than a convolution on the CPU, and its backward has many passes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ctta.core.parallel import current_reducer

#: How many numbers to compute at once, so that what is computed from them is still in the processor's cache.
CACHED_ELEMENTS = 2**19
#: The same for a group norm of which only the statistics are used.
GROUP_NORM_ELEMENTS = 2**17
#: Below this number the few calls of BatchNorm's kernel are faster.
MIN_GROUP_NORM_ELEMENTS = 2**15


def fix_stride_of_one(x: Tensor) -> Tensor:
    """Give a batch of one image the batch stride that its layout implies.

    That stride is arbitrary, and with an odd one torch 2.13 takes a channels-last image for another layout: on the CPU
    the backward of a BatchNorm then gives wrong gradients.
    """
    return x.as_strided(x.shape, (x.numel(), *x.stride()[1:])) if len(x) == 1 else x


def batch_var_mean(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the biased variance and the mean of every channel over the whole batch, each (1, C, 1, ...).

    Args:
        values: (N, C, ...).

    Returns:
        Both, with a gradient.
    """
    batch = current_reducer()
    if batch.is_sharded:
        return batch.var_mean(values, [axis for axis in range(values.ndim) if axis != 1])
    variance, mean = _compute_moments(values, False)
    shape = (1, -1) + (1,) * (values.ndim - 2)
    return variance.view(shape), mean.view(shape)


def image_var_mean(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the biased variance and the mean of every channel of every image, each (N, C).

    Args:
        values: (N, C, ...).

    Returns:
        Both, with a gradient.
    """
    return _compute_moments(values, True)


def attach_statistics_gradient(
    module: _BatchNorm, inputs: tuple[Tensor, ...], mean: Tensor, variance: Tensor
) -> tuple[Tensor, ...] | None:
    """Let the gradient of a layer that normalizes by its running statistics reach statistics of its input.

    Such a layer takes its statistics for constants. If they were computed from its input, a part of the gradient is
    missing, and is added here.

    Args:
        module: The layer.
        inputs: What its forward pre-hook got.
        mean: The mean to differentiate by (..., C, 1, ...), with a gradient: what the layer has as its running mean, or
            another one with which the layer is to share its gradient.
        variance: The variance likewise.

    Returns:
        What the pre-hook returns: the same values with another gradient, or None if they need none.
    """
    x = inputs[0]
    if not (torch.is_grad_enabled() and x.requires_grad):
        return None
    carried = _pass_gradient(x.to(mean.dtype), mean, variance, module.eps)
    return (fix_stride_of_one(carried).to(x.dtype), *inputs[1:])


@dataclass(frozen=True)
class BlendedMoments:
    """Statistics (1-m) * running + m * batch of every channel (C), without a graph, and what they were made from."""

    mean: Tensor
    variance: Tensor
    batch_mean: Tensor
    fraction: float


def blend_with_batch(running_mean: Tensor, running_var: Tensor, values: Tensor, fraction: float) -> BlendedMoments:
    """Blend the statistics of a layer with those of its input.

    Args:
        running_mean: The layer's mean.
        running_var: The layer's variance.
        values: Its input (N, C, ...), in the dtype of its statistics and without a graph; all rows of the batch.
        fraction: M, the fraction of the batch.

    Returns:
        The statistics; :func:`carry_blended_gradient` adds what the layer lacks if it normalizes by them.
    """
    if _suits_group_norm(values):
        variance, mean = _measure_channels_by_group_norm(values)
    else:
        mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
    return BlendedMoments(running_mean.lerp(mean, fraction), running_var.lerp(variance, fraction), mean, fraction)


def carry_blended_gradient(x: Tensor, blended: BlendedMoments, eps: float) -> Tensor:
    """Return the input of a layer that normalizes by blended statistics, with the gradient through those of the batch.

    Args:
        x: The input (N, C, ...).
        blended: What the layer has as its running statistics.
        eps: The layer's.
    """
    statistics = blended.mean, blended.variance, blended.batch_mean
    carried = _carry_blended_gradient(x.to(blended.mean.dtype), *statistics, blended.fraction, eps)
    return fix_stride_of_one(carried).to(x.dtype)


def _measure_channels(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the biased variance and the mean of every channel (C)."""
    if values.is_contiguous() and values.ndim > 2 and torch.finfo(values.dtype).bits >= 32:
        # BatchNorm's kernel takes several times as long in this layout.
        variances, means = _measure_images(values)
        return variances.mean(0) + means.var(0, correction=0), means.mean(0)
    mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
    return variance, mean


def _measure_images(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the biased variance and the mean of every channel of every image (N, C)."""
    flat = values.flatten(2) if values.ndim > 2 else values.unsqueeze(2)
    images_at_once = max(1, CACHED_ELEMENTS // flat[0].numel())
    means = flat.mean(2)
    pairs = zip(flat.split(images_at_once), means.unsqueeze(2).split(images_at_once), strict=True)
    return torch.cat([(block - mean).square_().mean(2) for block, mean in pairs]), means


def _suits_group_norm(values: Tensor) -> bool:
    is_large = values.numel() >= MIN_GROUP_NORM_ELEMENTS and values.ndim > 2
    return is_large and values.is_contiguous() and values.device.type == "cpu" and values.element_size() >= 4


def _measure_channels_by_group_norm(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the biased variance and the mean of every channel (C) of contiguous maps.

    A group norm measures rows several times as fast as any other operation does on the CPU. Its output is not used, and
    stays in the processor's cache.
    """
    num_images, num_channels = values.shape[:2]
    rows = values.view(1, num_images * num_channels, -1)
    rows_at_once, num_values = max(1, GROUP_NORM_ELEMENTS // rows.shape[2]), rows.shape[2]
    parts = [
        torch.native_group_norm(part, None, None, 1, part.shape[1], num_values, part.shape[1], 0.0)[1:]
        for part in (rows.split(rows_at_once, 1) if rows_at_once < rows.shape[1] else (rows,))
    ]
    means, inverse_deviations = (
        parts[0] if len(parts) == 1 else (torch.cat(each, 1) for each in zip(*parts, strict=True))
    )
    means, variances = means.view(num_images, -1), inverse_deviations.view(num_images, -1).pow_(-2)
    if num_images == 1:
        return variances[0], means[0]
    mean, between = torch.batch_norm_update_stats(means, None, None, 0.0)
    return between.add_(variances.mean(0)), mean


class _ChannelMoments(Function):
    """Variance and mean of every channel over the images, or of every channel of every image."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, per_image: bool) -> tuple[Tensor, Tensor]:
        variance, mean = _measure_images(values) if per_image else _measure_channels(values)
        ctx.save_for_backward(values, mean)
        return variance, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_variance: Tensor, grad_mean: Tensor) -> tuple[Tensor, None]:
        values, mean = ctx.saved_tensors
        shape = (*mean.shape, *[1] * (values.ndim - 2))
        count = values.numel() // mean.numel()
        slope = grad_variance.view(shape) * (2 / count)
        return torch.addcmul(grad_mean.view(shape) / count - slope * mean.view(shape), values, slope), None


class _CarryBlendedGradient(Function):
    """The identity, with the gradient of blended statistics, of which a fraction are the input's own."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, mean: Tensor, variance: Tensor, batch_mean: Tensor, fraction: float, eps: float
    ) -> Tensor:
        ctx.save_for_backward(values, mean, variance, batch_mean)
        ctx.fraction, ctx.eps = fraction, eps
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        values, mean, variance, batch_mean = ctx.saved_tensors
        total, moment = _sum_with_moment(gradient, values, _along_channels(batch_mean, values))
        share = ctx.fraction * values.shape[1] / values.numel()
        # d/dmean is minus the sum of what arrives, and d/dvariance its second moment about the blended mean.
        slope = (moment + (batch_mean - mean) * total) * -share / (variance + ctx.eps)
        offset = -share * total - slope * batch_mean
        through_moments = torch.addcmul(_along_channels(offset, values), values, _along_channels(slope, values))
        return through_moments.add_(gradient), None, None, None, None, None


class _PassGradient(Function):
    """The identity, with the gradient of the statistics that the next layer normalizes by."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(values, mean, variance)
        ctx.eps = eps
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        values, mean, variance = ctx.saved_tensors
        # The layer divides by the deviation: d/dmean is minus the sum of what arrives, and d/dvariance a second moment.
        total, moment = _sum_with_moment(gradient, values, mean)
        return gradient, -total.view_as(mean), (moment.view_as(variance) / (variance + ctx.eps)).mul_(-0.5), None


def _sum_with_moment(gradient: Tensor, values: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over every channel of the gradient, and of the gradient times the centered values, each (C)."""
    center = mean.flatten()
    if len(values) == 1:  # whose layout the kernel below can mistake
        axes = [axis for axis in range(values.ndim) if axis != 1]
        return gradient.sum(axes), (gradient * (values - mean)).sum(axes)
    one = torch.ones_like(center)
    _, moment, total = torch.ops.aten.native_batch_norm_backward(
        gradient, values, one, center, one, center, one, True, 0.0, [False, True, True]
    )
    return total, moment


def _along_channels(vector: Tensor, values: Tensor) -> Tensor:
    return vector.view((-1,) + (1,) * (values.ndim - 2))


# The types that torch does not tell.
_compute_moments: Callable[[Tensor, bool], tuple[Tensor, Tensor]] = _ChannelMoments.apply
_pass_gradient: Callable[[Tensor, Tensor, Tensor, float], Tensor] = _PassGradient.apply
_carry_blended_gradient: Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Tensor] = _CarryBlendedGradient.apply

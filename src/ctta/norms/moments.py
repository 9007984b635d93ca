"""Statistics of the inputs of BatchNorm layers, and gradients through them, at the speed of BatchNorm's own kernels.

``torch.var_mean`` over the images takes longer than a convolution on the CPU, and its backward has many passes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ctta.norms import fix_stride_of_one
from ctta.parallel import current_reducer


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
    variance, mean = _compute_batch_moments(values)
    shape = (1, -1) + (1,) * (values.ndim - 2)
    return variance.view(shape), mean.view(shape)


def image_var_mean(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the biased variance and the mean of every channel of every image, each (N, C).

    Args:
        values: (N, C, ...).

    Returns:
        Both, with a gradient.
    """
    return _compute_image_moments(values)


def pass_with_gradient(
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


class _BatchMoments(Function):
    """Variance and mean of every channel over the images, as BatchNorm computes them."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
        ctx.save_for_backward(values, mean)
        return variance, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_variance: Tensor, grad_mean: Tensor) -> Tensor:
        values, mean = ctx.saved_tensors
        shape = (-1,) + (1,) * (values.ndim - 2)
        return _moments_gradient(values, mean.view(shape), grad_variance.view(shape), grad_mean.view(shape), (0,))


class _ImageMoments(Function):
    """Variance and mean of every channel of every image."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> tuple[Tensor, Tensor]:
        flat = values.flatten(2) if values.ndim > 2 else values.unsqueeze(2)
        mean = flat.mean(2)
        variance = (flat - mean.unsqueeze(2)).square_().mean(2)
        ctx.save_for_backward(values, mean)
        return variance, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_variance: Tensor, grad_mean: Tensor) -> Tensor:
        values, mean = ctx.saved_tensors
        shape = (*values.shape[:2], *[1] * (values.ndim - 2))
        return _moments_gradient(values, mean.view(shape), grad_variance.view(shape), grad_mean.view(shape), ())


def _moments_gradient(
    values: Tensor, mean: Tensor, grad_variance: Tensor, grad_mean: Tensor, also_over: tuple[int, ...]
) -> Tensor:
    """Return the gradient of moments over the spatial axes, and others, with respect to the values."""
    count = 1
    for axis in (*also_over, *range(2, values.ndim)):
        count *= values.shape[axis]
    slope = grad_variance * (2 / count)
    return torch.addcmul(grad_mean / count - slope * mean, values, slope)


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


# The types that torch does not tell.
_compute_batch_moments: Callable[[Tensor], tuple[Tensor, Tensor]] = _BatchMoments.apply
_compute_image_moments: Callable[[Tensor], tuple[Tensor, Tensor]] = _ImageMoments.apply
_pass_gradient: Callable[[Tensor, Tensor, Tensor, float], Tensor] = _PassGradient.apply

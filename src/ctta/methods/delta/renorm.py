"""Batch renormalization: normalize by moving averages, with the gradient of batch statistics (DELTA)."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ctta.core.parallel import current_call
from ctta.nn import BatchStatistics, NormHook, renormalize
from ctta.nn.moments import attach_statistics_gradient, batch_var_mean, fix_stride_of_one


class Renormalization(NormHook, nn.Module):
    """A forward pre-hook of one BatchNorm, whose running statistics start at the first batch's and follow the stream.

    The output is (x - m) / s * r + d with the mean m and the standard deviation s of the batch, and with
    r = s / s_running and d = (m - m_running) / s_running as constants. Its value is that of the running statistics, and
    its gradient that of the batch's. Within :func:`ctta.nn.running.track_statistics` the running statistics then
    move toward the batch's; of the deviations, not of the variances, an average is kept.

    Args:
        momentum: The fraction of themselves that the running statistics keep.
    """

    num_followed: Tensor

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("num_followed", torch.zeros((), dtype=torch.long))
        self._latest: tuple[Tensor, Tensor] | None = None  # statistics of the batch that the layer is computing

    @override
    def before(self, module: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        BatchStatistics.set_mode_(module, by_layer=False)
        assert module.running_mean is not None, "checked when the method is built"
        x = inputs[0]
        values = x.to(module.running_mean.dtype)
        variance, mean = batch_var_mean(values)
        self._latest = (mean.detach().flatten(), variance.detach().flatten()) if current_call().is_tracking else None
        if self.num_followed > 0:
            # r and d make the value that of the layer's own statistics, and leave the gradient of the batch's.
            return attach_statistics_gradient(module, inputs, mean, variance)
        values = renormalize(module, values, mean, variance, x.ndim - 2)
        return (fix_stride_of_one(values).to(x.dtype), *inputs[1:])

    @override
    @torch.no_grad()
    def after(self, module: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Move the running statistics after the layer has used them, if they are tracked."""
        if self._latest is None:
            return
        assert module.running_mean is not None and module.running_var is not None
        mean, variance = self._latest
        if self.num_followed > 0:
            mean = mean.lerp(module.running_mean, self.momentum)
            deviation = (variance + module.eps).sqrt().lerp((module.running_var + module.eps).sqrt(), self.momentum)
            variance = (deviation.square() - module.eps).clamp_min(0)
        # Replaced, not written to, since a graph may still need them.
        module.running_mean, module.running_var, self._latest = mean, variance, None
        self.num_followed += 1

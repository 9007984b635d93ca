"""Statistics balanced over the predicted classes, for streams in which some classes are rare (TRIBE)."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ctta.core.state import LazyModule
from ctta.errors import ConfigError
from ctta.nn import BatchStatistics, NormHook, has_running_statistics
from ctta.nn.moments import image_var_mean, pass_with_gradient

# The predicted classes (N) of the call in progress, and the number of classes.
_labels: ContextVar[tuple[Tensor, int] | None] = ContextVar("_labels", default=None)


@contextmanager
def balance_statistics(labels: Tensor, num_classes: int) -> Iterator[None]:
    """Let layers with :class:`BalancedStatistics` follow batches whose images have these predicted classes."""
    token = _labels.set((labels, num_classes))
    try:
        yield
    finally:
        _labels.reset(token)


class BalancedStatistics(NormHook, LazyModule):
    """A forward pre-hook of one BatchNorm that keeps statistics per class, and normalizes by their mean over classes.

    Within :func:`balance_statistics` the statistics of the classes follow the batch and are used at once, with the
    gradient of the batch's part. Outside of it the layer uses what they gave last, its ``running_mean`` and
    ``running_var``.

    Args:
        momentum: What one image adds to the statistics of its class; None for 0.0005 per class, but at least 0.01. For
            more than 1 / momentum images of a class it is one over their number.
        spread: The fraction of a change that goes to all classes alike.
    """

    means: Tensor
    variances: Tensor

    def __init__(self, momentum: float | None, spread: float) -> None:
        super().__init__()
        self.momentum, self.spread = momentum, spread
        self.register_lazy_buffer("means", None, None)
        self.register_lazy_buffer("variances", None, None)

    @override
    def forward(self, module: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        BatchStatistics.set_mode_(module, by_layer=False)
        if (labeled := _labels.get()) is None:
            return None
        assert module.running_mean is not None and module.running_var is not None, "checked when the method is built"
        x, (labels, num_classes) = inputs[0], labeled
        if not self.is_allocated:
            self.allocate_("means", module.running_mean.expand(num_classes, -1).clone())
            self.allocate_("variances", module.running_var.expand(num_classes, -1).clone())
        values = x.to(module.running_mean.dtype)
        means, variances = self._follow(values, labels)
        # An average over one class has no variance between classes.
        mean, variance = means.mean(0), variances.mean(0) + means.var(0, correction=min(1, num_classes - 1))
        self.means, self.variances = means.detach(), variances.detach()
        module.running_mean, module.running_var = mean.detach(), variance.detach()
        along_channels = (-1,) + (1,) * (x.ndim - 2)
        return pass_with_gradient(module, inputs, mean.view(along_channels), variance.view(along_channels))

    def _follow(self, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the statistics of the classes after a batch (C, channels)."""
        one_hot = F.one_hot(labels, len(self.means)).to(values)
        counts = one_hot.sum(0).unsqueeze(1)
        momentum = max(0.0005 * len(self.means), 0.01) if self.momentum is None else self.momentum
        rate = torch.where(counts * momentum > 1, 1 / counts.clamp_min(1), momentum)
        own_variances, own_means = image_var_mean(values)
        distances = own_means - self.means[labels]
        moved = rate * (one_hot.T @ distances)  # zero for classes without images
        squared = rate * (one_hot.T @ (own_variances + distances.square()))
        num_present = (counts > 0).sum()
        means = self.means + (1 - self.spread) * moved + self.spread * moved.sum(0) / num_present
        # Of absent classes rate * counts is zero, so they change by the spread alone.
        variances = self.variances + (1 - self.spread) * (squared - rate * counts * self.variances - moved.square())
        common = (squared - moved.square()).sum(0) / num_present
        weight = (rate * counts).sum() / num_present
        return means, variances + self.spread * (common - weight * variances)


def use_balanced_statistics_(net: nn.Module, momentum: float | None, spread: float) -> nn.ModuleList:
    """Let every BatchNorm of a network balance its statistics; return the state, which the method must hold."""
    if not has_running_statistics(net):
        raise ConfigError(
            "balanced statistics start from the running statistics of BatchNorm layers, and one of the network's "
            "keeps none: use layers with track_running_stats=True"
        )
    found = []
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            found.append(BalancedStatistics(momentum, spread))
            module.register_forward_pre_hook(found[-1])
    return nn.ModuleList(found)

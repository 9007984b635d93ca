"""Normalisation layers: batch statistics, running statistics anew, and the parameters to train."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ctta.parallel import current_reducer

#: None outside of :func:`separate_statistics`. Of the call and not of a layer, since streams share their source's.
_num_parts: ContextVar[int | None] = ContextVar("_num_parts", default=None)


@contextmanager
def separate_statistics(num_parts: int) -> Iterator[None]:
    """Within, a batch is so many equal parts laid end to end, each normalised by statistics of its own."""
    token = _num_parts.set(num_parts)
    try:
        yield
    finally:
        _num_parts.reset(token)


@dataclass(frozen=True)
class BatchStatistics:
    """Forward pre-hook of a BatchNorm: normalise by (1-m) * running + m * batch statistics.

    Running statistics are read, never written, and stay in the ``state_dict``. The hook puts its layer into the
    right mode at each call, so a later ``eval()`` cannot silently bring the running statistics back.
    """

    share: float

    def __call__(self, module: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        x, num_parts, batch = inputs[0], _num_parts.get(), current_reducer()
        if batch.total_count(x.numel()) == x.shape[1] * (num_parts or 1) and self.share == 1:
            raise ValueError(
                f"batch statistics need more than one value per channel, and a BatchNorm got {tuple(x.shape)}: "
                "give larger batches, or blend in the source's statistics with batch_stats=0.1, say"
            )
        by_itself = self.share == 1 and num_parts is None and not batch.is_sharded
        self.set_mode(module, by_itself)
        return None if by_itself else (self.shifted(module, x, num_parts or 1), *inputs[1:])

    @staticmethod
    def set_mode(module: _BatchNorm, by_itself: bool) -> None:
        """The layer takes batch statistics by itself, and tracks nothing; or it reads its running statistics."""
        module.training = by_itself
        module.track_running_stats = not by_itself

    def shifted(self, module: _BatchNorm, x: Tensor, num_parts: int) -> Tensor:
        """x moved and scaled so that the layer's own running statistics then give the normalisation meant."""
        assert module.running_mean is not None and module.running_var is not None, "checked when the method is built"
        along_channels = (-1,) + (1,) * (x.ndim - 2)
        mean, variance = module.running_mean.view(along_channels), module.running_var.view(along_channels)
        values = x.to(mean.dtype).unflatten(0, (num_parts, -1))
        axes = [axis for axis in range(values.ndim) if axis not in (0, 2)]
        batch_variance, batch_mean = current_reducer().var_mean(values, axes)
        blended_mean = mean.lerp(batch_mean, self.share)
        scale = ((variance + module.eps) / (variance.lerp(batch_variance, self.share) + module.eps)).sqrt()
        shifted: Tensor = torch.addcmul(mean - blended_mean * scale, values, scale).flatten(0, 1)
        if len(shifted) == 1:
            # The step from one image to the next is arbitrary here, and by an odd one torch 2.13 mistakes the layout of
            # a channels-last image: on the CPU the layer's backward then gives gradients of other values.
            shifted = shifted.as_strided(shifted.shape, (shifted.numel(), *shifted.stride()[1:]))
        return shifted.to(x.dtype)


def use_batch_statistics_(net: nn.Module, share: float) -> None:
    """Let every BatchNorm normalise by (1-share) * running + share * batch statistics."""
    for name, module in net.named_modules():
        if isinstance(module, _BatchNorm):
            if share < 1 and module.running_mean is None:
                raise ValueError(
                    f"batch_stats={share} blends running with batch statistics, and layer '{name}' keeps no running "
                    "statistics; use batch_stats=1"
                )
            BatchStatistics.set_mode(module, by_itself=share == 1)
            module.register_forward_pre_hook(BatchStatistics(share))


def use_running_statistics_(net: nn.Module) -> None:
    """Let every BatchNorm normalise by the statistics it was trained with, where it keeps any; undoes the above."""
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, BatchStatistics)]:
                del hooks[key]
            module.training, module.track_running_stats = False, module.running_mean is not None


def avoid_group_norm_crash_(net: nn.Module) -> None:
    """Let no GroupNorm meet the input whose backward crashes torch on the CPU."""
    for module in net.modules():
        if isinstance(module, nn.GroupNorm):
            module.register_forward_pre_hook(make_contiguous_if_constant)


def make_contiguous_if_constant(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward pre-hook of a GroupNorm: a channels-last input that needs no gradient becomes contiguous.

    Without this the CPU's backward (seen in torch 2.13) writes that gradient through a null pointer. It happens to
    everyone who trains the first GroupNorm but not the convolution before it, as TENT does.
    """
    x, *others = inputs
    constant = torch.is_grad_enabled() and not x.requires_grad
    return (x.contiguous() if constant else x, *others)


def has_running_statistics(net: nn.Module) -> bool:
    """Whether every BatchNorm has running statistics, used or not."""
    return all(module.running_mean is not None for module in net.modules() if isinstance(module, _BatchNorm))


def uses_batch_statistics(net: nn.Module) -> bool:
    """Whether one element's answer depends on the others of its batch."""
    return any(
        isinstance(module, _BatchNorm)
        and (
            module.running_mean is None
            or any(isinstance(hook, BatchStatistics) for hook in module._forward_pre_hooks.values())
        )
        for module in net.modules()
    )


@torch.no_grad()
def estimate_running_statistics_(net: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replace the running statistics of a plain network by their mean over the batches."""
    layers = [module for module in net.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # torch's word for a cumulative average
        layer.train()
    num_batches = 0
    for x in batches:
        net(x)
        num_batches += 1
    if num_batches == 0:
        raise ValueError("no batches to estimate running statistics from; give some, or leave batches out")
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    net.eval()


def find_norm_parameters(net: nn.Module) -> set[str]:
    """Names of the scales and shifts of normalisation layers that require grad.

    Torch's own layers, and any module whose class is named ...Norm... (timm, transformers and users write their
    own): of these only parameters that are vectors, since a block that is merely named so may hold matrices.
    """
    known = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in net.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
        and (isinstance(module, known) or ("Norm" in type(module).__name__ and parameter.ndim <= 1))
    }

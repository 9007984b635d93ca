"""Normalization layers of any kind: their parameters, and what some of them need."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ctta.errors import InputError


class NormHook:
    """Base of every forward hook and pre-hook that changes what a norm layer does; deployed networks are without."""


def find_norm_parameters(net: nn.Module) -> set[str]:
    """Return the names of the trainable scales and shifts of normalization layers.

    These are torch's layers, and modules whose class name contains "Norm" (timm, transformers and users write their
    own): of the latter only vectors, since a block with such a name may hold matrices.
    """
    return {name for name in _iter_norm_parameters(net) if net.get_parameter(name).requires_grad}


def find_norm_layers(net: nn.Module) -> set[str]:
    """Return the names of the normalization layers with scales or shifts, trainable or not."""
    return {name.rpartition(".")[0] for name in _iter_norm_parameters(net)}


def _iter_norm_parameters(net: nn.Module) -> Iterator[str]:
    known = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    for prefix, module in net.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, known) or ("Norm" in type(module).__name__ and parameter.ndim <= 1):
                yield f"{prefix}.{name}" if prefix else name


def has_running_statistics(net: nn.Module) -> bool:
    """Return whether every BatchNorm keeps running statistics, used or not."""
    return all(module.running_mean is not None for module in net.modules() if isinstance(module, _BatchNorm))


@torch.no_grad()
def estimate_running_statistics_(net: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replace the running statistics of a network without our hooks by their mean over the batches."""
    # torch.optim.swa_utils.update_bn does nearly this, but with dropout on, and silently without any batches.
    layers = [module for module in net.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a cumulative average
        layer.train()
    num_batches = 0
    for x in batches:
        net(x)
        num_batches += 1
    if num_batches == 0:
        raise InputError("no batches to estimate running statistics from; give some, or leave batches out")
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    net.eval()


def avoid_group_norm_crash_(net: nn.Module) -> None:
    """Add :func:`make_contiguous_if_constant` to every GroupNorm."""
    for module in net.modules():
        if isinstance(module, nn.GroupNorm):
            module.register_forward_pre_hook(make_contiguous_if_constant)


def make_contiguous_if_constant(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make a channels-last input that needs no gradient contiguous; a forward pre-hook of a GroupNorm.

    Without it the backward on the CPU (torch 2.13) writes the gradient of such an input through a null pointer. That
    happens to everyone who trains the first GroupNorm but not the convolution before it, as TENT does.
    """
    x, *others = inputs
    is_constant = torch.is_grad_enabled() and not x.requires_grad
    return (x.contiguous() if is_constant else x, *others)

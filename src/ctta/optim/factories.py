"""Optimizer factories: what a method takes as its hyperparameters ``optimizer`` and ``lr``."""

import math
from collections.abc import Callable
from functools import partial
from numbers import Real

import torch
from torch import nn
from torch.optim import Optimizer

from ctta.errors import ConfigError

#: Builds an optimizer for a list of parameters, as ``partial(torch.optim.Adam, lr=1e-3)`` does.
OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


def build_optimizer(factory: OptimizerFactory, net: nn.Module) -> Optimizer:
    """Return an optimizer of the parameters of the network that require grad.

    Args:
        factory: Builds the optimizer.
        net: The network.

    Returns:
        The optimizer.

    Raises:
        ConfigError: No parameter requires grad, or one has 16 bits.
        TypeError: The factory is an optimizer, or builds something else.
    """
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError(
            "there is nothing to train: the network has none of the parameters that this method adapts, or they do "
            "not require grad (call net.requires_grad_(True) before wrapping it)"
        )
    if any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in parameters):
        raise ConfigError(
            "16-bit weights are too coarse for the small updates of adaptation: keep the network in float32 "
            "(net.float()) and call the model under torch.autocast"
        )
    optimizer = factory(parameters) if callable(factory) else None
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer must be a factory like functools.partial(torch.optim.Adam, lr=1e-3), since a method trains its "
            f"own copy of the network; got {factory!r}"
        )
    return optimizer


def with_lr(factory: OptimizerFactory, lr: float | None) -> OptimizerFactory:
    """Return a factory whose optimizers have this learning rate; the given factory if it is None.

    Args:
        factory: Builds an optimizer, and takes ``lr`` as a keyword.
        lr: The learning rate, or None for the factory's own.

    Returns:
        The factory.

    Raises:
        ConfigError: The learning rate is not a number that the optimizer allows, or the factory takes none.
    """
    if lr is None:
        return factory
    if isinstance(lr, bool) or not isinstance(lr, Real) or not 0 <= lr < math.inf:
        raise ConfigError(f"lr must be a number of at least 0, got {lr!r}")
    changed = partial(factory, lr=float(lr))
    try:
        changed([nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the optimizer does not take lr={lr!r}: {error}") from error
    return changed

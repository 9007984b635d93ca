"""Building an optimiser, and taking a step only where it is finite."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ctta.whole_batch import whole_batch

#: Builds an optimiser for the parameters it is given, as ``partial(torch.optim.Adam, lr=1e-3)`` does.
OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


def build_optimizer(factory: OptimizerFactory, net: nn.Module) -> Optimizer:
    """An optimiser over what is trainable in the network."""
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(
            "there is nothing to train: the network has none of the parameters that this method adapts, or they do "
            "not require grad (call net.requires_grad_(True) before wrapping it)"
        )
    if any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in parameters):
        raise ValueError(
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


def step_if_finite_(optimizer: Optimizer, loss: Tensor) -> bool:
    """One optimiser step down the loss; False, and nothing changes, if the loss or a gradient is not finite."""
    batch = whole_batch()
    try:
        batch.share_of(loss).backward()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        batch.add_up_gradients_(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        finite = all_finite([batch.mean(loss.detach()), *gradients])
        if finite:
            optimizer.step()
        return finite
    finally:
        optimizer.zero_grad()  # also after an error, or the next step would add to half a gradient


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether no value is NaN or infinite."""
    # The sum of squares takes a ninth of the time of the largest value, which decides only where the sum overflows.
    return any(bool(torch.isfinite(nn.utils.get_total_norm(tensors, order))) for order in (2.0, math.inf))

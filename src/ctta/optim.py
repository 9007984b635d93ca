"""Optimizer factories, the guarded step, and an optimizer's state as named tensors and JSON."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ctta.parallel import current_reducer

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
    batch = current_reducer()
    try:
        batch.scale_loss(loss).backward()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        batch.all_reduce_gradients_(parameters)
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


def split_state(optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state as a JSON part (options of the groups, plain numbers) and tensors named ``<parameter>.<name>``."""
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        for name, option in group.items():
            if isinstance(option, Tensor):
                raise TypeError(f"the optimiser's option {name!r} is a tensor, which cannot be saved: give a number")
    values = {f"{number}.{name}": value for number, of in state["state"].items() for name, value in of.items()}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in values.items() if name not in tensors}
    return {"groups": state["param_groups"], "numbers": numbers}, tensors


def restore_state_(optimizer: Optimizer, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Give a fresh optimiser the state that :func:`split_state` took; ValueError if it does not fit."""
    fresh = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in fresh] != [group["params"] for group in plain["groups"]]:
        raise ValueError("its optimiser has other parameter groups")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**plain["numbers"], **tensors}.items():
        number, _, name = key.partition(".")
        if not number.isdecimal() or int(number) >= len(parameters) or not _fits(value, parameters[int(number)]):
            raise ValueError(f"its optimiser state '{key}' does not fit the parameters")
        state.setdefault(int(number), {})[name] = value
    # Options that a newer torch has added keep their defaults.
    groups = [ours | theirs for ours, theirs in zip(fresh, plain["groups"], strict=True)]
    load_state_(optimizer, {"state": state, "param_groups": groups})


def load_state_(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state; tensors get the device and dtype that their parameters have now.

    All but single numbers, which torch would widen too (NAdam's product of momenta), and then round differently.
    """
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.ndim == 0:
                loaded = optimizer.state[parameters[number]][name]
                optimizer.state[parameters[number]][name] = loaded.to(value.dtype)


def _fits(value: Any, parameter: Tensor) -> bool:
    """Whether a state may belong to a parameter: a single number, its shape, or that shape with axes summed out."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return True
    return value.ndim == parameter.ndim and all(
        size in (1, full) for size, full in zip(value.shape, parameter.shape, strict=True)
    )

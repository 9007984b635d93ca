"""The state of an optimizer as named tensors and JSON, and back."""

import copy
import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ctta.optim.steps import all_finite

#: Of options such as learning rates, far above any use: with larger ones the weights overflow within a few steps.
MAX_OPTION = 1e9


def split_state(optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the state of an optimizer in two parts.

    Args:
        optimizer: The optimizer.

    Returns:
        A part for JSON, the options of the groups and numbers, and tensors named ``<parameter>.<name>``.

    Raises:
        TypeError: An option is a tensor, which JSON cannot hold.
    """
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        for name, option in group.items():
            if isinstance(option, Tensor):
                raise TypeError(f"the optimizer's option {name!r} is a tensor, which cannot be saved: give a number")
    values = {f"{index}.{name}": value for index, part in state["state"].items() for name, value in part.items()}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in values.items() if name not in tensors}
    return {"groups": state["param_groups"], "numbers": numbers}, tensors


def restore_state_(optimizer: Optimizer, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Load the state that :func:`split_state` returned into a new optimizer.

    Args:
        optimizer: The new optimizer.
        plain: The part for JSON.
        tensors: The tensors.

    Raises:
        ValueError: The state does not fit the parameters.
    """
    new = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in new] != [group["params"] for group in plain["groups"]]:
        raise ValueError("the optimizer has other parameter groups")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**plain["numbers"], **tensors}.items():
        index, _, name = key.partition(".")
        if not index.isdecimal() or int(index) >= len(parameters) or not _fits(value, parameters[int(index)]):
            raise ValueError(f"the optimizer state '{key}' does not fit the parameters")
        state.setdefault(int(index), {})[name] = value
    # Options that a newer torch has added keep their defaults.
    groups = [defaults | saved for defaults, saved in zip(new, plain["groups"], strict=True)]
    load_state_(optimizer, {"state": state, "param_groups": groups})
    _check_step(optimizer)


def _check_step(optimizer: Optimizer) -> None:
    """Raise if the next step would fail; each parameter is tried as a copy, with its state and a gradient of zero."""
    for group in optimizer.param_groups:
        for name, option in group.items():
            if isinstance(option, int | float) and not abs(option) <= MAX_OPTION:
                raise ValueError(f"its optimizer has {name}={str(option)[:20]}, beyond any use")
        for parameter in group["params"]:
            twin = nn.Parameter(parameter.detach().clone())
            twin.grad = torch.zeros_like(twin)
            trial = copy.copy(optimizer)
            trial.param_groups = [{**group, "params": [twin]}]
            trial.state = defaultdict(dict, {twin: copy.deepcopy(optimizer.state.get(parameter, {}))})
            try:
                if type(optimizer).__module__.startswith("torch.optim"):  # whose constructors check their options
                    accepted = inspect.signature(type(optimizer)).parameters
                    options = {name: value for name, value in group.items() if name in accepted}
                    type(optimizer)(**{**options, "params": [twin]})
                trial.step()
            # Whatever the arithmetic of an optimizer raises for options and state that do not fit together.
            except Exception as error:
                raise ValueError(f"its optimizer cannot take a step ({type(error).__name__}: {error})") from error
            if not all_finite([twin.detach()]):
                raise ValueError("its optimizer state or options are not finite")


def load_state_(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state, with tensors on the device and in the dtype of their parameters, but scalars in their own dtype.

    ``load_state_dict`` would also widen scalars such as NAdam's product of momenta, which then round differently.

    Args:
        optimizer: The optimizer.
        state: What its ``state_dict()`` returned.
    """
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.ndim == 0:
                loaded = optimizer.state[parameters[index]][name]
                optimizer.state[parameters[index]][name] = loaded.to(value.dtype)


def _fits(value: Any, parameter: Tensor) -> bool:
    """Return whether a value may be state of a parameter: a number, of its shape, or with some axes reduced to 1."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return True
    return value.ndim == parameter.ndim and all(
        size in (1, full) for size, full in zip(value.shape, parameter.shape, strict=True)
    )

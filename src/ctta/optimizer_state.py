"""An optimiser's state as named tensors and JSON, and back."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


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

"""An optimiser's state as named tensors and JSON, in the shape that ``Optimizer.load_state_dict`` takes back."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def split_state(optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state as a JSON part (options of the groups, plain numbers) and tensors named ``<parameter>.<name>``."""
    state = optimizer.state_dict()
    values = {f"{number}.{name}": value for number, of in state["state"].items() for name, value in of.items()}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in values.items() if name not in tensors}
    return {"groups": state["param_groups"], "numbers": numbers}, tensors


def restore_state(
    optimizer: Optimizer, plain: dict[str, Any], tensors: dict[str, Tensor], *, keep_options: bool
) -> None:
    """Give a fresh optimiser the state that :func:`split_state` took; ValueError if it does not fit.

    Args:
        optimizer: to change.
        plain: the JSON part.
        tensors: the tensors.
        keep_options: leave learning rate and the like as the fresh optimiser has them.
    """
    fresh = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in fresh] != [group["params"] for group in plain["groups"]]:
        raise ValueError("its optimiser has other parameter groups")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**plain["numbers"], **tensors}.items():
        number, name = int(key.split(".", 1)[0]), key.split(".", 1)[1]
        if number >= len(parameters) or not _fits(value, parameters[number]):
            raise ValueError(f"its optimiser state '{key}' does not fit the parameters")
        state.setdefault(number, {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": fresh if keep_options else plain["groups"]})


def _fits(value: Any, parameter: Tensor) -> bool:
    """Whether a state may belong to a parameter: a single number, its shape, or that shape with axes summed out."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return True
    return value.ndim == parameter.ndim and all(
        size in (1, full) for size, full in zip(value.shape, parameter.shape, strict=True)
    )

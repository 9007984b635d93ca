"""Steps that happen completely or not at all: what a block did to a model is undone if the block raises."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ctta.core.model import AdaptiveModel
from ctta.core.parallel import change_call, current_call
from ctta.optim import load_state_

_TABLES = ("_parameters", "_buffers", "_modules")  # where a module keeps what it consists of


@contextmanager
def restore_on_error(model: AdaptiveModel, *, learns: bool = True) -> Iterator[Callable[[], None]]:
    """Undo, bit for bit, what the block does to a model if it raises: weights, optimizer, buffers, counters, records.

    Only tensors that a step may change are cloned, rather than the whole model, since every guarded step pays for it.
    Within another block of the same model, or of one that wraps it, in which it has made no step yet, nothing is cloned
    again: the outer block restores.

    Args:
        model: The model, with everything that it wraps.
        learns: Whether what it wraps may learn; if not, only the state of the wrapper itself is cloned.

    Yields:
        A function that undoes what the block did so far, also if it does not raise. An error propagates.

    >>> import ctta
    >>> model = ctta.Tent(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    >>> try:
    ...     with restore_on_error(model):
    ...         logits = model(torch.rand(8, 4))
    ...         raise OSError("the answer could not be sent")
    ... except OSError:
    ...     model.num_steps
    0
    """
    parts, protected = list(_wrapped_models(model)) if learns else [model], current_call().saved_models
    known = [own for part in parts if (own := protected.get(id(part))) is not None and own.is_current]
    if len(known) == len(parts):
        yield partial(_restore_all_, known)
        return
    saved = [_SavedModel(part) for part in parts]
    with change_call(saved_models={**protected, **{id(each.model): each for each in saved}}):
        try:
            yield partial(_restore_all_, saved)
        except BaseException:
            _restore_all_(saved)
            raise


def _restore_all_(saved: "list[_SavedModel]") -> None:
    for part in saved:
        part.restore_()


def untrained_parameters(model: AdaptiveModel) -> list[Tensor]:
    """Return the parameters beside those that the optimizer trains in the same network, such as TENT's convolutions."""
    found: list[Tensor] = []
    for network in model.children():
        if network is model.source or isinstance(network, AdaptiveModel):  # which has a state of its own
            continue
        parameters = list(network.parameters())
        if any(parameter.requires_grad for parameter in parameters):
            found += [parameter for parameter in parameters if not parameter.requires_grad]
    return found


def _wrapped_models(model: AdaptiveModel) -> Iterator[AdaptiveModel]:
    """Yield a model, the one that it wraps, and so on."""
    part: AdaptiveModel | None = model
    while part is not None:
        yield part
        part = part.wrapped


class _SavedModel:
    """The state of a model without the source and the models inside it, which have states of their own."""

    def __init__(self, model: AdaptiveModel) -> None:
        self.model = model
        self.attributes = dict(vars(model))
        modules = list(_own_modules(model))
        # A step may assign a buffer or a network instead of writing into it.
        self.tables = [(module, {name: dict(vars(module)[name]) for name in _TABLES}) for module in modules]
        unchanging = {id(tensor) for tensor in untrained_parameters(model)}
        own = {
            id(tensor): tensor
            for _, tables in self.tables
            for tensor in (*tables["_parameters"].values(), *tables["_buffers"].values())
            if tensor is not None and id(tensor) not in unchanging
        }
        with torch.inference_mode(False):
            self.tensors = [(tensor, tensor.detach().clone()) for tensor in own.values()]
            self.optimizer_state = None if model.optimizer is None else _clone_state(model.optimizer.state_dict())

    @property
    def is_current(self) -> bool:
        """Whether the model has made no step since."""
        return bool(self.model.num_steps == self.attributes["num_steps"])

    def restore_(self) -> None:
        """Give the model this state again; what happens to it afterwards leaves the saved state as it is."""
        with torch.no_grad():
            for tensor, old in self.tensors:
                tensor.copy_(old)
        vars(self.model).clear()
        vars(self.model).update(self.attributes)
        for module, tables in self.tables:
            vars(module).update({name: dict(table) for name, table in tables.items()})
        if self.model.optimizer is not None and self.optimizer_state is not None:
            load_state_(self.model.optimizer, _clone_state(self.optimizer_state))


def _clone_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an optimizer's state; ``deepcopy`` takes several times as long for many tensors."""
    values = {
        index: {
            name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for name, value in own.items()
        }
        for index, own in state["state"].items()
    }
    return {**state, "state": values, "param_groups": copy.deepcopy(state["param_groups"])}


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and its modules, but not the source nor another model: a guard's last good copy never changes."""
    yield module
    source = getattr(module, "source", None)
    for child in module.children():
        if child is not source and not isinstance(child, AdaptiveModel):
            yield from child.modules()

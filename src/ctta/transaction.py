"""Steps that happen completely or not at all: what a block did to a model is undone if the block raises."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ctta.base import AdaptiveModel
from ctta.optim import load_state_

_TABLES = ("_parameters", "_buffers", "_modules")  # where a module keeps what it consists of

# Models that an outer block restores. A property of the call: streams in other threads have blocks of their own.
_protected: ContextVar[frozenset[int]] = ContextVar("_protected", default=frozenset())


@contextmanager
def restore_on_error(model: AdaptiveModel) -> Iterator[None]:
    """Undo, bit for bit, what the block does to a model if it raises: weights, optimizer, buffers, counters, records.

    Only tensors that a step may change are cloned, rather than the whole model, since every guarded step pays for it.
    Within another block of the same model, or of one that wraps it, nothing is cloned again: the outer block restores.

    Args:
        model: The model, with everything that it wraps.

    Yields:
        Nothing; the error propagates.

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
    if id(model) in _protected.get():
        yield
        return
    parts = list(_wrapped_models(model))
    saved = [_SavedModel(part) for part in parts]
    token = _protected.set(_protected.get() | {id(part) for part in parts})
    try:
        yield
    except BaseException:
        for part in saved:
            part.restore_()
        raise
    finally:
        _protected.reset(token)


def untrained_parameters(model: AdaptiveModel) -> list[Tensor]:
    """Return the parameters beside those that the optimizer trains in the same network, such as TENT's convolutions."""
    found: list[Tensor] = []
    for network in model.children():
        parameters = list(network.parameters())
        if network is not model.source and any(parameter.requires_grad for parameter in parameters):
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
            self.optimizer_state = None if model.optimizer is None else _clone_state(model.optimizer)

    def restore_(self) -> None:
        """Give the model this state again."""
        with torch.no_grad():
            for tensor, old in self.tensors:
                tensor.copy_(old)
        vars(self.model).clear()
        vars(self.model).update(self.attributes)
        for module, tables in self.tables:
            vars(module).update(tables)
        if self.model.optimizer is not None and self.optimizer_state is not None:
            load_state_(self.model.optimizer, self.optimizer_state)


def _clone_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return a copy of the state; ``deepcopy``, which does the same, takes several times as long for many tensors."""
    state = optimizer.state_dict()
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

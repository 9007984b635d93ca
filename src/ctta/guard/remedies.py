"""Snapshots of a method, and the ways back to one or to the source."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from ctta.base import AdaptiveModel
from ctta.optim import load_state_

Remedy = Literal["rollback", "reset", "soft_reset", "freeze"]
SOFT_RESET_WEIGHT = 0.9  # of the source in the average that a soft reset computes


@torch.inference_mode(False)
def take_snapshot(model: AdaptiveModel) -> AdaptiveModel:
    """Return a copy of a stream that shares what never changes: the source, and the student's untrained parameters."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in _untrained_parameters(model)}
    for child in model.children():
        if isinstance(child, AdaptiveModel) and child is not model.wrapped:
            shared[id(child)] = child  # the last good snapshot of a guard, which is replaced and never changed
    snapshot = copy.deepcopy(model, {id(model.source): model.source, **shared})
    snapshot.last_step = None
    return snapshot


@contextmanager
def restore_on_error(model: AdaptiveModel) -> Iterator[None]:
    """Undo, bit for bit, what a step within the context did to a method if the context raises.

    Only tensors that a step may change are cloned, rather than the whole model, since every guarded step pays for it.
    """
    unchanging = {id(tensor) for tensor in [*model.source.parameters(), *model.source.buffers()]}
    unchanging |= {id(tensor) for tensor in _untrained_parameters(model)}
    tensors = [tensor for tensor in [*model.parameters(), *model.buffers()] if id(tensor) not in unchanging]
    before = [tensor.detach().clone() for tensor in tensors]
    optimizer = model.optimizer
    optimizer_state = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
    attributes = {**model.counters, "last_step": model.last_step}
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
        if optimizer is not None and optimizer_state is not None:
            load_state_(optimizer, optimizer_state)
        for name, value in attributes.items():
            setattr(model, name, value)
        raise


def _untrained_parameters(model: AdaptiveModel) -> list[Tensor]:
    """Return the parameters beside those that the optimizer trains in the same network, such as TENT's convolutions."""
    found: list[Tensor] = []
    for network in model.children():
        parameters = list(network.parameters())
        if network is not model.source and any(parameter.requires_grad for parameter in parameters):
            found += [parameter for parameter in parameters if not parameter.requires_grad]
    return found


def roll_back(model: AdaptiveModel, snapshot: AdaptiveModel) -> AdaptiveModel:
    """Return a stream with the snapshot's networks and optimizer, and the current counters."""
    restored = take_snapshot(snapshot)
    for name, value in model.counters.items():
        setattr(restored, name, value)
    return restored


@torch.no_grad()
def soft_reset(model: AdaptiveModel, snapshot: AdaptiveModel) -> AdaptiveModel:
    """Move every network most of the way back to the source; the optimizer keeps its momenta."""
    originals = dict(model.source.named_parameters())
    for network in model.children():
        if network is model.source:
            continue
        for name, parameter in network.named_parameters():
            original = originals.get(name)
            if original is not None and original.shape == parameter.shape:
                pulled = parameter.lerp(original, SOFT_RESET_WEIGHT)
                parameter.copy_(torch.where(parameter.isfinite(), pulled, original))
    return model


def reset(model: AdaptiveModel, snapshot: AdaptiveModel) -> AdaptiveModel:
    """Return a stream that starts at the source, with a new optimizer."""
    return model.fork()


#: Functions of the method and its last good snapshot that return the model to continue with. To add one, name it in
#: ``Remedy`` and in :class:`~ctta.guard.EventKind` too. The wrapper freezes after a "freeze".
REMEDIES: dict[Remedy, Callable[[AdaptiveModel, AdaptiveModel], AdaptiveModel]] = {
    "rollback": roll_back,
    "reset": reset,
    "soft_reset": soft_reset,
    "freeze": roll_back,
}

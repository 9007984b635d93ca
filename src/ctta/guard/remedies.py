"""Snapshots of a method, and the ways back to one or to the source."""

import copy
from collections.abc import Callable
from typing import Literal

import torch

from ctta.core.model import AdaptiveModel
from ctta.core.transaction import untrained_parameters

Remedy = Literal["rollback", "reset", "soft_reset", "freeze"]
SOFT_RESET_WEIGHT = 0.9  # of the source in the average that a soft reset computes


@torch.inference_mode(False)
def take_snapshot(model: AdaptiveModel) -> AdaptiveModel:
    """Return a copy of a stream that shares what never changes: the source, and the student's untrained parameters."""
    shared = {id(tensor): tensor for tensor in untrained_parameters(model)}
    snapshot = copy.deepcopy(model, {id(model.source): model.source, **shared})
    snapshot.last_step = None
    return snapshot


def roll_back(model: AdaptiveModel, snapshot: AdaptiveModel) -> AdaptiveModel:
    """Return a stream with the snapshot's networks and optimizer, and the current counters."""
    restored = take_snapshot(snapshot)
    restored._compilation, restored._activation_plan = model._compilation, model._activation_plan
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

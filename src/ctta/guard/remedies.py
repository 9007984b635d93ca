"""Snapshots of a method, and the ways back to one or to the source."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from ctta.base import AdaptiveModel

PULL = 0.9  # the share of the way back to the source that a soft reset goes


@torch.inference_mode(False)
def snapshot(model: AdaptiveModel) -> AdaptiveModel:
    """A copy of all that may change; the source, and what is never trained in a student, is shared with the model."""
    fixed: dict[int, object] = {id(tensor): tensor for tensor in _never_trained(model)}
    taken = copy.deepcopy(model, {id(model.source): model.source, **fixed})
    taken.last_step = None
    return taken


def _never_trained(model: AdaptiveModel) -> list[Tensor]:
    """The parameters beside those that the optimiser trains, in the same network: TENT's convolutions."""
    found: list[Tensor] = []
    for network in model.children():
        parameters = list(network.parameters())
        if network is not model.source and any(parameter.requires_grad for parameter in parameters):
            found += [parameter for parameter in parameters if not parameter.requires_grad]
    return found


def go_on_from(model: AdaptiveModel, good: AdaptiveModel) -> AdaptiveModel:
    """A stream with the snapshot's networks and optimiser, and the model's counters: time does not go back."""
    back = snapshot(good)
    for name, value in model.counters.items():
        setattr(back, name, value)
    return back


@torch.no_grad()
def pull_to_source(model: AdaptiveModel, good: AdaptiveModel) -> AdaptiveModel:
    """Move every network most of the way back to the source; the optimiser keeps its momenta."""
    originals = dict(model.source.named_parameters())
    for network in model.children():
        if network is model.source:
            continue
        for name, parameter in network.named_parameters():
            original = originals.get(name)
            if original is not None and original.shape == parameter.shape:
                parameter.copy_(torch.where(parameter.isfinite(), parameter.lerp(original, PULL), original))
    return model


def begin_anew(model: AdaptiveModel, good: AdaptiveModel) -> AdaptiveModel:
    """The source, and an optimiser without a past."""
    return model.fork()


#: What can be done to a method, given it and its last good snapshot.
REMEDIES: dict[str, Callable[[AdaptiveModel, AdaptiveModel], AdaptiveModel]] = {
    "rollback": go_on_from,
    "reset": begin_anew,
    "soft_reset": pull_to_source,
    "freeze": go_on_from,
}

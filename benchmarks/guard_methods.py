"""The methods that the guards are tried on, at their usual learning rate or at a wrong one."""

from functools import partial

import torch

import ctta
from ctta.base import AdaptiveModel

USUAL_RATE = 1e-3
BATCH_SIZE = 50


def method(name: str, factor: float = 1.0) -> AdaptiveModel:
    """TENT, or CoTTA with eight views, on the embedded network, with Adam at so many times the usual rate."""
    optimizer = partial(torch.optim.Adam, lr=factor * USUAL_RATE)
    if name == "tent":
        return ctta.Tent(ctta.models.embedded(), optimizer=optimizer)
    return ctta.CoTTA.fast(ctta.models.embedded(), optimizer=optimizer)

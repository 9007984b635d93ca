"""The methods on which the guards are tested, at their usual or at a wrong learning rate."""

from functools import partial

import torch

import ctta
from ctta.core.model import AdaptiveModel

USUAL_RATE = 1e-3
BATCH_SIZE = 50


def make_method(name: str, factor: float = 1.0) -> AdaptiveModel:
    """Return TENT, or CoTTA with eight views, on the embedded network, with Adam at a multiple of the usual rate."""
    optimizer = partial(torch.optim.Adam, lr=factor * USUAL_RATE)
    if name == "tent":
        return ctta.Tent(ctta.models.embedded(), optimizer=optimizer)
    return ctta.CoTTA.fast(ctta.models.embedded(), optimizer=optimizer)

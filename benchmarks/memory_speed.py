"""The time of a step of the methods with a memory or statistics of their own, relative to the bare passes."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from baseline import faster_layout, forward
from measurements import Measurement, time_ratio
from step_speed import cifar_batch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

import ctta
from ctta.functional import entropy
from ctta.norms import find_norm_parameters
from ctta.surgery import train_only_

BATCH_SIZE = 192  # three updates per batch, from a memory of 64 each
TARGET = 1.10


def measure() -> Iterator[Measurement]:
    """Yield the ratio of each method."""
    x, memory = cifar_batch(BATCH_SIZE), cifar_batch(64)
    stats = ctta.source_stats(ctta.models.embedded(), [x], batch_stats=0.0)
    every_image: dict[str, Any] = {"min_confidence": 0.0}  # so that an update has as many images as that of the others
    views: dict[str, Any] = {"views": ()}  # whose cost is measured by step_speed.py
    cases: list[tuple[Callable[..., ctta.AdaptiveModel], dict[str, Any], int, Tensor, int, int]] = [
        # method, settings, then per batch: number of updates, their images, forward passes, and those with a backward
        (ctta.RoTTA, views, 3, memory, 1, 1),
        (ctta.PeTTA, views | {"source_stats": stats}, 1, memory, 2, 1),
        (ctta.NOTE, {}, 3, memory, 0, 1),
        (ctta.SoTTA, every_image, 3, memory, 0, 2),
        (ctta.TRIBE, views | {"max_entropy": 1.0}, 1, x, 1, 2),
        (ctta.BNAlpha, {}, 0, x, 0, 0),
        (ctta.BNEMA, {}, 1, x, 1, 0),
    ]
    for method, settings, num_updates, images, num_forward, num_backward in cases:
        ratio = step_ratio(method, settings, x, num_updates, images, num_forward, num_backward)
        name = f"{getattr(method, '__name__', method)} step / the same bare passes, ResNet-20, batch {BATCH_SIZE}"
        yield Measurement(name, ratio, TARGET)


def step_ratio(
    method: Callable[..., ctta.AdaptiveModel],
    settings: dict[str, Any],
    x: Tensor,
    num_updates: int,
    images: Tensor,
    num_forward: int,
    num_backward: int,
) -> float:
    net = faster_layout(ctta.models.embedded, x, forward)
    predictor, learner = copy.deepcopy(net).eval(), copy.deepcopy(net)
    for module in predictor.modules():
        if isinstance(module, _BatchNorm):
            module.track_running_stats = True
    model = method(predictor, **settings)
    train_only_(learner, find_norm_parameters(learner))
    optimizer = torch.optim.Adam([parameter for parameter in learner.parameters() if parameter.requires_grad], lr=1e-3)

    def bare_passes() -> None:
        forward(predictor if num_updates else learner, x)  # without an update, the statistics are of the batch
        for _ in range(num_updates):
            for _ in range(num_forward):
                forward(learner, images)
            for _ in range(num_backward):
                entropy(learner(images)).mean().backward()
            if num_backward:
                optimizer.step()
                optimizer.zero_grad()

    return time_ratio(partial(model, x), bare_passes, pairs=8, warm_up=2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in measure():
        print(row, flush=True)

"""What a guard costs: a guarded step beside a bare one, on a calm stream and with every batch inspected."""

from collections.abc import Callable, Iterator

import torch
from measurements import Measurement, time_ratio
from torch import Tensor

import ctta
from ctta.base import AdaptiveModel
from ctta.guard import CollapseThresholds, Guarded
from ctta.guard.schedule import MIN_HEALTHY_INSPECTIONS

#: No alarm, and no doubt that would make looks more frequent: what is timed is a stream that is well.
NEVER = CollapseThresholds(margin=1e9, class_loss=1e9, shift=1e9, class_sorting=1e9)
PERIOD = 20  # batches, in which the usual guard looks five times and takes two snapshots


def measure() -> Iterator[Measurement]:
    name = "guarded / bare, ResNet-20, batch 50"
    yield Measurement(f"TENT {name}", ratio(ctta.Tent, 4), 1.35)
    yield Measurement(f"TENT {name}, every batch inspected", ratio(ctta.Tent, 1), 2.2)
    yield Measurement(f"CoTTA.fast {name}", ratio(ctta.CoTTA.fast, 4), 1.08)


def ratio(build: Callable[..., AdaptiveModel], inspect_every: int) -> float:
    bare, inner = build(ctta.models.embedded()), build(ctta.models.embedded())
    guarded = Guarded(inner, thresholds=NEVER, inspect_every=inspect_every)
    x = torch.rand(50, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for _ in range(MIN_HEALTHY_INSPECTIONS):  # a new guard looks at every batch at first
        guarded(x)

    def many(model: AdaptiveModel, x: Tensor) -> None:
        for _ in range(PERIOD):
            model(x)

    return time_ratio(lambda: many(guarded, x), lambda: many(bare, x), pairs=3)

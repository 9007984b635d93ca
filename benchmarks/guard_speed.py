"""The cost of a guard: a guarded step relative to a bare one, on a healthy stream and with every batch inspected."""

from collections.abc import Callable, Iterator

import torch
from measurements import Measurement, time_ratio
from torch import Tensor

import ctta
from ctta.base import AdaptiveModel
from ctta.guard import CollapseThresholds, Guarded
from ctta.guard.schedule import MIN_HEALTHY_INSPECTIONS

#: Limits that are never reached, so that a healthy stream is timed: no alarm, and no more inspections than usual.
NEVER = CollapseThresholds(margin=1e9, class_loss=1e9, shift=1e9, class_sorting=1e9, few_classes=1e9)
PERIOD = 20  # batches, in which the default guard inspects five times and takes two snapshots


def measure() -> Iterator[Measurement]:
    """Yield the ratios of TENT and CoTTA."""
    name = "guarded / bare, ResNet-20, batch 50"
    yield Measurement(f"TENT {name}", measure_ratio(ctta.Tent, 4), 1.35)
    yield Measurement(f"TENT {name}, every batch inspected", measure_ratio(ctta.Tent, 1), 2.2)
    yield Measurement(f"CoTTA.fast {name}", measure_ratio(ctta.CoTTA.fast, 4), 1.08)


def measure_ratio(build: Callable[..., AdaptiveModel], inspect_every: int) -> float:
    """Return the time of guarded steps relative to bare ones."""
    bare, wrapped = build(ctta.models.embedded()), build(ctta.models.embedded())
    guarded = Guarded(wrapped, thresholds=NEVER, inspect_every=inspect_every)
    x = torch.rand(50, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for _ in range(MIN_HEALTHY_INSPECTIONS):  # a new guard inspects every batch at first
        guarded(x)

    def run_period(model: AdaptiveModel, x: Tensor) -> None:
        for _ in range(PERIOD):
            model(x)

    return time_ratio(lambda: run_period(guarded, x), lambda: run_period(bare, x), pairs=3)

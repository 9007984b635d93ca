"""The cost of a guard: a guarded step relative to a bare one, on a healthy stream and with every batch inspected."""

from collections.abc import Callable, Iterator

import torch
from measurements import Measurement, compare_times
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
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield measure_guard(f"TENT {name}", ctta.Tent, 4, 1.15)
        yield measure_guard(f"TENT {name}, every batch inspected", ctta.Tent, 1, 2.2)
        yield measure_guard(f"CoTTA.fast {name}", ctta.CoTTA.fast, 4, 1.05)
    finally:
        torch.set_num_threads(num_threads)


def measure_guard(name: str, build: Callable[..., AdaptiveModel], inspect_every: int, target: float) -> Measurement:
    """Return the time of guarded steps relative to bare ones."""
    bare, wrapped = build(ctta.models.embedded()), build(ctta.models.embedded())
    guarded = Guarded(wrapped, thresholds=NEVER, inspect_every=inspect_every)
    x = torch.rand(50, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for _ in range(MIN_HEALTHY_INSPECTIONS):  # a new guard inspects every batch at first
        guarded(x)

    def run_period(model: AdaptiveModel, x: Tensor) -> None:
        for _ in range(PERIOD):
            model(x)

    run_period(bare, x)
    times = compare_times(lambda: run_period(guarded, x), lambda: run_period(bare, x), budget=20)
    return Measurement(name, times.ratio, target, low=times.low, high=times.high)


if __name__ == "__main__":
    for row in measure():
        print(row, flush=True)

"""The cost of a guard: a guarded step relative to a bare one, on a healthy stream and with every batch inspected."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

import ctta
from benchmarks.speed.measurements import Measurement, compare_times
from ctta.core.model import AdaptiveModel
from ctta.guard import CollapseThresholds, Guarded
from ctta.guard.recovery import MIN_HEALTHY_INSPECTIONS

#: Limits that are never reached, so that a healthy stream is timed: no alarm, and no more inspections than usual.
NEVER = CollapseThresholds(margin=1e9, class_loss=1e9, shift=1e9, class_sorting=1e9, few_classes=1e9)
PERIOD = 16  # batches, in which the default guard inspects twice
BATCH_SIZE = 50


def measure() -> Iterator[Measurement]:
    """Yield the ratios of TENT and CoTTA."""
    name = "guarded / bare, ResNet-20, batch 50"
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield measure_guard(f"TENT {name}", ctta.Tent, 8, 1.15, budget=20)
        yield measure_guard(f"TENT {name}, every batch inspected", ctta.Tent, 1, 2.2, budget=10)
        yield measure_guard(f"CoTTA.fast {name}", ctta.CoTTA.fast, 8, 1.05, budget=30)
    finally:
        torch.set_num_threads(num_threads)


def measure_guard(
    name: str, build: Callable[..., AdaptiveModel], inspect_every: int, target: float, *, budget: float
) -> Measurement:
    """Return the time of guarded steps relative to bare ones, on images that come with the library.

    A guard looks closer where the confidence falls, so the images are real; both models take turns by the period.
    """
    bare, wrapped = build(ctta.models.embedded()), build(ctta.models.embedded())
    guarded = Guarded(wrapped, thresholds=NEVER, inspect_every=inspect_every)
    images, _ = ctta.data.datasets.sample().domain("gaussian_noise", 3).read(np.arange(PERIOD * BATCH_SIZE))
    batches = images.split(BATCH_SIZE)
    for x in batches[: MIN_HEALTHY_INSPECTIONS + 1]:  # a new guard inspects every batch at first
        guarded(x)
        bare(x)

    def run_period(model: AdaptiveModel) -> None:
        for x in batches:
            model(x)

    times = compare_times(lambda: run_period(guarded), lambda: run_period(bare), budget=budget)
    return Measurement(name, times.ratio, target, low=times.low, high=times.high)


if __name__ == "__main__":
    for row in measure():
        print(row, flush=True)

"""What a frame costs: single images through methods and forms, relative to the network as trained, on one thread."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

import ctta
from benchmarks.speed.measurements import Measurement, compare_times
from ctta.core.model import AdaptiveModel
from ctta.guard import Guarded

NUM_FRAMES = 24
PERIOD = 8
#: A label, and what builds the model around a network.
FORMS: tuple[tuple[str, Callable[[torch.nn.Module], AdaptiveModel]], ...] = (
    ("BN Stats Adapt", ctta.BNStats),
    ("TENT", ctta.Tent),
    ("vane_fast", ctta.VANE.fast),
    ("VANE", ctta.VANE),
    ("CoTTA.fast", ctta.CoTTA.fast),
    ("CoTTA", ctta.CoTTA),
)


def read_frames() -> list[Tensor]:
    """Return single frames in fog."""
    images, _ = ctta.data.datasets.sample().domain("fog", 3).read(np.arange(NUM_FRAMES))
    return list(images.split(1))


def measure() -> Iterator[Measurement]:
    """Yield the ratios of all forms, and those with a target: of a guard, and of the frames between two updates."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        frames = read_frames()
        bare = ctta.models.embedded()
        source = ctta.Source(bare)
        for label, build in FORMS:
            yield _compare(f"{label} / as trained, single frames", build(bare), source, frames, float("inf"))
        for label, build in FORMS[1:4]:
            guarded, method = Guarded(build(bare)), build(bare)
            yield _compare(f"guarded {label} / {label}, single frames", guarded, method, frames, 1.2)
        for label, build in (FORMS[1], FORMS[3]):
            spaced = Guarded(build(bare), adapt_every=PERIOD)
            name = f"guarded {label}, adapt_every={PERIOD} / as trained"
            yield _compare(f"{name}, all frames", spaced, source, frames, float("inf"))
            between = Guarded(build(bare), adapt_every=10**6)
            yield _compare(f"{name}, between updates", between, source, frames, 1.3)
    finally:
        torch.set_num_threads(num_threads)


def _compare(name: str, model: AdaptiveModel, other: AdaptiveModel, frames: list[Tensor], target: float) -> Measurement:
    def run(each: AdaptiveModel) -> None:
        for x in frames:
            each(x)

    for each in (model, other):  # a new guard looks at every batch, and a new optimizer has no state
        run(each)
    times = compare_times(partial(run, model), partial(run, other), budget=6)
    return Measurement(name, times.ratio, target, 1000 * times.ours / len(frames), times.low, times.high)


if __name__ == "__main__":
    for row in measure():
        print(row, flush=True)

"""How the overhead of a step grows with the batch size and with the number of steps: it should not."""

from collections.abc import Iterator
from functools import partial

import ctta
from benchmarks.speed.baseline import faster_layout, forward, forward_backward
from benchmarks.speed.measurements import Measurement, Ratio, live_bytes, seconds, time_ratio
from benchmarks.speed.steps import cifar_batch
from ctta.views import image_views

SMALL, LARGE = 1, 256
NUM_VIEWS = 8
NUM_STEPS, NUM_PAIRS = 1000, 100


def measure() -> Iterator[Measurement]:
    """Yield the ratios of overhead, time and memory."""
    yield Measurement(
        f"overhead per image, batch {LARGE} / batch {SMALL}, ResNet-20, {NUM_VIEWS} views", batch_ratio(), 1.0
    )
    time, memory = step_ratios()
    yield time.as_measurement(f"time of a step, after {NUM_STEPS} steps / at the start", 1.05)
    yield Measurement(f"persistent memory, after {NUM_STEPS} steps / after one", memory, 1.0)


def batch_ratio() -> float:
    """Return the ratio of the overhead per image in large and small batches."""
    return overhead_per_image(LARGE, pairs=3) / overhead_per_image(SMALL, pairs=15)


def overhead_per_image(batch_size: int, pairs: int) -> float:
    """Return the seconds per image that a CoTTA step takes beyond the passes of the network."""
    x = cifar_batch(batch_size)
    net = faster_layout(ctta.models.embedded, x, forward)
    model = ctta.CoTTA(net, threshold=1.0, views=image_views(NUM_VIEWS))

    def baseline_passes() -> None:
        for _ in range(NUM_VIEWS + 1):
            forward(net, x)
        forward_backward(net, x)

    baseline_passes()
    model(x)
    times = [(seconds(partial(model, x)), seconds(baseline_passes)) for _ in range(pairs)]
    # The difference of two large numbers, so of their minima, which noise disturbs least.
    ours, baseline = (min(column) for column in zip(*times, strict=True))
    overhead: float = (ours - baseline) / batch_size
    return overhead


def step_ratios() -> tuple[Ratio, float]:
    """Return the ratios of time and memory of a model after many steps to a new one."""
    x = cifar_batch(4)
    aged, new = (ctta.CoTTA(ctta.models.embedded(), threshold=1.0, views=image_views(1)) for _ in range(2))
    new(x)
    aged(x)
    memory_at_start = live_bytes()
    for _ in range(NUM_STEPS - 1):
        aged(x)
    memory = live_bytes() / memory_at_start
    return time_ratio(partial(aged, x), partial(new, x), pairs=NUM_PAIRS), memory

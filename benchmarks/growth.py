"""How the overhead of a step grows with the batch, and with the steps already made: it should not."""

from collections.abc import Iterator
from functools import partial
from statistics import median

from bare import faster_layout, forward, forward_backward
from measuring import Measurement, live_bytes, seconds
from step_speed import cifar_batch

import ctta
from ctta.views import image_views

SMALL, LARGE = 1, 256
NUM_STEPS, WINDOW = 1000, 100


def measure() -> Iterator[Measurement]:
    yield Measurement(f"overhead per image, batch {LARGE} / batch {SMALL}, ResNet-20, 32 views", batch_ratio(), 1.0)
    time, memory = step_ratios()
    yield Measurement(f"time of a step, the last {WINDOW} of {NUM_STEPS} / the first", time, 1.05)
    yield Measurement(f"memory that lasts, after {NUM_STEPS} steps / after {WINDOW}", memory, 1.0)


def batch_ratio() -> float:
    """Of what a CoTTA step takes per image beyond its bare passes."""
    return overhead_per_image(LARGE, pairs=3) / overhead_per_image(SMALL, pairs=15)


def overhead_per_image(batch_size: int, pairs: int) -> float:
    x = cifar_batch(batch_size)
    bare = faster_layout(ctta.models.embedded, x, forward)
    model = ctta.CoTTA(bare, threshold=1.0)

    def bare_passes() -> None:
        for _ in range(33):
            forward(bare, x)
        forward_backward(bare, x)

    bare_passes()
    model(x)
    times = [(seconds(partial(model, x)), seconds(bare_passes)) for _ in range(pairs)]
    # The difference of two large numbers: of their least, which a noisy machine disturbs the least.
    ours, alone = (min(column) for column in zip(*times, strict=True))
    overhead: float = (ours - alone) / batch_size
    return overhead


def step_ratios() -> tuple[float, float]:
    x = cifar_batch(4)
    model = ctta.CoTTA(ctta.models.embedded(), threshold=1.0, views=image_views(1))
    model(x)
    times, memory = [], {}
    for number in range(1, NUM_STEPS + 1):
        times.append(seconds(partial(model, x)))
        if number in (WINDOW, NUM_STEPS):
            memory[number] = live_bytes()
    return median(times[-WINDOW:]) / median(times[:WINDOW]), memory[NUM_STEPS] / memory[WINDOW]

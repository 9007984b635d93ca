"""How the overhead of a step grows with the batch, and with the steps already made: it should not."""

from collections.abc import Iterator
from functools import partial

from bare import faster_layout, forward, forward_backward
from measuring import Measurement, live_bytes, seconds, time_ratio
from step_speed import cifar_batch

import ctta
from ctta.views import image_views

SMALL, LARGE = 1, 256
NUM_STEPS, NUM_PAIRS = 1000, 100


def measure() -> Iterator[Measurement]:
    yield Measurement(f"overhead per image, batch {LARGE} / batch {SMALL}, ResNet-20, 32 views", batch_ratio(), 1.0)
    time, memory = step_ratios()
    yield Measurement(f"time of a step, after {NUM_STEPS} steps / at the start", time, 1.05)
    yield Measurement(f"memory that lasts, after {NUM_STEPS} steps / after one", memory, 1.0)


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
    """An aged model against a new one, of time and of memory."""
    x = cifar_batch(4)
    aged, new = (ctta.CoTTA(ctta.models.embedded(), threshold=1.0, views=image_views(1)) for _ in range(2))
    new(x)
    aged(x)
    young = live_bytes()
    for _ in range(NUM_STEPS - 1):
        aged(x)
    memory = live_bytes() / young
    return time_ratio(partial(aged, x), partial(new, x), pairs=NUM_PAIRS), memory

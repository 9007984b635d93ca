"""The time of a forward pass with blended statistics relative to one with the running statistics."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.networks.load import streets_bn
from benchmarks.speed.baseline import forward
from benchmarks.speed.measurements import Measurement, compare_times
from ctta.nn.surgery import copy_for_adaptation

LAYOUTS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
TARGET = 1.15


def measure() -> Iterator[Measurement]:
    """Yield the ratio on a network for segmentation in both layouts."""
    x = torch.rand(2, 3, 128, 256, generator=torch.Generator().manual_seed(0))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for layout in LAYOUTS:
            yield measure_layout(x, layout)
    finally:
        torch.set_num_threads(num_threads)


def measure_layout(x: Tensor, layout: str) -> Measurement:
    """Return the ratio in one memory layout."""
    net = streets_bn().to(memory_format=LAYOUTS[layout])  # type: ignore[call-overload]
    x = x.to(memory_format=LAYOUTS[layout])
    blended, running = (copy_for_adaptation(net, batch_stats=fraction, output=None) for fraction in (0.1, 0.0))
    for each in (blended, running):
        forward(each, x)
    times = compare_times(partial(forward, blended, x), partial(forward, running, x), budget=6, max_pairs=101)
    name = f"blended / running statistics, forward, StreetCNN, 2 x 128 x 256, {layout}"
    return Measurement(name, times.ratio, TARGET, low=times.low, high=times.high)


if __name__ == "__main__":
    for row in measure():
        print(row, flush=True)

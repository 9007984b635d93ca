"""The error of methods under autocast beside that in float32.

    python -m benchmarks.speed.precision --dtype bfloat16

The embedded network on its 15 corruptions, 200 sample images each at severity 5, in batches of 50; seed 0.
"""

import argparse
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

import ctta
from ctta.data.corruptions import CORRUPTIONS, corrupt
from ctta.data.datasets import sample

NUM_IMAGES, BATCH_SIZE, SEVERITY = 200, 50, 5
METHODS = ("source", "tent", "cotta_fast", "vane")


def read_stream() -> list[tuple[Tensor, Tensor]]:
    """Return the batches with their labels."""
    data, found = sample(), []
    labels = torch.from_numpy(np.asarray(data.labels[:NUM_IMAGES]))
    for name in CORRUPTIONS:
        pixels = np.ascontiguousarray(corrupt(data.images[:NUM_IMAGES], name, SEVERITY))
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        found += list(zip(images.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True))
    return found


def measure_error(method: str, stream: list[tuple[Tensor, Tensor]], device: str, dtype: torch.dtype | None) -> float:
    """Return the error of a method in percent; in float32 without a dtype."""
    model, wrong = ctta.adapt(ctta.models.embedded().to(device), method), 0
    for x, y in stream:
        context: AbstractContextManager[object] = nullcontext() if dtype is None else torch.autocast(device, dtype)
        with context:
            wrong += int((model(x.to(device)).argmax(1) != y.to(device)).sum())
    return 100 * wrong / sum(len(y) for _, y in stream)


def main() -> None:
    """Print a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    stream = read_stream()
    for method in METHODS:
        exact = measure_error(method, stream, options.device, None)
        coarse = measure_error(method, stream, options.device, getattr(torch, options.dtype))
        print(f"{method:12} float32 {exact:6.2f} %, {options.dtype} {coarse:6.2f} %, {coarse - exact:+.2f}")


if __name__ == "__main__":
    main()

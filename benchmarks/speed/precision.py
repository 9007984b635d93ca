"""The error of methods under autocast beside that in float32.

    python -m benchmarks.speed.precision --device cpu

The embedded network on its 15 corruptions, 200 sample images each at severity 5, in batches of 50; seed 0.
"""

import argparse
from typing import get_args

import numpy as np
import torch
from torch import Tensor

import ctta
from ctta.core.options import Precision, resolve_device
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


def measure_error(method: str, stream: list[tuple[Tensor, Tensor]], device: str, amp: Precision | None) -> float:
    """Return the error of a method in percent; in float32 without ``amp``."""
    model, wrong = ctta.adapt(ctta.models.embedded().to(device), method, amp=amp), 0
    for x, y in stream:
        wrong += int((model(x.to(device)).argmax(1) != y.to(device)).sum())
    return 100 * wrong / sum(len(y) for _, y in stream)


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = resolve_device(parser.parse_args().device)
    stream, precisions = read_stream(), (None, *get_args(Precision))
    print("| error in percent |" + "".join(f" {amp or 'float32'} |" for amp in precisions))
    print("|---|" + "---:|" * len(precisions))
    for method in METHODS:
        errors = (measure_error(method, stream, device, amp) for amp in precisions)
        print(f"| {method} |" + "".join(f" {error:.2f} |" for error in errors), flush=True)


if __name__ == "__main__":
    main()

"""Images per second of the longest stream, gradual CIFAR10-C (131 x 10,000 images), and how memory grows on the way.

    python benchmarks/stream_speed.py [CIFAR-10-C folder]

Without a folder, files of the published shapes are made first, filled with noise (2.3 GB). Fails below the target, or
if memory grows.
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.lib.format import open_memmap

from ctta.datasets import CifarC
from ctta.streams import corruption_order, gradual

TARGET = 50_000
ALLOWED_MIB = 64  # far below the 150 MB of one file, and above the allocator's own breathing


def anonymous_mib() -> float:
    """Memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def write_noise(folder: Path) -> None:
    generator = np.random.default_rng(0)
    np.save(folder / "labels.npy", np.tile(generator.integers(0, 10, 10_000), 5))
    chunk = generator.integers(0, 256, (10_000, 32, 32, 3), np.uint8)
    for name in corruption_order():
        stored = open_memmap(folder / f"{name}.npy", "w+", np.uint8, (50_000, 32, 32, 3))
        for start in range(0, 50_000, 10_000):
            stored[start : start + 10_000] = chunk
        stored.flush()


def measure(folder: Path) -> bool:
    """Whether the stream was fast enough, with flat memory."""
    stream = gradual(CifarC(folder), variant="authors", order=0)
    batches = iter(stream)
    next(batches)
    before, highest, num_images, start = anonymous_mib(), 0.0, 0, time.perf_counter()
    for number, batch in enumerate(batches):
        num_images += len(batch.x)
        if number % 500 == 0:
            highest = max(highest, anonymous_mib())
    rate = num_images / (time.perf_counter() - start)
    print(f"{num_images:,} images, {rate:,.0f} images/s (target {TARGET:,})")
    print(f"anonymous memory {before:.0f} MiB after the first batch, at most {highest:.0f} MiB later")
    return rate >= TARGET and highest - before <= ALLOWED_MIB


if __name__ == "__main__":
    if len(sys.argv) > 1:
        passed = measure(Path(sys.argv[1]))
    else:
        with TemporaryDirectory(dir=".") as made:
            write_noise(Path(made))
            passed = measure(Path(made))
    sys.exit(None if passed else f"missed: at least {TARGET:,} images/s, at most {ALLOWED_MIB} MiB more memory")

"""Measure the throughput and memory growth of the longest stream, gradual CIFAR10-C (131 x 10,000 images).

    python -m benchmarks.speed.streams [CIFAR-10-C folder]

Without a folder, files of the published shapes are written first, filled with noise (2.3 GB). The script fails if the
throughput is below the target or memory grows.
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.lib.format import open_memmap

from ctta.data.datasets import CifarC
from ctta.data.streams import corruption_order, gradual

MIN_IMAGES_PER_SECOND = 50_000
MAX_GROWTH_MIB = 64  # far below the 150 MB of one file, above the fluctuation of the allocator


def anonymous_mib() -> float:
    """Return the memory of this process that is not backed by a file."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def write_noise(folder: Path) -> None:
    """Write files of the published shapes, filled with noise."""
    generator = np.random.default_rng(0)
    np.save(folder / "labels.npy", np.tile(generator.integers(0, 10, 10_000), 5))
    chunk = generator.integers(0, 256, (10_000, 32, 32, 3), np.uint8)
    for name in corruption_order():
        stored = open_memmap(folder / f"{name}.npy", "w+", np.uint8, (50_000, 32, 32, 3))
        for start in range(0, 50_000, 10_000):
            stored[start : start + 10_000] = chunk
        stored.flush()


def measure(folder: Path) -> bool:
    """Return whether the stream was fast enough and memory stayed flat."""
    stream = gradual(CifarC(folder), variant="authors", order=0)
    batches = iter(stream)
    next(batches)
    before, peak, num_images, start = anonymous_mib(), 0.0, 0, time.perf_counter()
    for index, batch in enumerate(batches):
        num_images += len(batch.x)
        if index % 500 == 0:
            peak = max(peak, anonymous_mib())
    rate = num_images / (time.perf_counter() - start)
    print(f"{num_images:,} images, {rate:,.0f} images/s (target {MIN_IMAGES_PER_SECOND:,})")
    print(f"anonymous memory: {before:.0f} MiB after the first batch, peak {peak:.0f} MiB")
    return rate >= MIN_IMAGES_PER_SECOND and peak - before <= MAX_GROWTH_MIB


if __name__ == "__main__":
    if len(sys.argv) > 1:
        passed = measure(Path(sys.argv[1]))
    else:
        with TemporaryDirectory(dir=".") as folder:
            write_noise(Path(folder))
            passed = measure(Path(folder))
    expected = f"at least {MIN_IMAGES_PER_SECOND:,} images/s and at most {MAX_GROWTH_MIB} MiB more memory"
    sys.exit(None if passed else f"failed: expected {expected}")

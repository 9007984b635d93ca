"""Seconds per corruption for 10,000 images of 32x32 at severity 5, and their sum.

python benchmarks/corruptions_speed.py [images.npy] [--hold-out]

Fails if the fifteen of the benchmark take longer than the target.
"""

import sys
import time

import numpy as np
from numpy.typing import NDArray

from ctta.corruptions import CORRUPTIONS, HOLD_OUT, corrupt

TARGET = 60.0  # seconds for the fifteen, on two cores


def main() -> None:
    files = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    names = [*CORRUPTIONS, *(HOLD_OUT if "--hold-out" in sys.argv else ())]
    images = np.resize(np.load(files[0]), (10_000, 32, 32, 3)) if files else smooth_images(10_000)
    total = fifteen = 0.0
    for name in names:
        start = time.perf_counter()
        corrupt(images, name, 5)
        seconds = time.perf_counter() - start
        total += seconds
        fifteen += seconds if name in CORRUPTIONS else 0
        print(f"{name:20}{seconds:7.2f} s", flush=True)
    print(f"{'sum':20}{total:7.2f} s")
    if fifteen > TARGET:
        sys.exit(f"missed: the fifteen took {fifteen:.0f} s, more than {TARGET:.0f}")


def smooth_images(count: int) -> NDArray[np.uint8]:
    """Stand-ins for photographs: random 4x4 colours enlarged, plus a little grain."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (count, 4, 4, 3), np.uint8).repeat(8, axis=1).repeat(8, axis=2)
    return np.clip(blocks + rng.normal(0, 6, blocks.shape), 0, 255).astype(np.uint8)


if __name__ == "__main__":
    main()

"""Measure the seconds per corruption for 10,000 images of 32x32 at severity 5, and their sum.

    python -m benchmarks.speed.corruptions [images.npy] [--hold-out]

Exits with an error if the fifteen corruptions of the benchmark take longer than the target.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctta.data.corruptions import CORRUPTIONS, HOLD_OUT, corrupt

TARGET_SECONDS = 60.0  # for the fifteen, on two cores
NUM_IMAGES = 10_000


def main() -> None:
    """Parse arguments, measure and print."""
    parser = argparse.ArgumentParser(description="Measure the speed of the corruptions.")
    parser.add_argument("images", type=Path, nargs="?", help="uint8 array (N, 32, 32, 3); random images by default")
    parser.add_argument("--hold-out", action="store_true", help="also measure the four hold-out corruptions")
    arguments = parser.parse_args()
    names = [*CORRUPTIONS, *(HOLD_OUT if arguments.hold_out else ())]
    if arguments.images:
        images: NDArray[np.uint8] = np.resize(np.load(arguments.images), (NUM_IMAGES, 32, 32, 3))
    else:
        images = make_images(NUM_IMAGES)
    seconds = {}
    for name in names:
        start = time.perf_counter()
        corrupt(images, name, 5)
        seconds[name] = time.perf_counter() - start
        print(f"{name:20}{seconds[name]:7.2f} s", flush=True)
    print(f"{'sum':20}{sum(seconds.values()):7.2f} s")
    fifteen = sum(seconds[name] for name in CORRUPTIONS)
    if fifteen > TARGET_SECONDS:
        sys.exit(f"target missed: the fifteen took {fifteen:.0f} s, more than {TARGET_SECONDS:.0f}")


def make_images(count: int) -> NDArray[np.uint8]:
    """Return stand-ins for photographs: random 4x4 colors enlarged, plus a little grain."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (count, 4, 4, 3), np.uint8).repeat(8, axis=1).repeat(8, axis=2)
    return np.clip(blocks + rng.normal(0, 6, blocks.shape), 0, 255).astype(np.uint8)


if __name__ == "__main__":
    main()

"""A stream to choose settings on: images and corruptions that no reported table uses."""

from functools import cache
from pathlib import Path

import numpy as np
from cifar10_files import read_split

from ctta.corruptions import HOLD_OUT
from ctta.datasets import Corrupted
from ctta.streams import Segment, Stream

FIRST, BLOCK = 2000, 500


@cache
def hold_out_stream(cifar: Path, batch_size: int) -> Stream:
    """CIFAR-10 test images 2,000 to 9,999, each once, 500 under each of the four hold-out corruptions in turn.

    The sample that comes with the library, and so every reported stream, is of the first 2,000 test images.
    """
    images, labels = read_split(cifar, "test")
    data = Corrupted(images[FIRST:], labels[FIRST:], name="cifar10 test 2000-9999", seed=1)
    segments = []
    for number, first in enumerate(range(0, len(images) - FIRST, BLOCK)):
        corruption = list(HOLD_OUT)[number % len(HOLD_OUT)]
        segments.append(Segment(corruption, data.domain(corruption, 5), np.arange(first, first + BLOCK)))
    return Stream("hold-out", segments, batch_size=batch_size)

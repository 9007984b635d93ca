"""Stream for choosing settings: images and corruptions that no reported table uses."""

from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.data.cifar10_files import read_split
from ctta.data.corruptions import HOLD_OUT
from ctta.data.datasets import ArrayDataset
from ctta.data.streams import Segment, Stream

FIRST_IMAGE, SEGMENT_SIZE = 2000, 500


@cache
def hold_out_stream(cifar: Path, batch_size: int) -> Stream:
    """Return CIFAR-10 test images 2,000 to 9,999, in segments of 500 that cycle through the hold-out corruptions.

    The sample that comes with the library, and so every reported stream, consists of the first 2,000 test images.
    """
    images, labels = read_split(cifar, "test")
    data = ArrayDataset(images[FIRST_IMAGE:], labels[FIRST_IMAGE:], name="cifar10 test 2000-9999", seed=1)
    segments = []
    for number, first in enumerate(range(0, len(images) - FIRST_IMAGE, SEGMENT_SIZE)):
        corruption = list(HOLD_OUT)[number % len(HOLD_OUT)]
        segments.append(Segment(corruption, data.domain(corruption, 5), np.arange(first, first + SEGMENT_SIZE)))
    return Stream("hold-out", segments, batch_size=batch_size)

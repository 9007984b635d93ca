"""Run VANE, or another method, on the streams that its settings were chosen on: docs/results/vane.md.

    python -m benchmarks.choose.vane --cifar FOLDER
    python -m benchmarks.choose.vane --cifar FOLDER --streams sorted64,recur64 --set max_distance=None
    python -m benchmarks.choose.vane --cifar FOLDER --model file:benchmarks/train/small_networks.py:bn --method source

Images are CIFAR-10 test images 2,000 to 9,999 under the hold-out corruptions; no reported table has either.
"""

import argparse
import ast
from collections.abc import Callable
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

import ctta
from benchmarks.data.cifar10_files import read_split
from benchmarks.data.hold_out import FIRST_IMAGE
from ctta.data.corruptions import HOLD_OUT
from ctta.data.datasets import ArrayDataset
from ctta.data.streams import Segment, Stream, correlated, mixed, mixed_correlated, rounds
from ctta.models import load

#: The corruptions at severity 5; and at severities 3 to 5, shuffled once.
FOUR = tuple((name, 5) for name in HOLD_OUT)
TWELVE = tuple(
    (list(HOLD_OUT)[place // 3], 3 + place % 3) for place in np.random.default_rng(0).permutation(12).tolist()
)


class HoldOut:
    """The images, and streams of them.

    Args:
        cifar: Folder of the CIFAR-10 files.
    """

    def __init__(self, cifar: Path) -> None:
        images, labels = read_split(cifar, "test")
        self.labels = labels[FIRST_IMAGE:]
        self.data = ArrayDataset(images[FIRST_IMAGE:], self.labels, name="cifar10 test 2000-9999", seed=1)

    def one_after_the_other(
        self, domains: tuple[tuple[str, int], ...], size: int, batch_size: int, *, first: int = 0, same: bool = False
    ) -> Stream:
        """Return ``size`` images of each domain; the same ones, or further ones for each."""
        segments = []
        for number, (name, severity) in enumerate(domains):
            start = first if same else first + number * size
            domain = self.data.domain(name, severity)
            segments.append(Segment(f"{name}-{severity}", domain, np.arange(start, start + size)))
        return Stream("hold-out", segments, batch_size=batch_size)

    def singles_and_pairs(self, size: int, batch_size: int, *, first: int = 0) -> Stream:
        """Return ten harder domains: each corruption, and each pair of them, one on top of the other."""
        segments = []
        for number, names in enumerate([*((name,) for name in HOLD_OUT), *combinations(HOLD_OUT, 2)]):
            domain = self.data.combine(*((name, 5) for name in names))
            rows = np.arange(first + number * size, first + (number + 1) * size)
            segments.append(Segment("+".join(names), domain, rows))
        return Stream("hold-out pairs", segments, batch_size=batch_size)

    def scenes(self, num: int, size: int, batch_size: int, seed: int) -> Stream:
        """Return scenes of one class in one domain, as a video has them."""
        generator, segments = np.random.default_rng(seed), []
        used = np.zeros(10, int)
        domains = [(name, severity) for name in HOLD_OUT for severity in (3, 5)]
        for number in range(num):
            label, domain = int(generator.integers(10)), domains[int(generator.integers(len(domains)))]
            rows = np.flatnonzero(self.labels == label)[used[label] : used[label] + size]
            used[label] += size
            segments.append(Segment(f"scene {number}", self.data.domain(*domain), rows))
        return Stream("hold-out scenes", segments, batch_size=batch_size)

    def clean(self) -> Stream:
        """Return 2,000 clean images."""
        return Stream("clean", [Segment("clean", self.data.combine(), np.arange(2000))], batch_size=200)


STREAMS: dict[str, Callable[[HoldOut], Stream]] = {
    "iid200": lambda data: data.one_after_the_other(FOUR, 1000, 200),
    "iid50": lambda data: data.one_after_the_other(FOUR, 1000, 50),
    "iid10": lambda data: data.one_after_the_other(FOUR, 400, 10),
    "single": lambda data: data.one_after_the_other(FOUR, 400, 1),
    "clean200": HoldOut.clean,
    "mixed200": lambda data: mixed(data.one_after_the_other(FOUR, 1000, 200)),
    "rotta64": lambda data: correlated(data.one_after_the_other(FOUR, 1000, 64)),
    "sorted64": lambda data: correlated(data.one_after_the_other(FOUR, 1000, 64), sampler="sorted"),
    "mixnote64": lambda data: mixed_correlated(data.one_after_the_other(FOUR, 960, 64)),
    "recur64": lambda data: correlated(rounds(data.one_after_the_other(TWELVE, 64, 64, same=True), 12)),
    "recur64s5": lambda data: correlated(
        rounds(data.one_after_the_other(FOUR * 3, 64, 64, first=500, same=True), 12), seed=3
    ),
    "hardiid64": lambda data: data.singles_and_pairs(256, 64, first=100),
    "hardrotta64": lambda data: correlated(data.singles_and_pairs(256, 64, first=100)),
    "hardsorted64": lambda data: correlated(data.singles_and_pairs(256, 64, first=100), sampler="sorted"),
    "mixhard64": lambda data: mixed_correlated(data.singles_and_pairs(384, 64)),
    "scene32": lambda data: data.scenes(40, 64, 32, seed=0),
    "scene8": lambda data: data.scenes(40, 40, 8, seed=1),
    "scene64": lambda data: data.scenes(60, 64, 64, seed=2),
}


@cache
def _load(cifar: Path) -> HoldOut:
    return HoldOut(cifar)


def measure_error(model: ctta.AdaptiveModel, stream: Stream) -> float:
    """Return the error of a model over a stream, in percent."""
    wrong = [model(batch.x).argmax(1) != batch.y for batch in stream]
    return 100 * float(torch.cat(wrong).double().mean())


def main() -> None:
    """Print the error on each stream."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--streams", default=",".join(STREAMS), help=f"some of {', '.join(STREAMS)}")
    parser.add_argument("--model", default="embedded", help="network, as for ctta bench")
    parser.add_argument("--method", default="vane_fast", help="method, as for ctta.adapt")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="setting of the method")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = {name: ast.literal_eval(value) for name, _, value in (each.partition("=") for each in arguments.set)}
    for name in arguments.streams.split(","):
        model = ctta.adapt(load(arguments.model), arguments.method, **settings)
        print(f"{name:14}{measure_error(model, STREAMS[name](_load(arguments.cifar))):5.1f} %", flush=True)


if __name__ == "__main__":
    main()

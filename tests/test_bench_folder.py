"""``ctta bench folder``: the full report for a user's own labeled images and network."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import output, user_error
from own_methods import CLASSES, NETWORK, write_labeled_tree, write_method

from ctta.benchmark import BenchmarkOptions, build_task
from ctta.cli.bench import bench
from ctta.data.corruptions import corrupt
from ctta.data.datasets import FolderDataset
from ctta.data.streams import image_folder
from ctta.errors import DataError
from ctta.io.images import to_unit_floats


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder to work in, with labeled images, a network and a method."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    write_labeled_tree(tmp_path / "val")
    write_method(tmp_path)
    return tmp_path


def test_any_labeled_tree_gets_the_full_report(folder: Path) -> None:
    arguments = ("folder", "--data", "val", "--model", "file:net.py:net", "--corruptions", "none,fog,snow")
    chosen = ("--severity", "3", "--methods", "source,tent,file:mine.py:Mine", "--batch-size", "6", "--out", "run")
    text = output(bench, *arguments, *chosen, "--orders", "standard,0", "--threads", "1")
    assert "TENT-continual" in text and "Mine" in text
    assert {path.suffix for path in Path("run/report").iterdir()} >= {".html", ".md", ".csv", ".tex"}
    results = {path.name: json.loads((path / "about.json").read_text()) for path in Path("run/cells").iterdir()}
    assert results["source-standard"]["domains"] == ["clean", "fog 3", "snow 3"]
    assert results["source-order0"]["domains"] == ["snow 3", "fog 3", "clean"]  # as in the published order
    assert results["source-standard"]["class_names"] == list(CLASSES)
    assert len(results) == 6
    again = output(bench, *arguments, *chosen, "--orders", "standard,0", "--threads", "1", "--json")
    assert {json.loads(line)["row"].rpartition(":")[2] for line in again.splitlines()} == {"source", "tent", "Mine"}


def test_the_error_is_that_of_the_network(folder: Path) -> None:
    """Counted by hand on the images of the tree, in any order."""
    options = BenchmarkOptions(data=str(folder / "val"), model=f"file:{folder}/net.py:net", corruptions=("none",))
    task = build_task("folder", options)
    net, stream = task.make_network(), task.make_stream(None)
    assert stream.domains == ["clean"]
    wrong = sum(int((net(batch.x).argmax(1) != batch.y).sum()) for batch in stream)
    by_name = image_folder(folder / "val", order="name")
    assert wrong == sum(int((net(batch.x).argmax(1) != batch.y).sum()) for batch in by_name)


def test_images_are_shuffled_resized_and_corrupted_like_arrays(folder: Path) -> None:
    data = FolderDataset(folder / "val", size=(24, 20))
    labels = data.labels.tolist()
    assert sorted(labels) == [0] * 6 + [1] * 6 + [2] * 6 and labels != sorted(labels)
    rows = np.array([3, 7])
    x, y = data.domain("gaussian_noise", 3).read(rows)
    assert x.shape == (2, 3, 24, 20) and y is not None and y.tolist() == [labels[3], labels[7]]
    clean = data.domain("none", 3).read(rows)[0]
    pixels = (clean * 255).round().byte().permute(0, 2, 3, 1).numpy()
    assert torch.equal(x, to_unit_floats(corrupt(pixels, "gaussian_noise", 3, index=rows)))
    assert torch.equal(x[1], data.domain("gaussian_noise", 3).read(rows[1:])[0][0])


def test_classes_give_the_order_of_the_outputs(folder: Path) -> None:
    network = ("--data", "val", "--model", "file:net.py:four_classes", "--corruptions", "none", "--threads", "1")
    error = user_error(bench, "folder", *network)
    assert error.startswith("the network has 4 classes and the images have 3: give --classes FILE")
    Path("classes.txt").write_text("cat\nbee\nyak\nant\n")
    output(bench, "folder", *network, "--methods", "source", "--classes", "classes.txt", "--out", "run")
    data = FolderDataset("val", classes=["cat", "bee", "yak", "ant"])
    assert {path.parent.name: int(label) for path, label in zip(data.paths, data.labels, strict=True)} == {
        "cat": 0,
        "bee": 1,
        "ant": 3,
    }
    with pytest.raises(DataError, match="did you mean 'cats'"):
        FolderDataset("val", classes=["ant", "bee", "cats"])


def test_mistakes_are_named(folder: Path) -> None:
    assert "--model SPEC is missing: ctta bench folder --data val/" in user_error(bench, "folder", "--data", "val")
    model = ("--model", "file:net.py:net", "--corruptions", "none")
    assert "--data DIR is missing" in user_error(bench, "folder", *model)
    assert "nowhere does not exist: check the path" in user_error(bench, "folder", "--data", "nowhere", *model)
    message = user_error(bench, "folder", "--data", "val", *model, "--mean", "0.5", "--std", "0,0,0")
    assert "one positive std per channel" in message

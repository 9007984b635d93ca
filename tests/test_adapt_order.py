"""``ctta adapt``: the order of images, images that cannot be read, and mistakes that leave nothing behind."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import output, user_error, write_images, write_network

from ctta import models
from ctta.adapt import adapt_folder
from ctta.adapt.predictions import PredictionFile
from ctta.cli.adapt import adapt
from ctta.errors import ConfigError

OPTIONS = ("--method", "tent", "--batch-size", 4)


class Folder:
    """A folder of images, in which the command is run with a table and a state."""

    def __init__(self, root: Path) -> None:
        self.root, self.images = root, root / "images"
        self.table, self.state = root / "table.csv", root / "state.safetensors"
        self.options = ["--model", write_network(root), "--images", self.images, *OPTIONS]
        self.resumable = [*self.options, "--out", self.table, "--state", self.state]

    def read(self, table: Path | None = None) -> list[dict[str, str]]:
        with (table or self.table).open(newline="") as file:
            return list(csv.DictReader(file))

    def names(self) -> list[str]:
        return [row["image"] for row in self.read()]

    def uninterrupted(self, *options: object) -> bytes:
        table = self.root / "uninterrupted.csv"
        table.unlink(missing_ok=True)
        output(adapt, *self.options, "--out", table, *options)
        return table.read_bytes()

    def run_in_process(self, *options: object) -> "subprocess.CompletedProcess[str]":
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "ctta", "adapt", *self.resumable, *options]
        return subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)


@pytest.fixture
def flat(tmp_path: Path) -> Folder:
    write_images(tmp_path / "images", range(10))
    return Folder(tmp_path)


@pytest.fixture
def tree(tmp_path: Path) -> Folder:
    for number, name in enumerate(("bird", "cat", "dog")):
        write_images(tmp_path / "images" / name, range(8 * number, 8 * number + 8))
    return Folder(tmp_path)


# Order


def test_class_folders_are_shuffled_and_the_summary_says_so(tree: Folder) -> None:
    text = output(adapt, *tree.resumable)
    assert "Order: shuffled, always the same for the same names; --order name takes the images by path." in text
    names = tree.names()
    assert sorted(names) != names and len(names) == 24
    batches = [{name.split("/")[0] for name in names[start : start + 4]} for start in range(0, 24, 4)]
    assert sum(len(classes) > 1 for classes in batches) >= 5
    assert tree.table.read_bytes() == tree.uninterrupted("--order", "shuffle")
    assert "Order: by path." in output(adapt, *tree.options, "--out", tree.root / "b.csv", "--order", "name")
    assert [row["image"] for row in tree.read(tree.root / "b.csv")] == sorted(names)


def test_a_shuffled_run_resumes_exactly(tree: Folder) -> None:
    expected = tree.uninterrupted()

    def interrupt(num_done: int, total: int) -> None:
        if num_done in (8, 16):
            raise KeyboardInterrupt

    settings: dict[str, Any] = {"method": "tent", "batch_size": 4, "state": tree.state}
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            adapt_folder(
                models.load(write_network(tree.root)), tree.images, tree.table, on_progress=interrupt, **settings
            )
    assert "8 of them new" in output(adapt, *tree.resumable)
    assert tree.table.read_bytes() == expected


def test_images_that_are_added_to_a_tree_come_after_the_others(tree: Folder) -> None:
    output(adapt, *tree.resumable)
    first = tree.table.read_text()
    for number, name in enumerate(("bird", "cat", "eel")):
        write_images(tree.images / name, range(30 + 3 * number, 33 + 3 * number))
    assert "9 of them new" in output(adapt, *tree.resumable)
    assert tree.table.read_text().startswith(first)
    added = tree.names()[24:]
    assert sorted(added) != added and len(set(tree.names())) == 33
    assert "No new images: all 33" in output(adapt, *tree.resumable)


def test_the_folders_of_a_camera_stay_in_order(tmp_path: Path) -> None:
    for number, day in enumerate(("2026-11-16", "2026-11-17")):
        write_images(tmp_path / "images" / day, range(6 * number, 6 * number + 6))
    camera = Folder(tmp_path)
    assert "Order: by path." in output(adapt, *camera.resumable)
    assert camera.names() == sorted(camera.names())


def test_order_by_time(flat: Folder) -> None:
    for number, path in enumerate(sorted(flat.images.iterdir(), reverse=True)):
        os.utime(path, (1000 + number, 1000 + number))
    assert "Order: by time of modification." in output(adapt, *flat.resumable, "--order", "time")
    assert flat.names() == sorted(flat.names(), reverse=True)
    no_order: Any = "date"
    with pytest.raises(ConfigError):
        adapt_folder(models.load(write_network(flat.root)), flat.images, "x.csv", order=no_order)


# Images that cannot be read


def test_a_folder_without_a_readable_image(flat: Folder) -> None:
    for path in flat.images.iterdir():
        path.write_bytes(b"no image")
    text = output(adapt, *flat.resumable)
    assert text.startswith("No image could be read, so nothing was predicted.\n10 images could not be read; ")
    assert all(row["error"] for row in flat.read())


def test_images_of_several_sizes_and_a_folder_in_place_of_a_table(flat: Folder) -> None:
    write_images(flat.images, range(3, 4), side=20)
    text = user_error(adapt, *flat.resumable)
    assert "give --size HEIGHT WIDTH (size=) to resize them, or --batch-size 1" in text and not flat.table.exists()
    for folder in (flat.root, Path(".")):
        text = user_error(adapt, *flat.options, "--out", folder)
        assert text == f"{folder} is a folder; expected a file to write the table to, such as predictions.csv"


def test_a_truncated_image_is_skipped_and_tried_again(flat: Folder) -> None:
    first = flat.images / "000.png"
    content = first.read_bytes()
    first.write_bytes(content[:60])
    ended = flat.run_in_process()
    assert ended.returncode == 0, ended.stderr
    assert "has 10 rows, 9 of them new." in ended.stdout
    assert "1 image could not be read; the column 'error' of" in ended.stdout
    rows = flat.read()
    assert [row["image"] for row in rows if row["error"]] == ["000.png"]
    (row,) = (row for row in rows if row["error"])
    assert "truncated" in row["error"] and str(flat.root) not in row["error"]
    assert (row["batch"], row["class"], row["confidence"]) == ("0", "", "")
    before = flat.table.read_bytes()
    text = output(adapt, *flat.resumable)
    assert "No new images: all 9 are in" in text and "1 image could not be read" in text
    assert flat.table.read_bytes() == before and not flat.table.with_name("table.csv.before").exists()
    first.write_bytes(content)
    assert "has 10 rows, 1 of them new." in output(adapt, *flat.resumable)
    assert flat.names()[-1] == "000.png" and not any(row["error"] for row in flat.read())


def test_a_run_with_damaged_images_resumes_exactly(flat: Folder) -> None:
    for name in ("000.png", "004.png", "005.png", "006.png", "007.png"):  # the second batch as a whole
        (flat.images / name).write_bytes(b"no image")
    expected = flat.uninterrupted()
    assert expected.count(b"cannot identify image file") == 5

    def interrupt(num_done: int, total: int) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            adapt_folder(
                models.load(write_network(flat.root)),
                flat.images,
                flat.table,
                state=flat.state,
                method="tent",
                batch_size=4,
                on_progress=interrupt,
            )
    output(adapt, *flat.resumable)
    assert flat.table.read_bytes() == expected


def test_strict_stops_before_a_table_is_written(flat: Folder) -> None:
    (flat.images / "000.png").write_bytes(b"no image")
    assert "000.png is missing, truncated or not an image" in user_error(adapt, *flat.resumable, "--strict")
    assert not flat.table.exists() and not flat.state.exists()
    assert "9 of them new" in output(adapt, *flat.resumable)


# Mistakes


def test_a_wrong_number_of_classes_leaves_nothing_behind(flat: Folder) -> None:
    names = flat.root / "names.txt"
    names.write_text("one\ntwo\n")
    ended = flat.run_in_process("--classes", names)
    assert ended.returncode == 1 and "got 2 class names for a network with 5 classes" in ended.stderr
    assert not flat.table.exists() and not flat.state.exists()
    names.write_text("a\nb\nc\nd\ne\n")
    assert "10 rows" in output(adapt, *flat.resumable, "--classes", names)


def test_a_table_with_a_header_only_is_no_obstacle(flat: Folder) -> None:
    PredictionFile(flat.table, ["class", "name", "confidence"]).create()
    assert "10 rows" in output(adapt, *flat.options, "--out", flat.table)
    flat.table.write_text("some notes of mine\n")
    assert "exists but no state was given" in user_error(adapt, *flat.options, "--out", flat.table)


def test_another_size_is_refused(flat: Folder) -> None:
    output(adapt, *flat.resumable, "--size", 16, 16)
    assert json.loads(flat.state.with_name("state.safetensors.json").read_text()) == {"size": [16, 16]}
    write_images(flat.images, range(10, 12))
    message = "was made with other settings (size: [16, 16] → [32, 32]): use the same --size (size=), or another state"
    assert message in user_error(adapt, *flat.resumable, "--size", 32, 32)
    assert "size: [16, 16] → nothing" in user_error(adapt, *flat.resumable)
    assert "2 of them new" in output(adapt, *flat.resumable, "--size", 16, 16)
    flat.state.with_name("state.safetensors.json").unlink()  # as before sizes were recorded
    assert "No new images" in output(adapt, *flat.resumable, "--size", 16, 16)

"""``ctta adapt`` on few images: as many right answers as without adaptation, and a word on how they were normalized."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import output
from PIL import Image

from ctta.adapt.run import choose_fraction
from ctta.cli.adapt import adapt
from ctta.data.corruptions import corrupt
from ctta.data.datasets import sample

METHODS = {
    "tent": ("--method", "tent"),
    "cotta": ("--method", "cotta", "--set", "views=8"),  # a quarter, to save time
    "cotta_fast": ("--method", "cotta_fast"),
}


class SampleFolder:
    """A folder to which clean images of the sample are added, and the answers in the table of a command on it."""

    def __init__(self, root: Path) -> None:
        self.images, self.table, self.data = root / "camera", root / "table.csv", sample()
        self.images.mkdir()
        self.options = ["--model", "embedded", "--images", self.images, "--out", self.table, "--compare"]

    def add(self, numbers: range, *, noisy: bool = False) -> None:
        images = self.data.images[numbers.start : numbers.stop]
        if noisy:
            images = corrupt(images, "gaussian_noise", 5)
        for number, image in zip(numbers, images, strict=True):
            Image.fromarray(image).save(self.images / f"{number:04}.png")

    def num_right(self, column: str, numbers: range) -> int:
        with self.table.open(newline="") as file:
            classes = {int(Path(row["image"]).stem): int(row[column]) for row in csv.DictReader(file)}
        return sum(classes[number] == self.data.labels[number] for number in numbers)

    def check(self, numbers: range) -> None:
        """Check that the answers are not worse than the source's by more than two points, or one image."""
        ours, source = (self.num_right(column, numbers) for column in ("class", "source_class"))
        assert ours >= source - max(1, 0.02 * len(numbers)), f"{ours} right answers, and {source} without adaptation"
        assert source > 0.8 * len(numbers)


@pytest.fixture
def camera(tmp_path: Path) -> SampleFolder:
    return SampleFolder(tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_one_new_image_per_run(camera: SampleFolder, tmp_path: Path, method: str) -> None:
    options = [*camera.options, "--state", tmp_path / "state.safetensors", *METHODS[method]]
    camera.add(range(32))
    assert "Batches of 32 images: normalized with 10 % batch and 90 % source statistics.\n" in output(adapt, *options)
    new = range(32, 44)
    for number in new:
        camera.add(range(number, number + 1))
        text = output(adapt, *options)
        assert "Batches of 1 image: normalized with 2 % batch and 98 % source statistics.\n" in text
    camera.check(new)


@pytest.mark.parametrize("method", METHODS)
def test_batches_of_one_image(camera: SampleFolder, method: str) -> None:
    camera.add(images := range(60, 100))
    command = [sys.executable, "-m", "ctta", "adapt", *camera.options, *METHODS[method], "--batch-size", 1]
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    assert "Batches of 1 image: normalized with 2 % batch and 98 % source statistics.\n" in run.stdout
    camera.check(images)


def test_the_short_last_batch_counts(camera: SampleFolder) -> None:
    camera.add(range(20))
    text = output(adapt, *camera.options, "--method", "bn_stats", "--batch-size", 16, "--json")
    found = json.loads(text)["normalization"]
    assert [(each["batch_size"], each["num_batches"]) for each in found] == [(16, 1), (4, 1)]
    assert [each["batch_stats"] for each in found] == pytest.approx([0.1, 4 / 52])


def test_a_method_without_batch_statistics_says_nothing(camera: SampleFolder) -> None:
    camera.add(range(2))
    assert "normalized" not in output(adapt, *camera.options, "--method", "source")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--method", "tent"], "10 % batch and 90 % source statistics"),
        (["--method", "tent", "--set", "batch_stats=auto"], "with batch statistics"),
        (["--method", "tent", "--set", "batch_stats=0.5"], "50 % batch and 50 % source statistics"),
    ],
)
def test_statistics_are_blended_unless_the_user_decides(
    camera: SampleFolder, options: list[str], expected: str
) -> None:
    camera.add(range(32))
    assert expected in output(adapt, *camera.options, *options)


def test_batches_that_the_source_is_unsure_of_count_for_more(camera: SampleFolder) -> None:
    camera.add(range(32))
    camera.add(range(64, 96), noisy=True)
    options = [*camera.options, "--method", "tent", "--json"]
    (unsure, sure) = json.loads(output(adapt, *options))["normalization"]
    assert unsure == {"batch_size": 32, "num_batches": 1, "batch_stats": 0.4}
    assert sure == {"batch_size": 32, "num_batches": 1, "batch_stats": 0.1}
    noisy = range(64, 96)
    assert camera.num_right("class", noisy) > camera.num_right("source_class", noisy)


def test_batches_of_one_size_that_were_normalized_differently_are_counted(camera: SampleFolder) -> None:
    camera.add(range(8))
    camera.add(range(8, 16), noisy=True)
    text = output(adapt, *camera.options, "--method", "tent", "--batch-size", 8)
    assert "1 batch of 8 images: normalized with 14 % batch and 86 % source statistics.\n" in text
    assert "1 batch of 8 images: normalized with 10 % batch and 90 % source statistics.\n" in text


@pytest.mark.parametrize(("num_images", "confidence", "expected"), [(32, 0.91, 0.1), (32, 0.9, 0.4), (2, 0.99, 0.04)])
def test_the_fraction_is_limited_where_the_source_is_sure(num_images: int, confidence: float, expected: float) -> None:
    assert choose_fraction(num_images, confidence) == pytest.approx(expected)

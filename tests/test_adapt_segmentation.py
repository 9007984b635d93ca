"""``ctta adapt --images`` with a network that labels pixels: label maps, the shares of classes, resuming."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import output, user_error, write_network
from numpy.typing import NDArray
from PIL import Image
from torch import nn

import ctta
from ctta.adapt import adapt_folder
from ctta.cli.adapt import adapt
from ctta.data.streets import CLASSES, PALETTE, render_frame
from ctta.evaluation.metrics import PixelScore

STREETS = f"file:{Path(__file__).parents[1] / 'benchmarks' / 'networks' / 'load.py'}:streets_bn"
SIZE = (64, 128)


@pytest.fixture
def frames(tmp_path: Path) -> dict[str, NDArray[np.uint8]]:
    """Write frames to a folder; return their labels, which the command does not see."""
    (tmp_path / "frames" / "night").mkdir(parents=True)
    labels = {}
    for number, name in enumerate(["0.png", "1.jpg", "night/0.png", "night/1.png"]):
        frame = render_frame(number, "clear", size=SIZE)
        Image.fromarray(frame.image).save(tmp_path / "frames" / name)
        labels[name] = frame.label
    return labels


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_label_maps_and_shares_are_written(tmp_path: Path, frames: dict[str, NDArray[np.uint8]]) -> None:
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES))
    table, maps = tmp_path / "out" / "seen.csv", tmp_path / "out" / "seen.maps"
    given = ("--model", STREETS, "--images", tmp_path / "frames", "--out", table, "--batch-size", 2)
    text = output(
        adapt, *given, "--classes", tmp_path / "classes.txt", "--compare", "--state", tmp_path / "s.safetensors"
    )
    assert (
        f"{maps} has a label map per image" in text
        and "Shares of the pixels: " in text
        and "of the pixels differ" in text
    )
    rows = read_table(table)
    assert [row["image"] for row in rows] == sorted(frames)
    right = []
    for row in rows:
        name = row["image"]
        with Image.open(maps / (name if name.endswith(".png") else f"{name}.png")) as image:
            assert image.mode == "P" and image.size == SIZE[::-1]
            colors = np.array(image.getpalette()).reshape(-1, 3)[: len(CLASSES)]
            predicted = np.asarray(image)
        assert (colors == PALETTE).all()
        shares = [float(row[f"share {each}"]) for each in CLASSES]
        assert shares == pytest.approx(
            np.bincount(predicted.ravel(), minlength=len(CLASSES)) / predicted.size, abs=1e-4
        )
        assert row["name"] == CLASSES[int(np.argmax(shares))] and 0 <= float(row["changed"]) <= 1
        right.append((predicted == frames[name]).mean())
    assert np.mean(right) > 0.6  # the maps are of these images
    Image.fromarray(render_frame(9, "snow", size=SIZE).image).save(tmp_path / "frames" / "later.png")
    resumed = ("--classes", tmp_path / "classes.txt", "--compare", "--state", tmp_path / "s.safetensors")
    assert "5 rows, 1 of them new" in output(adapt, *given, *resumed)
    assert (maps / "later.png").exists() and len(read_table(table)) == 5


def test_label_maps_are_never_read_as_images(tmp_path: Path, frames: dict[str, NDArray[np.uint8]]) -> None:
    table = tmp_path / "frames" / "seen.csv"
    message = user_error(adapt, "--model", STREETS, "--images", tmp_path / "frames", "--out", table)
    assert "among the images" in message and not table.exists() and len(frames) == 4


def test_without_names_classes_have_numbers(tmp_path: Path, frames: dict[str, NDArray[np.uint8]]) -> None:
    model = write_network(tmp_path, "dense")
    output(adapt, "--model", model, "--images", tmp_path / "frames", "--out", tmp_path / "seen.csv", "--no-guard")
    (row, *_) = read_table(tmp_path / "seen.csv")
    assert sum(float(row[f"share {number}"]) for number in range(5)) == pytest.approx(1, abs=1e-3) and len(frames) == 4


def count_pixels(result: ctta.Result) -> int:
    (score,) = result.segments
    assert isinstance(score, PixelScore)
    return score.num_pixels


def test_pixels_to_ignore_have_any_label() -> None:
    net = torch.nn.Conv2d(3, 3, 1).eval()
    x, labels = torch.rand(8, 3, 8, 8), torch.randint(0, 3, (8, 8, 8))
    unknown = torch.rand(8, 8, 8) < 0.3

    def evaluate(label: int, **options: Any) -> ctta.Result:
        maps = labels.masked_fill(unknown, label)
        return ctta.evaluate(net, [(x[:4], maps[:4]), (x[4:], maps[4:])], **options)

    default, negative = evaluate(255), evaluate(-1, ignore_index=-1)
    assert negative.miou == default.miou != evaluate(0, ignore_index=-1).miou
    assert count_pixels(default) == count_pixels(negative) == int((~unknown).sum())
    with pytest.raises(ctta.InputError, match="ignore_index="):
        evaluate(-1)
    batches = [(x, labels.masked_fill(unknown, -1))] * 2
    table = ctta.compare({"source": net, "tent": "bn_stats"}, batches, ignore_index=-1)
    assert count_pixels(table.results["source"]) == 2 * int((~unknown).sum())


class ReturnsFeatures(nn.Module):
    """A network whose logits are the second of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ctta.models.embedded()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mean((2, 3)), self.net(x)


def test_the_first_batch_is_asked_with_the_settings_of_the_method(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number in range(2):
        Image.new("RGB", (32, 32), (90 * number, 40, 10)).save(tmp_path / "images" / f"{number}.png")
    summary = adapt_folder(
        ReturnsFeatures(), tmp_path / "images", tmp_path / "out.csv", method="tent", settings={"output": 1}
    )
    assert summary.num_images == 2

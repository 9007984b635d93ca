"""Errors per class of images, by name: in results and in reports."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from report_runs import ParsedPage
from torch import nn

import ctta
from ctta.benchmark.report import read_runs, write_report
from ctta.benchmark.report.runs import group_by_method
from ctta.benchmark.report.score_tables import build_class_table
from ctta.evaluation.metrics import ImageScore, score_images

KINDS = ("heron", "otter", "pike")


class Brightness(nn.Module):
    """Labels images by their brightness: dark, medium, bright."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.linspace(0, 1, num_classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -100 * (x.mean((1, 2, 3))[:, None] - self.centers) ** 2


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a tree of which all herons, half of the otters and no pikes have the brightness of their class."""
    brightness = {"heron": [0, 0], "otter": [128, 0], "pike": [0, 128]}
    for kind, values in brightness.items():
        for number, value in enumerate(values * 4):
            path = tmp_path / "val" / kind / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(path)
    return tmp_path / "val"


def test_a_report_has_the_error_of_each_class_by_name(tree: Path, tmp_path: Path) -> None:
    stream = ctta.data.streams.continual(ctta.data.datasets.FolderDataset(tree), names=("none",), batch_size=4)
    result = ctta.evaluate(Brightness(), stream, folder=tmp_path / "evaluation")
    assert result.class_error == {"heron": 0.0, "otter": 0.5, "pike": 1.0}
    page = write_report([tmp_path / "evaluation"], tmp_path / "report")
    heading, row = ParsedPage(page.read_text()).tables[1][:2]
    assert [text.split("|")[0] for text in heading][-4:] == [*KINDS, "mean"]
    assert [text.split("|")[0] for text in row][-4:] == ["0.0", "50.0", "100.0", "50.0"]
    text = (tmp_path / "report" / "report.md").read_text()
    assert "## Classes" in text and "Error per class in percent, over all images." in text
    latex = (tmp_path / "report" / "table.tex").read_text()
    assert re.search(r"heron.*otter.*pike", latex) and "Source & 0.0 & 50.0 & 100.0 & 50.0" in latex


def test_the_folders_of_a_tree_name_the_classes(tree: Path) -> None:
    clean = ctta.data.streams.image_folder(tree, batch_size=8)
    assert list(ctta.evaluate(Brightness(), clean).class_error) == list(KINDS)
    foggy = ctta.data.streams.continual(clean, names=("fog",), severity=1)
    assert list(ctta.evaluate(Brightness(), foggy).class_error) == list(KINDS)
    assert ctta.data.streams.folder(tree).class_names == ()  # without labels


def test_equal_methods_share_the_headline(tree: Path) -> None:
    stream, other = ctta.data.streams.image_folder(tree, batch_size=4), Brightness()
    other.centers.data = torch.tensor([1.0, 0.9, 0.0])
    comparison = ctta.compare({"source": Brightness(), "twin": Brightness(), "other": other}, stream)
    assert comparison.headline.startswith("source and twin have the lowest mean error, both 50.0 %; one run")


def test_the_images_of_the_library_have_names() -> None:
    stream = ctta.data.streams.continual(ctta.data.datasets.sample(), names=("fog",), limit=20)
    assert stream.class_names == ctta.models.CIFAR10_CLASSES
    result = ctta.evaluate(ctta.models.embedded(), stream)
    assert list(result.class_error) == list(ctta.models.CIFAR10_CLASSES)


def test_classes_that_are_not_counted_in_all_batches_have_no_table(tree: Path, tmp_path: Path) -> None:
    """A part that was counted would be misleading."""
    folder = tmp_path / "evaluation"
    stream = ctta.data.streams.continual(ctta.data.datasets.FolderDataset(tree), names=("none",), batch_size=4)
    expected = ctta.evaluate(Brightness(), stream, folder=folder)
    assert json.loads((folder / "about.json").read_text())["class_names"] == list(KINDS)
    first, *rest = (folder / "batches.jsonl").read_text().splitlines()
    old = json.loads(first)
    del old["score"]["classes"]
    (folder / "batches.jsonl").write_text("\n".join([json.dumps(old), *rest]) + "\n")
    resumed = ctta.evaluate(Brightness(), stream, folder=folder)
    assert resumed.error == expected.error and resumed.class_error == {}
    (run,) = read_runs([folder])
    assert build_class_table(group_by_method(run.results)) is None
    assert "### Classes" not in write_report([folder], tmp_path / "report").with_name("report.md").read_text()


def test_many_classes_are_neither_listed_nor_counted() -> None:
    batches = [(torch.rand(4, 3, 8, 8), torch.zeros(4, dtype=torch.long))]
    result = ctta.evaluate(Brightness(21), batches)
    assert len(result.class_error) == 21 and list(result.class_error.values())[1:] == [None] * 20
    assert build_class_table(group_by_method([result])) is None
    score = score_images(torch.zeros(2, 101), torch.tensor([0, 100]))
    assert score.classes == () and score.class_error == ()
    unlabeled = ctta.evaluate(Brightness(), [torch.rand(4, 3, 8, 8)])
    with pytest.raises(ctta.InputError):
        _ = unlabeled.class_error


def test_counts_add_up() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [1.0, 0.0], [torch.nan, 0.0]])
    score = score_images(logits, torch.tensor([0, 1, 1, 0]))
    assert score.classes == ((2, 1), (2, 1)) and (score + score).classes == ((4, 2), (4, 2))
    assert (score + ImageScore(1, 1, score.bins)).classes == ()
    assert ImageScore.from_json(json.loads(json.dumps(score.to_json()))) == score

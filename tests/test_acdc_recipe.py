"""The ACDC recipe, from a folder in the layout of ACDC to the report, by the command that a user types."""

import csv
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_cli import run
from torch.nn import functional as F

from ctta import models
from ctta.benchmark.report import write_report
from ctta.data import streams

CONDITIONS = ("fog", "night", "rain", "snow")
FULL, SIZE = (36, 64), (18, 32)  # of label maps, and of the network's input

NETWORK = """
import numpy as np
import torch
from torch import nn

class FullyConvolutional(nn.Module):
    # Predicts the nearest color, at half the size of its input; returns a dictionary as torchvision does.

    def __init__(self, num_classes=19):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 3, 2, 2, bias=False), nn.BatchNorm2d(3))
        self.classifier = nn.Conv2d(3, num_classes, 1)
        colors = np.random.default_rng(9).integers(0, 200, (256, 3))[:num_classes] / 255
        with torch.no_grad():
            self.features[0].weight.copy_(torch.eye(3)[:, :, None, None] / 4)
            self.classifier.weight.copy_(torch.from_numpy(40 * colors)[:, :, None, None])
            self.classifier.bias.copy_(torch.from_numpy(-20 * (colors**2).sum(1)))

    def forward(self, x):
        return {"out": self.classifier(self.features(x))}

def other_classes():
    return FullyConvolutional(150)
"""


@pytest.fixture
def acdc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the command for two scenes of each condition."""
    monkeypatch.chdir(tmp_path)
    Path("network.py").write_text(NETWORK)
    for number, condition in enumerate(CONDITIONS):
        for frame in range(2):
            rng = np.random.default_rng([number, frame])
            scene, label = (Path("ACDC") / kind / condition / "train/GOPR01" for kind in ("rgb_anon", "gt"))
            scene.mkdir(parents=True, exist_ok=True)
            label.mkdir(parents=True, exist_ok=True)
            bands = np.repeat(rng.permutation(19)[:8], 8)  # eight columns each
            truth = np.tile(bands, (FULL[0], 1)).astype(np.uint8)
            truth[:4] = 255
            colors = np.random.default_rng(9).integers(0, 200, (256, 3))
            pixels = colors[truth] + rng.integers(0, 50, (*FULL, 3)) - 12 * number
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(scene / f"{frame}_rgb_anon.png")
            Image.fromarray(truth).save(label / f"{frame}_gt_labelTrainIds.png")
    return [
        "bench",
        "acdc",
        "--data",
        "ACDC",
        "--model",
        "file:network.py:FullyConvolutional",
        "--threads",
        "1",
        "--out",
        "mine",
    ]


def source_miou(condition: str) -> float:
    """Compute the mIoU of both scenes from the files, with a confusion matrix pixel by pixel."""
    net, matrix = models.load("file:network.py:FullyConvolutional"), np.zeros((19, 19), int)
    for frame in range(2):
        image = Image.open(f"ACDC/rgb_anon/{condition}/train/GOPR01/{frame}_rgb_anon.png")
        small = np.asarray(image.resize(SIZE[::-1], Image.Resampling.BILINEAR))
        with torch.no_grad():
            logits = net(torch.from_numpy(small.copy()).permute(2, 0, 1)[None] / 255)["out"]
        at_input = F.interpolate(logits, SIZE, mode="bilinear")
        predicted = F.interpolate(at_input, FULL, mode="bilinear").argmax(1)[0].tolist()
        truth = np.asarray(Image.open(f"ACDC/gt/{condition}/train/GOPR01/{frame}_gt_labelTrainIds.png")).tolist()
        for labels, predictions in zip(truth, predicted, strict=True):
            for label, prediction in zip(labels, predictions, strict=True):
                if label != 255:
                    matrix[label, prediction] += 1
    union = matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
    return 100 * float((matrix.diagonal()[union > 0] / union[union > 0]).mean())


def test_command_writes_the_table_of_the_paper(
    acdc: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All four methods run over ten rounds, on tiny scenes."""
    monkeypatch.setattr(streams, "acdc", partial(streams.acdc, size=SIZE))
    acdc += ["--set", "cotta.lr=0.01"]  # large enough to show an effect in eighty steps
    assert run(*acdc) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0] == "mIoU in percent; each domain in rounds 1, 4, 7 and 10, and the mean of all 10 rounds"
    assert lines[1].split() == [
        *(part for number in (1, 4, 7, 10) for condition in CONDITIONS for part in (condition, str(number))),
        "mean",
        "paper",
    ]
    with Path("mine/report/table.csv").open() as file:
        records = list(csv.DictReader(file))
    classes = {
        (record["method"], record["column"]): record for record in records if record["section"].endswith(": classes")
    }
    values = {
        (record["method"], record["column"]): record for record in records if not record["section"].endswith("classes")
    }
    for number in (1, 4, 7, 10):
        for condition in CONDITIONS:
            record = values["Source", f"{condition}, round {number}"]
            assert float(record["value"]) == pytest.approx(source_miou(condition), abs=1e-4)
    assert {method for method, _column in values} == {"Source", "BN Stats Adapt", "TENT-continual", "CoTTA"}
    assert values["CoTTA", "night, round 1"]["published"] == "41.2"
    assert classes["CoTTA", "traffic light"]["value"]
    assert float(values["Source", "fog, round 1"]["value"]) > 10
    adapted = [values["CoTTA", f"fog, round {number}"]["value"] for number in (1, 10)]
    assert adapted[0] != adapted[1]  # it keeps adapting, while Source is the same in every round
    page = Path("mine/report/report.html").read_text()
    assert "2 images per domain in batches of 1; the published numbers on 400" in page
    assert "--model file:" in page and Path("mine/report/miou-over-time.svg").is_file()
    assert "BN Stats Adapt, worst change: " in page and 'href="data:image/png;base64' in page
    assert Path("mine/report/overlays.png").is_file() and "(overlays.png)" in Path("mine/report/report.md").read_text()

    assert run(*acdc, "--methods", "source", "--json") == 0  # reads the complete folder
    line = json.loads(capsys.readouterr().out)
    assert (len(line["mious"]), len(line["class_iou"])) == (40, 19)
    assert 100 * line["mious"][0] == pytest.approx(source_miou("fog"), abs=1e-4)
    assert line["miou"] == pytest.approx(sum(line["mious"]) / 40)


def test_scenes_have_the_size_of_the_paper_and_are_scored_at_their_own(
    acdc: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Images of 960x540 go into the network, and the pixels of the label maps are counted."""
    assert run(*acdc, "--rounds", "1", "--limit", "1", "--methods", "source,bn_stats") == 0
    assert "fog" in capsys.readouterr().out
    (line, *_) = Path("mine/cells/source-standard/batches.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["score"]["labelled"]) == (FULL[0] - 4) * FULL[1]


def test_network_for_other_classes_is_refused(acdc: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    acdc[acdc.index("file:network.py:FullyConvolutional")] = "file:network.py:other_classes"
    assert run(*acdc, "--rounds", "1", "--limit", "1", "--methods", "source") == 1
    assert (
        "the model has 150 classes, but the dataset has 19 (road, sidewalk, building, ...)" in capsys.readouterr().err
    )


def test_examples_are_of_all_cells_in_the_folder(acdc: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods and seeds that are added later change the examples, and two runs on one page have different names."""
    monkeypatch.setattr(streams, "acdc", partial(streams.acdc, size=SIZE))
    acdc += ["--rounds", "1", "--set", "cotta.lr=0.01"]
    assert run(*acdc, "--methods", "cotta", "--seeds", "1") == 0
    assert not list(Path("mine").glob("examples/*"))
    assert run(*acdc, "--methods", "source") == 0
    assert {path.name.partition("-seed")[2][0] for path in Path("mine/examples").iterdir()} == {"1"}
    assert run(*acdc, "--methods", "cotta", "--seeds", "0,1") == 0
    assert {path.name.partition("-seed")[2][0] for path in Path("mine/examples").iterdir()} == {"0"}
    shutil.copytree("mine", "other")
    page = write_report([Path("mine"), Path("other")], Path("both")).read_text()
    kinds = [path.stem.rpartition("-")[2] for path in Path("mine/examples").iterdir()]
    for name in ("mine", "other"):
        assert all(page.count(f"CoTTA ({name}), {kind} change: ") == 1 for kind in kinds)

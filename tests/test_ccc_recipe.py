"""``ctta bench ccc``: the walk of a user's network over the user's images, and its columns in the report."""

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from command_line import output, user_error
from own_methods import NETWORK, write_labeled_tree
from PIL import Image

from ctta.benchmark import BenchmarkOptions, build_task
from ctta.benchmark.report.tables import infer_layout, parse_severity, strip_severity
from ctta.cli.bench import bench
from ctta.data.datasets import FolderDataset, sample
from ctta.data.streams import AccuracyMatrix
from ctta.errors import ConfigError

CHOICES = ("--corruptions", "brightness,contrast", "--images", "45", "--speed", "10", "--batch-size", "5")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder to work in, with labeled images and a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CTTA_CACHE", str(tmp_path / "cache"))
    Path("net.py").write_text(NETWORK)
    write_labeled_tree(tmp_path / "val")
    return tmp_path


def test_any_labeled_tree_is_measured_once_and_walked_along(folder: Path) -> None:
    arguments = ("ccc", "--data", "val", "--model", "file:net.py:net", "--size", "16", "16", "--target", "0.5")
    chosen = (*CHOICES, "--methods", "source", "--orders", "43,44", "--threads", "1", "--out", "run")
    assert "Source" in output(bench, *arguments, *chosen)
    results = {path.name: json.loads((path / "about.json").read_text()) for path in Path("run/cells").iterdir()}
    assert set(results) == {"source-order43", "source-order44"}
    about = results["source-order43"]
    assert len(about["domains"]) == 5 and about["num_batches"] == 9  # four points of ten images, and one of five
    assert all(domain.count(" + ") == 1 for domain in about["domains"])
    assert "ccc target=0.500 noises=brightness+contrast speed=10 order=43 batch=5 images=45" in about["stream"]
    assert "[0:14]" in about["stream"]  # of 18 images, the last four are for the accuracies
    (kept,) = Path("cache/ccc").iterdir()
    assert "[14:18]" in json.loads((kept / "made_from.json").read_text())["data"]
    times = {path: path.stat().st_mtime_ns for path in kept.glob("*.npy")}
    assert times
    options = BenchmarkOptions.from_dict(json.loads(Path("run/run.json").read_text())["options"])
    assert build_task("ccc", options).make_stream(43).hash == about["stream_hash"]
    assert {path: path.stat().st_mtime_ns for path in kept.glob("*.npy")} == times


def test_the_embedded_stream_is_of_other_images_than_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    table = 0.1 + 0.8 * np.outer(np.linspace(1, 0, 21), np.linspace(1, 0, 21))
    measured: list[str] = []

    def measure(net: object, data: object, **settings: object) -> AccuracyMatrix:
        measured.append(data.name)  # type: ignore[attr-defined]
        return AccuracyMatrix({("fog", "snow"): table, ("snow", "fog"): table}, num_classes=10)

    monkeypatch.setattr(import_module("ctta.benchmark.recipes.ccc"), "measure_accuracy", measure)
    task = build_task("ccc", BenchmarkOptions(corruptions=("fog", "snow")))
    stream = task.make_stream(None)
    assert measured == [f"{sample().name} [1500:2000]"]
    assert (stream.batch_size, len(stream), len(stream.segments)) == (50, 400, 100)
    assert all(segment.rows[:].max() < 1500 for segment in stream.segments)
    assert stream.hash == task.make_stream(43).hash != task.make_stream(44).hash
    assert task.methods["rdumb"].settings["period"] == 100
    assert task.default_methods == ("source", "bn_stats", "tent", "rdumb", "cotta_fast")
    harder = build_task("ccc", BenchmarkOptions(corruptions=("fog", "snow"), target="hard", speed=100, num_images=950))
    assert "ccc hard target=0.099 noises=fog+snow speed=100" in harder.make_stream(None).name
    assert len(harder.make_stream(None)) == 19


def test_wrong_options(folder: Path) -> None:
    assert "--model SPEC is missing" in user_error(bench, "ccc", "--data", "val")
    assert "--data DIR is missing" in user_error(bench, "ccc", "--model", "file:net.py:net")
    assert "--images N and --speed N" in user_error(bench, "ccc", "--limit", "3")
    assert "does not take the option 'severity'" in user_error(bench, "ccc", "--severity", "3")
    assert "does not take the option 'target'" in user_error(bench, "embedded", "--target", "easy")
    with pytest.raises(ConfigError):
        build_task("ccc", BenchmarkOptions(num_images=0))


def test_a_tree_is_cropped_as_imagenet_is(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (600, 300), (255, 0, 0)).save(tmp_path / "cat" / "1.png")
    data = FolderDataset(tmp_path, crop=True)
    pixels, _labels = data.read_clean(np.arange(1))
    assert pixels.shape == (1, 224, 224, 3)
    assert data.name != FolderDataset(tmp_path).name
    with pytest.raises(ConfigError):
        FolderDataset(tmp_path, crop=True, size=(32, 32))


def test_selected_images_keep_their_draws() -> None:
    data = sample()
    part = data.select(1500, 1510)
    rows = np.array([3, 1])
    one, _ = part.combine(("gaussian_noise", 2.5)).read(rows)
    other, labels = data.combine(("gaussian_noise", 2.5)).read(1500 + rows)
    assert (one == other).all() and labels is not None and part.labels is not None
    assert labels.tolist() == part.labels[rows].tolist() and len(part) == 10
    with pytest.raises(ConfigError):
        data.select(1500, 3000)


def test_a_report_has_a_column_per_pair() -> None:
    assert strip_severity("fog 2.25 + snow 0") == "fog + snow" and strip_severity("fog 2.25") == "fog"
    assert parse_severity("fog 2.25") == "2.25" and parse_severity("fog 2.25 + snow 0") == ""
    quarters = [f"{step / 4:g}" for step in range(21)]
    layout = infer_layout([tuple(f"fog {a} + snow {b}" for a in quarters for b in quarters)])
    assert layout.columns == ("fog + snow",) and layout.find_column(0, "fog 1 + snow 0") == "fog + snow"
    assert layout.format_short_heading("fog + snow") == "fog+sno"
    assert layout.describe() == "each column is the mean over all segments of a pair of corruptions"
    letters = "abcdefgh"
    many = infer_layout([tuple(f"{a} 1 + {b} 2" for a in letters for b in letters if a != b)])
    assert many.columns == tuple(letters) and many.find_column(0, "c 0.25 + d 5") == "c"

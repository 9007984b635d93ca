"""``ctta diff``: what two runs differ in, first what explains the most."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import output, user_error
from torch import nn

import ctta
from ctta.benchmark.report import RunDifferences, diff_runs
from ctta.cli.diff import diff
from ctta.models import Normalized


def make_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 5)
    ).eval()


def make_stream(*, seed: int = 0, batch_size: int = 8, sampler: Any = None, names: tuple[str, ...] = ("fog",)) -> Any:
    images = np.random.default_rng(seed).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    data = ctta.data.datasets.Corrupted(images, np.arange(40) % 5, name="mine")
    stream = ctta.data.streams.continual(data, names=names, batch_size=batch_size)
    return ctta.data.streams.correlated(stream, sampler=sampler) if sampler else stream


def write(folder: Path, net: nn.Module, stream: Any, **settings: Any) -> Path:
    models = {"source": ctta.Source(net), "tent": ctta.Tent(net, **settings)}
    ctta.compare(models, stream, folder=folder)
    return folder


def compare(tmp_path: Path, net: nn.Module, stream: Any, **settings: Any) -> RunDifferences:
    first = write(tmp_path / "a", make_net(), make_stream())
    return diff_runs(first, write(tmp_path / "b", net, stream, **settings))


def subjects(found: RunDifferences) -> list[str]:
    return [each.subject for each in found.differences]


def test_equal_runs(tmp_path: Path) -> None:
    found = compare(tmp_path, make_net(), make_stream())
    assert found.differences == () and found.source_gap == 0 and not found.missing and not found.unknown
    assert {"weights", "normalization", "images", "order", "versions"} <= set(found.same)
    assert "differ in nothing that is recorded" in repr(found)


def test_a_normalization_comes_before_settings_where_source_differs(tmp_path: Path) -> None:
    wrapped = Normalized(make_net(), (0.5, 0.5, 0.5), (0.1, 0.1, 0.1))
    found = compare(tmp_path, wrapped, make_stream(), lr=1e-5)
    assert subjects(found) == ["normalization", "settings of tent"] and "weights" in found.same
    assert found.source_gap and found.explanation.startswith(
        "What explains most: normalization (Source, which does not"
    )
    assert "lr=1e-05" in found.differences[1].second


def test_settings_come_first_where_source_is_the_same(tmp_path: Path) -> None:
    found = compare(tmp_path, make_net(), make_stream(), lr=10.0)
    assert subjects(found) == ["settings of tent"] and "how methods adapt" in found.explanation


@pytest.mark.parametrize(
    ("net", "stream", "expected"),
    [
        (make_net(1), {}, ["weights"]),
        (make_net(), {"seed": 1}, ["images"]),
        (make_net(), {"names": ("contrast",)}, ["input range", "domains", "images"]),
        (make_net(), {"sampler": "sorted"}, ["order", "classes per batch"]),
        (make_net(), {"batch_size": 20}, ["batch size"]),
    ],
    ids=["weights", "images", "corruptions", "order", "batch size"],
)
def test_every_subject_is_found(net: nn.Module, stream: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    found = subjects(compare(tmp_path, net, make_stream(**stream)))
    assert sorted(each for each in found if each != "input range") == sorted(set(expected) - {"input range"})
    if stream.get("names"):
        assert "input range" in found


def test_what_follows_from_the_batch_size_is_not_named(tmp_path: Path) -> None:
    stream = make_stream(batch_size=3)
    assert stream.composition.classes_per_batch < make_stream().composition.classes_per_batch
    found = compare(tmp_path, make_net(), stream)
    assert subjects(found) == ["batch size"]  # neither fewer classes per batch, nor the range of a smaller first batch
    facts = [tmp_path / "b" / name / "facts.json" for name in ("source", "tent")]
    for path in facts:  # but another range altogether is
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"input": content["input"] | {"high": 255.0}}))
    assert subjects(diff_runs(tmp_path / "a", tmp_path / "b")) == ["batch size", "input range"]


def test_trained_tensors_and_versions(tmp_path: Path) -> None:
    first = write(tmp_path / "a", make_net(), make_stream())
    second = write(tmp_path / "b", make_net(), make_stream())
    facts, about = second / "tent" / "facts.json", second / "source" / "about.json"
    content = json.loads(facts.read_text())
    assert content["trained"] == ["student.1.weight", "student.1.bias"]
    facts.write_text(json.dumps(content | {"trained": ["student.1.weight"]}))
    about.write_text(about.read_text().replace(torch.__version__, "1.13"))
    found = diff_runs(first, second)
    assert subjects(found) == ["trained tensors of tent", "versions"] and "student.1.bias" in found.differences[0].first
    facts.unlink()
    assert "trained tensors of tent" in diff_runs(first, second).unknown


def test_the_command(tmp_path: Path) -> None:
    first = write(tmp_path / "a", make_net(), make_stream())
    second = write(tmp_path / "b", make_net(), make_stream(), lr=10.0)
    text = output(diff, first, second)
    assert "1. settings of tent, changes rows that adapt" in text and "source" in text
    assert json.loads(output(diff, first, second, "--json"))["differences"][0]["subject"] == "settings of tent"
    (tmp_path / "empty").mkdir()
    assert "holds no complete evaluation" in user_error(diff, first, tmp_path / "empty")
    facts = second / "tent" / "facts.json"
    facts.write_text("{")
    assert "facts.json is damaged" in user_error(diff, first, second)

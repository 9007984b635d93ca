"""The recipe of synthetic streets: its network, its methods, and the command that runs it."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from test_cli import run
from torch import nn

import ctta
from ctta.benchmark import BenchmarkOptions, build_task
from ctta.data.streams import streets
from ctta.errors import ConfigError
from ctta.methods.cotta import OFFICIAL_SEGMENTATION, SEGMENTATION

MODELS = Path(ctta.__file__).parent / "models"
NETWORKS = Path(__file__).parents[1] / "benchmarks" / "networks"
STREETS_BN = f"file:{NETWORKS / 'load.py'}:streets_bn"


def test_network_is_small_and_without_batch_norm() -> None:
    net = ctta.models.load("streets")
    assert not net.training
    assert (MODELS / "streets.safetensors").stat().st_size <= 4_000_000
    assert sum(parameter.numel() for parameter in net.parameters()) == 782_393
    norms = {type(module) for module in net.modules() if "Norm" in type(module).__name__}
    assert norms - {type(net)} == {nn.LayerNorm, nn.GroupNorm}
    assert all(norm.num_groups == 1 for norm in net.modules() if isinstance(norm, nn.GroupNorm))


def test_the_other_network_has_batch_norm_throughout() -> None:
    net = ctta.models.load(STREETS_BN)
    assert not net.training
    assert (NETWORKS / "streets_bn.safetensors").stat().st_size <= 4_000_000
    assert sum(parameter.numel() for parameter in net.parameters()) == 668_817
    convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == len(convolutions) - 1 == 15
    assert net(torch.rand(1, 3, 37, 90)).shape == (1, 9, 10, 23)


@pytest.mark.parametrize(
    ("weights", "network"), [(MODELS / "streets.safetensors", "segformer"), (NETWORKS / "streets_bn.safetensors", "bn")]
)
def test_weights_document_their_training(weights: Path, network: str) -> None:
    with safe_open(weights, "pt") as file:
        metadata = file.metadata()
    assert set(metadata) == {"data", "network", "steps", "batch_size", "seed", "miou_clear", "torch"}
    script = (Path(__file__).parents[1] / "benchmarks" / "train" / "streets.py").read_text()
    assert all(f'"{key}": ' in script for key in metadata)
    assert metadata["data"] == f"ctta.synthetic version {ctta.data.streets.VERSION}, split train, clear"
    assert metadata["network"] == network
    provenance = (MODELS / "PROVENANCE.md").read_text()
    assert f"mIoU is {100 * float(metadata['miou_clear']):.1f} %" in provenance
    assert re.search(rf"{int(metadata['steps']):,} steps", provenance)


@pytest.mark.parametrize("name", ["streets", STREETS_BN])
def test_network_is_good_in_clear_weather_and_worse_at_night(name: str) -> None:
    net = ctta.models.load(name)
    mious = {
        condition: ctta.evaluate(ctta.Source(net), streets(conditions=(condition,), num_scenes=6, batch_size=2)).miou
        for condition in ("clear", "night")
    }
    assert mious["clear"] > 0.65
    assert mious["night"] < mious["clear"] - 0.1


def test_table_has_the_settings_of_the_reference_implementation_and_the_chosen_ones() -> None:
    task = build_task("streets", BenchmarkOptions())
    published = ("source", "bn_stats", "tent", "cotta")
    chosen = ("bn_stats_blended", "tent_entropy", "cotta_segmentation", "cotta_views", "cotta_learning")
    assert task.default_methods == (*published, *chosen)
    assert dict(task.methods["cotta"].settings) == dict(OFFICIAL_SEGMENTATION)
    for net, fraction in ((nn.Conv2d(3, 9, 1), 0.0), (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 9, 1)), 1.0)):
        models = {name: task.methods[name].build_model(net, 0) for name in chosen[2:]}
        whole, views, learning = (model.hyperparameters for model in models.values())
        assert whole == ctta.CoTTA.segmentation(net).hyperparameters and whole["batch_stats"] == fraction
        assert {name for name in whole if whole[name] != views[name]} == {"optimizer", "restore"}
        assert views["optimizer"].keywords == {"lr": 0.0} and views["restore"] == 0
        assert {name for name in whole if whole[name] != learning[name]} == {"views"} and learning["views"] == ()
    assert build_task("streets", BenchmarkOptions(preset="paper")).default_methods == task.default_methods[:4]
    stream = task.make_stream(None)
    assert (len(stream.segments), stream.batch_size, stream.domains[:4]) == (40, 1, ["fog", "night", "rain", "snow"])
    assert task.methods["bn_stats"].build_model(nn.Conv2d(3, 9, 1), 0) is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [(BenchmarkOptions(data="there"), "draws its own scenes"), (BenchmarkOptions(), "leave out the option 'orders'")],
)
def test_unsupported_options_are_refused(options: BenchmarkOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_task("streets", options).make_stream(None if options.data else 3)


def test_command_runs_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the size of the scenes and the number of CoTTA's views are reduced."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ctta.data.streams, "streets", partial(streets, size=(64, 64)))
    views = {"views": ctta.views.multiscale_flip((1.0,))}
    for name, settings in (("OFFICIAL_SEGMENTATION", OFFICIAL_SEGMENTATION), ("SEGMENTATION", SEGMENTATION)):
        monkeypatch.setattr(f"ctta.benchmark.recipes.segmentation.{name}", {**settings, **views})
    assert run("bench", "streets", "--limit", "1", "--rounds", "2", "--threads", "1", "--out", "mine") == 0
    capsys.readouterr()
    assert run("bench", "streets", "--limit", "1", "--rounds", "2", "--threads", "1", "--out", "mine", "--json") == 0
    lines = {record["row"]: record for record in map(json.loads, capsys.readouterr().out.splitlines())}
    assert set(lines) == set(build_task("streets", BenchmarkOptions()).default_methods)
    # No layer uses batch statistics, so there is nothing for BN Stats to adapt.
    assert lines["bn_stats"]["mious"] == lines["source"]["mious"]
    assert lines["bn_stats_blended"]["mious"] == lines["source"]["mious"]
    assert lines["cotta_segmentation"]["mious"] != lines["source"]["mious"]
    assert all(torch.tensor(record["mious"]).isfinite().all() for record in lines.values())
    assert Path("mine/report/overlays.png").is_file()

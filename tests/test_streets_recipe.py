"""The embedded street's network and table: what is shipped, what it can do, and the command that fills the table."""

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
from ctta.methods.cotta import OFFICIAL_SEGMENTATION
from ctta.streams import streets

MODELS = Path(ctta.__file__).parent / "models"


def test_the_network_is_small_and_without_batch_norm() -> None:
    net = ctta.models.load("streets")
    assert not net.training
    assert (MODELS / "streets.safetensors").stat().st_size <= 4_000_000
    assert sum(parameter.numel() for parameter in net.parameters()) == 782_393
    norms = {type(module) for module in net.modules() if "Norm" in type(module).__name__}
    assert norms - {type(net)} == {nn.LayerNorm, nn.GroupNorm}
    assert all(norm.num_groups == 1 for norm in net.modules() if isinstance(norm, nn.GroupNorm))


def test_the_weights_say_how_they_were_made() -> None:
    with safe_open(MODELS / "streets.safetensors", "pt") as file:
        metadata = file.metadata()
    # As benchmarks/train_streets.py writes it.
    assert set(metadata) == {"data", "steps", "batch_size", "seed", "miou_clear", "torch"}
    assert metadata["data"] == f"ctta.synthetic version {ctta.synthetic.VERSION}, split train, clear"
    provenance = (MODELS / "PROVENANCE.md").read_text()
    assert f"{100 * float(metadata['miou_clear']):.1f} % mIoU" in provenance
    assert re.search(rf"{int(metadata['steps']):,} steps", provenance)


def test_the_network_knows_clear_weather_and_weather_hurts_it() -> None:
    net = ctta.models.load("streets")
    mious = {
        condition: ctta.evaluate(ctta.Source(net), streets(conditions=(condition,), num_scenes=6, batch_size=2)).miou
        for condition in ("clear", "night")
    }
    assert mious["clear"] > 0.65
    assert mious["night"] < mious["clear"] - 0.1


def test_the_table_has_the_authors_settings_and_those_chosen_beside_them() -> None:
    task = build_task("streets", BenchmarkOptions())
    assert task.default_methods == ("source", "bn_stats", "tent", "cotta", "tent_chosen", "cotta_chosen")
    assert dict(task.methods["cotta"].settings) == dict(OFFICIAL_SEGMENTATION)
    for name in ("tent", "cotta"):
        theirs, chosen = task.methods[name], task.methods[f"{name}_chosen"]
        assert chosen.method_class is theirs.method_class and chosen.settings != theirs.settings
    assert build_task("streets", BenchmarkOptions(preset="paper")).default_methods == task.default_methods[:4]
    stream = task.make_stream(None)
    assert (len(stream.segments), stream.batch_size, stream.domains[:4]) == (40, 1, ["fog", "night", "rain", "snow"])
    assert task.methods["bn_stats"].build_model(nn.Conv2d(3, 9, 1), 0) is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [(BenchmarkOptions(data="there"), "draws its own scenes"), (BenchmarkOptions(), "leave out the option 'orders'")],
)
def test_what_the_street_does_not_have_is_refused(options: BenchmarkOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_task("streets", options).make_stream(None if options.data else 3)


def test_one_command_fills_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything but the size of scenes and of CoTTA's views is as users have it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ctta.streams, "streets", partial(streets, size=(64, 64)))
    views = {"views": ctta.views.multiscale_flip((1.0,))}
    monkeypatch.setattr("ctta.benchmark.recipes.segmentation.OFFICIAL_SEGMENTATION", {**OFFICIAL_SEGMENTATION, **views})
    assert run("bench", "streets", "--limit", "1", "--rounds", "2", "--threads", "1", "--out", "mine") == 0
    capsys.readouterr()
    assert run("bench", "streets", "--limit", "1", "--rounds", "2", "--threads", "1", "--out", "mine", "--json") == 0
    lines = {record["row"]: record for record in map(json.loads, capsys.readouterr().out.splitlines())}
    assert set(lines) == set(build_task("streets", BenchmarkOptions()).default_methods)
    # No layer has batch statistics, so there is nothing that BN Stats could adapt.
    assert lines["bn_stats"]["mious"] == lines["source"]["mious"]
    assert lines["cotta_chosen"]["mious"] != lines["source"]["mious"]
    assert all(torch.tensor(record["mious"]).isfinite().all() for record in lines.values())
    assert Path("mine/report/overlays.png").is_file()

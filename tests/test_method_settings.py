"""Every method in every recipe: its published settings, which seeds matter, and what `all` leaves out."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_runs import write_network
from command_line import invoke
from torch import Tensor, nn

import ctta
from ctta.benchmark import BenchmarkOptions, MethodSpec, build_task, plan
from ctta.benchmark.recipes.base import PUBLISHED
from ctta.cli.app import app
from ctta.errors import ConfigError
from ctta.methods import METHODS
from ctta.testing.networks import BlockViT

PAPER_ROWS = {"source", "bn_stats", "pseudo_label", "tent", "test_aug", "cotta"}
CLASSIFICATION = ("demo", "embedded", "embedded-gradual", "cifar10c", "cifar10c-gradual", "cifar100c", "imagenetc")


def make_network(num_classes: int = 10) -> nn.Module:
    """Return a network of two stages that is sure of its predictions, so that every method finds something to learn."""
    torch.manual_seed(0)
    head = nn.Linear(8, num_classes)
    head.weight.data *= 20
    first = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).eval()


def make_batches(num_batches: int, num_images: int, side: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(num_images, 3, side, side, generator=generator) for _ in range(num_batches)]


@pytest.fixture(scope="module")
def stats() -> ctta.SourceStats:
    return ctta.source_stats(make_network(), make_batches(2, 32), torch.arange(64) % 10)


def build(
    spec: MethodSpec, stats: ctta.SourceStats, net: nn.Module | None = None, **changes: Any
) -> ctta.AdaptiveModel:
    """Build a row of a recipe with these statistics of source images; a method for ViTs on a ViT with its own."""
    net = net or make_network()
    if spec.method_class.info is not None and spec.method_class.info.needs_vit:
        net = BlockViT()
        stats = ctta.source_stats(net, make_batches(1, 16, 16), blocks=True)
    given = {"source_stats": stats} if spec.needs_source_stats else {}
    return spec.factory(net, **{**spec.settings, **given, **changes})


def test_every_method_has_settings_in_one_place() -> None:
    assert set(PUBLISHED) <= set(METHODS) - PAPER_ROWS
    assert all(PUBLISHED.values())


def test_a_method_without_published_settings_has_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(ctta.Tent):
        """A method that nobody has entered anywhere else."""

    monkeypatch.setitem(METHODS, "mine", Mine)
    for recipe in ("embedded", "imagenetc", "streets"):
        spec = build_task(recipe, BenchmarkOptions()).methods["mine"]
        assert spec.method_class is Mine
        assert set(spec.settings) <= {"batch_stats", *(["optimizer"] if recipe == "streets" else [])}


@pytest.mark.parametrize("recipe", CLASSIFICATION)
def test_every_recipe_can_build_every_method(recipe: str, stats: ctta.SourceStats) -> None:
    methods = build_task(recipe, BenchmarkOptions()).methods
    assert set(METHODS) <= set(methods)
    for name in METHODS:
        build(methods[name], stats)


def read_settings(recipe: str, method: str, stats: ctta.SourceStats, names: Mapping[str, object]) -> dict[str, object]:
    """Return some hyperparameters of a recipe's row, and ``lr`` and such of its optimizer, from the model itself."""
    model = build(build_task(recipe, BenchmarkOptions()).methods[method], stats)
    optimizer = {} if model.optimizer is None else {**model.optimizer.defaults, "optimizer": type(model.optimizer)}
    found = {**model.hyperparameters, **optimizer}
    return {name: found[name] for name in names}


@pytest.mark.parametrize(
    ("method", "recipe", "expected"),
    [
        ("eta", "cifar10c", {"redundancy": 0.4, "lr": 1e-3, "optimizer": torch.optim.Adam, "batch_stats": 1.0}),
        ("eta", "cifar100c", {"redundancy": 0.1, "margin": 0.4}),
        ("eta", "imagenetc", {"redundancy": 0.05, "lr": 2.5e-4, "momentum": 0.9, "nesterov": True}),
        ("eata", "embedded", {"redundancy": 0.4, "fisher_weight": 1.0}),
        ("eata", "imagenetc", {"redundancy": 0.05, "fisher_weight": 2000.0, "lr": 2.5e-4}),
        ("rdumb", "cifar100c", {"redundancy": 0.4, "period": 1000}),
        ("sar", "cifar10c", {"optimizer": torch.optim.SGD, "lr": 1e-3, "nesterov": False}),
        ("sar", "imagenetc", {"optimizer": torch.optim.SGD, "lr": 2.5e-4, "nesterov": False}),
        ("deyo", "imagenetc", {"min_drop": 0.2, "lr": 2.5e-4, "nesterov": True}),
        ("rpl", "imagenetc", {"lr": 5e-4, "q": 0.8}),
        ("shot_im", "cifar10c", {"trains": "norms", "optimizer": torch.optim.Adam}),
        ("delta", "cifar100c", {"optimizer": torch.optim.Adam, "lr": 1e-3}),
        ("delta", "imagenetc", {"optimizer": torch.optim.SGD, "lr": 2.5e-4, "nesterov": False}),
        ("roid", "cifar10c", {"batch_size": 200, "lr": 1e-3, "batch_stats": 1.0}),
        ("roid", "demo", {"batch_size": 50}),
        ("cmf", "imagenetc", {"batch_size": 64, "lr": 2.5e-4, "nesterov": True}),
        ("santa", "imagenetc", {"lr": 0.01, "nesterov": True}),
        ("rmt", "cifar100c", {"lr": 1e-3, "optimizer": torch.optim.Adam}),
        ("adacontrast", "imagenetc", {"lr": 2e-4, "weight_decay": 1e-4, "nesterov": True}),
        ("rotta", "imagenetc", {"lr": 1e-3, "optimizer": torch.optim.Adam, "memory_size": 64}),
        ("note", "cifar100c", {"lr": 1e-4, "memory_size": 64}),
        ("petta", "cifar100c", {"loss": "symmetric"}),
        ("petta", "imagenetc", {"loss": "cross_entropy"}),
        ("sotta", "cifar10c", {"min_confidence": 0.99}),
        ("sotta", "cifar100c", {"min_confidence": 0.66}),
        ("sotta", "imagenetc", {"min_confidence": 0.33}),
        ("tribe", "cifar10c", {"momentum": 0.01, "spread": 0.0, "max_entropy": 0.05, "lr": 1e-3}),
        ("tribe", "cifar100c", {"momentum": 0.05, "spread": 0.1, "max_entropy": 0.2, "lr": 1e-3}),
        ("tribe", "imagenetc", {"momentum": 0.5, "spread": 0.5, "max_entropy": 0.4, "lr": 5e-4}),
        ("petal", "cifar100c", {"threshold": 0.72, "lr": 1e-3}),
        ("palm", "cifar10c", {"temperature": 50.0, "max_gradient": 1.0, "momentum": 0.5, "lr": 5e-4}),
        ("palm", "cifar100c", {"temperature": 100.0, "max_gradient": 0.5, "momentum": 0.1, "weight_decay": 5e-4}),
        ("palm", "imagenetc", {"temperature": 1000.0, "max_gradient": 0.3, "momentum": 0.5, "lr": 5e-5}),
        ("memo", "cifar10c", {"lr": 0.005, "momentum": 0, "batch_stats": 1 / 17}),
        ("memo", "imagenetc", {"lr": 2.5e-4, "momentum": 0}),
        ("tea", "cifar10c", {"lr": 1e-3, "step_size": 0.1, "buffer_size": 10_000}),
        ("t3a", "cifar10c", {"num_supports": 20, "batch_stats": 0.0}),
        ("bn_alpha", "cifar10c", {"alpha": 0.1}),
    ],
)
def test_settings_are_the_published_ones(
    method: str, recipe: str, expected: dict[str, object], stats: ctta.SourceStats
) -> None:
    assert read_settings(recipe, method, stats, expected) == expected


def test_views_are_as_many_as_published() -> None:
    def count(recipe: str, method: str) -> int | None:
        spec = build_task(recipe, BenchmarkOptions()).methods[method]
        default = inspect.signature(spec.method_class).parameters["views"].default
        return getattr(spec.settings.get("views", default), "num_views", None)

    assert [count(recipe, "memo") for recipe in ("cifar10c", "imagenetc")] == [32, 64]
    assert [count(recipe, "petal") for recipe in ("cifar10c", "demo")] == [32, 32]


@pytest.mark.parametrize("name", METHODS)
def test_seeds_matter_for_exactly_the_methods_that_get_them(name: str, stats: ctta.SourceStats) -> None:
    small = (
        "tea.buffer_size=200",
        "tea.num_steps_langevin=2",
        "adacontrast.queue_size=128",
        "sotta.min_confidence=0.2",
    )
    spec = build_task("embedded", BenchmarkOptions(settings=small)).methods[name]
    side, num_images = (16, 4) if name in ("rem", "foa", "pea") else (12, 4 if name == "memo" else 80)
    batches = make_batches(2, num_images, side)

    def adapt(seed: int) -> list[Tensor]:
        accepts_seed = "seed" in inspect.signature(spec.method_class).parameters
        torch.manual_seed(0)
        changes: dict[str, Any] = {"seed": seed} if accepts_seed else {}
        model = build(spec, stats, **changes)
        predictions = [model(x) for x in batches]
        return [*predictions, *model.state_dict().values()]

    first, second, again = adapt(1), adapt(2), adapt(1)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert spec.is_random != all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_methods_for_pixels_keep_pixels_in_their_place() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 1)).eval()
    stats = ctta.source_stats(net, make_batches(2, 4), head="3")
    for recipe in ("acdc", "streets"):
        task = build_task(recipe, BenchmarkOptions())
        methods = {name: task.methods[name] for name in METHODS if name in task.methods}
        assert len(methods) > 15 and not {"roid", "memo", "rem", "lame"} & set(methods)
        assert set(task.default_methods) & set(METHODS) == {"source", "bn_stats", "tent", "cotta"}
        for spec in methods.values() if recipe == "acdc" else ():
            model = build(spec, stats, net)
            assert model(torch.rand(1, 3, 12, 12)).shape == (1, 5, 12, 12)
            assert isinstance(model.hyperparameters.get("views", ()), tuple)  # fixed ones: a rotation would move pixels
            rate = model.optimizer.defaults["lr"] if model.optimizer else None
            assert rate in (None, 7.5e-6)


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return f"file:{write_network(tmp_path)}:tiny"


def test_all_runs_every_method_and_says_what_it_leaves_out(network: str) -> None:
    cheap = ["cotta.views=1", "test_aug.views=1", "petal.views=1", "memo.views=1"]
    cheap += ["tea.buffer_size=8", "tea.num_steps_langevin=1", "adacontrast.bank_size=8", "adacontrast.queue_size=8"]
    arguments = ["--model", network, "--corruptions", "fog", "--limit", "2", "--seeds", "1", "--threads", "1"]
    ended = invoke(
        app,
        *("bench", "embedded", "--methods", "all", *arguments, "--json"),
        *(part for text in cheap for part in ("--set", text)),
    )
    assert ended.exit_code == 0, ended.stderr
    rows = {json.loads(line)["row"] for line in ended.stdout.splitlines()}
    assert rows == set(METHODS) - {"rem", "foa", "pea", "petta", "eata", "santa", "rmt"}
    assert "rem, foa, pea (for vision transformers only)" in ended.stderr
    assert "petta, eata, santa, rmt (without --source-stats FILE, made by 'ctta source-stats')" in ended.stderr


def test_method_without_source_statistics_says_how_to_get_them(network: str) -> None:
    options = BenchmarkOptions(model=network, limit=2)
    with pytest.raises(ConfigError, match="ctta source-stats"):
        plan(Path("a"), "embedded", options, methods=["eata"], threads=1)


def test_source_statistics_belong_to_a_run(network: str) -> None:
    net = ctta.models.load(network)
    ctta.source_stats(net, make_batches(2, 16, 32)).save("stats.safetensors")
    options = BenchmarkOptions(model=network, limit=2, source_stats="stats.safetensors")
    planned = plan(Path("a"), "embedded", options, methods=["all"], threads=1)
    assert set(planned.left_out) == {"rem", "foa", "pea"}
    plan(Path("a"), "embedded", options, methods=["rmt"], threads=1)
    ctta.source_stats(net, make_batches(3, 16, 32)).save("stats.safetensors")
    with pytest.raises(ConfigError, match="stats_files"):
        plan(Path("a"), "embedded", options, methods=["rmt"], threads=1)
    ctta.source_stats(make_network(), make_batches(3, 16, 32)).save("stats.safetensors")
    with pytest.raises(ConfigError):
        plan(Path("b"), "embedded", options, methods=["all"], threads=1)


def test_all_leaves_out_what_a_policy_does_not_fit_unless_the_method_was_named(network: str) -> None:
    options = BenchmarkOptions(model=network, limit=2, policies=("reset_every=5",))
    planned = plan(Path("a"), "embedded", options, methods=["all"], threads=1)
    assert "two policies 'reset_every'" in planned.left_out["rdumb"] and "tent" in {
        each.method for each in planned.cells
    }
    options = BenchmarkOptions(model=network, limit=2, policies=("rdumb.reset_every=5",))
    with pytest.raises(ConfigError):
        plan(Path("b"), "embedded", options, methods=["all"], threads=1)


def test_runs_without_source_statistics_do_not_mention_them() -> None:
    assert "source_stats" not in BenchmarkOptions().to_dict()
    assert BenchmarkOptions(source_stats="a").to_dict()["source_stats"] == "a"


def test_embedded_network_has_its_own_statistics(tmp_path: Path) -> None:
    planned = plan(tmp_path, "embedded", BenchmarkOptions(limit=2), methods=["all"], threads=1)
    assert dict(planned.left_out) == dict.fromkeys(("rem", "foa", "pea"), "for vision transformers only")
    methods = build_task("embedded", BenchmarkOptions()).methods
    batch, frozen = (methods[name].settings["source_stats"] for name in ("eata", "petta"))
    assert (batch.num_images, frozen.num_images, batch.is_labeled) == (10_000, 10_000, True)
    assert not torch.equal(batch["class_means"], frozen["class_means"])

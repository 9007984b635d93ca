"""Methods by name: presets, files, installed packages; settings as text, and the learning rate as a keyword."""

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ctta
from ctta.core.hyperparameters import parse_hyperparameters
from ctta.core.registry import list_methods, resolve_method
from ctta.errors import CheckpointError, ConfigError
from ctta.testing.networks import BlockViT

MINE = """
import ctta

class Mine(ctta.Tent):
    pass

class NotAMethod:
    pass

number = 3
"""


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)).eval()


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return f"file:{tmp_path / 'mine.py'}:Mine"


def write_package(folder: Path, target: str = "my_package:Mine") -> None:
    """Write an installed package with one entry point, as pip leaves it."""
    folder.mkdir()
    (folder / "my_package.py").write_text(MINE)
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ctta.methods]\nborrowed = {target}\n")


def learning_rate(model: ctta.AdaptiveModel) -> float:
    assert model.optimizer is not None
    rate: float = model.optimizer.param_groups[0]["lr"]
    return rate


@pytest.mark.parametrize("preset", ["official", "official_segmentation", "segmentation", "paper", "fast"])
def test_a_preset_is_the_classmethod_of_its_name(preset: str) -> None:
    named = ctta.adapt(make_network(), f"cotta_{preset}", restore=0.5)
    built = getattr(ctta.CoTTA, preset)(make_network(), restore=0.5)
    assert type(named) is ctta.CoTTA
    assert repr(named) == repr(built) and "restore=0.5" in repr(named)


def test_every_preset_has_a_classmethod_and_every_method_its_facts() -> None:
    for name, cls in ctta.METHODS.items():
        assert "info" in vars(cls), f"{name} does not declare its MethodInfo"
        for preset in cls.presets:
            assert callable(getattr(cls, preset))
            assert f"{name}_{preset}" in list_methods()


@pytest.mark.parametrize("name", ctta.METHODS)
def test_the_facts_about_a_method_are_true(name: str) -> None:
    """Copies of the network and backward passes are counted, and what is trained is compared."""
    settings: dict[str, Any] = (
        {"views": ctta.views.image_views(2)} if "views" in resolve_method(name).method.__init__.__annotations__ else {}
    )
    info = resolve_method(name).info
    net = BlockViT() if info.needs_vit else make_network()
    if info.needs_source_data:
        settings["source_stats"] = ctta.source_stats(net, [torch.rand(8, 3, 16, 16)], blocks=info.needs_vit)
    model = ctta.adapt(net, name, **settings)
    keys = set(model.source.state_dict())
    assert sum(set(child.state_dict()) == keys for child in model.children()) == info.num_networks
    trained = sum(len(group["params"]) for group in model.optimizer.param_groups) if model.optimizer else 0
    total = len(list(model.source.parameters()))
    counts = {
        "nothing": 0,
        "norm statistics": 0,
        "prototypes": 0,
        "caches": 0,
        "Gaussians": 0,
        "prompts": 0,
        "mean feature": 0,
        "token statistics": 0,
        "norm layers": 2,
        "norm layers and a map": 2 + 1,
        "norm layers and convolutions": 4,
        # The only norm layer is not at the top; of the two blocks of a vision transformer one is not.
        "norm layers but the top": 4 if info.needs_vit else 2,
        "all but the head": total - 2,
        "all weights": total,
        "norm layers and projector": 2 + 4,
        "all weights and projector": total + 4,
    }
    assert trained == counts[info.trains]
    assert bool(trained) == bool(info.backward_passes)
    if isinstance(info.forward_passes, int):
        passes: list[float] = []
        for child in model.children():  # several views may pass together, and a pass may be of a selection
            child.register_forward_hook(lambda module, inputs, output: passes.append(max(1.0, len(inputs[0]) / 32)))
        model(torch.rand(32, 3, 16, 16))
        assert sum(passes) == info.forward_passes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cota", r"there is no method 'cota' \(did you mean 'cotta'\?\); expected one of source, bn_stats,"),
        ("CoTTA", r"did you mean 'cotta'"),
        ("cotta_fst", r"did you mean 'cotta_fast'"),
        ("mine.py:Mine", r"there is no method 'mine.py:Mine' \(did you mean 'file:mine.py:Mine'\?\)"),
        ("zzz", r"there is no method 'zzz'; expected one of .* or file:PATH.py:Class"),
        ("file:nowhere.py:Mine", "file not found: nowhere.py; expected 'file:PATH.py:Class'"),
        ("file:mine.txt:Mine", "names no class of a Python file"),
    ],
)
def test_unknown_names_are_corrected(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ctta.adapt(make_network(), name)


def test_a_class_of_a_file_is_a_method(mine: str) -> None:
    model = ctta.adapt(make_network(), mine, lr=1e-4)
    assert type(model).__name__ == "Mine" and learning_rate(model) == 1e-4
    assert type(ctta.adapt(make_network(), mine)) is type(model)  # executed once, until the file changes
    named = resolve_method(mine)
    assert (named.label, named.info.paper, named.info.trains) == ("Mine", "", "norm layers")
    for name, message in {
        "Mein": r"mine.py has no class Mein \(did you mean 'Mine'\?\); expected 'file:PATH.py:Class'",
        "NotAMethod": "NotAMethod in .*mine.py is the class NotAMethod; expected a class that extends ctta.Adapt",
        "number": "number in .*mine.py is of type int; expected a class",
    }.items():
        with pytest.raises(ConfigError, match=message):
            resolve_method(mine.replace(":Mine", f":{name}"))


def test_an_edited_file_is_read_again(mine: str, tmp_path: Path) -> None:
    before = resolve_method(mine).method
    (tmp_path / "mine.py").write_text(MINE.replace("pass", "added = True", 1))
    assert hasattr(resolve_method(mine).method, "added") and not hasattr(before, "added")
    (tmp_path / "mine.py").write_text("raise OSError('no disk')")
    with pytest.raises(ConfigError, match="no disk"):
        resolve_method(mine)


def test_an_installed_package_provides_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert list_methods()[-1] == "borrowed"
    assert type(ctta.adapt(make_network(), "borrowed")).__module__ == "my_package"
    with pytest.raises(ConfigError, match="did you mean 'borrowed'"):
        resolve_method("borowed")


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path / "site", "my_package:Missing")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "my_package", raising=False)
    with pytest.raises(ConfigError, match="my-package"):
        resolve_method("borrowed")


def test_a_file_of_a_users_method_needs_its_name_again(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, state = make_network(), tmp_path / "state.safetensors"
    model = ctta.Guarded(ctta.adapt(net, mine, lr=1e-4))
    model(torch.rand(8, 3, 16, 16))
    ctta.save(model, state)
    expected = model.predict(x := torch.rand(8, 3, 16, 16))
    with pytest.raises(CheckpointError, match="give its"):
        ctta.load(state, net)
    with pytest.raises(CheckpointError, match="not by tent"):
        ctta.load(state, net, method="tent")
    (tmp_path / "moved").mkdir()
    (tmp_path / "mine.py").rename(tmp_path / "moved" / "mine.py")
    monkeypatch.syspath_prepend(tmp_path / "moved")
    for method in (f"file:{tmp_path / 'moved' / 'mine.py'}:Mine", importlib.import_module("mine").Mine):
        assert torch.equal(ctta.load(state, net, method=method).predict(x), expected)
    monkeypatch.delitem(sys.modules, "mine")


@pytest.mark.parametrize("method", [ctta.Tent, ctta.PseudoLabel, ctta.CoTTA])
def test_lr_replaces_that_of_the_optimizer(method: Callable[..., ctta.AdaptiveModel]) -> None:
    net = make_network()
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    model = method(net, optimizer=sgd, lr=0.02)
    assert model.hyperparameters["optimizer"].keywords == {"lr": 0.02, "momentum": 0.9}
    assert "lr" not in model.hyperparameters and "optimizer=SGD(lr=0.02, momentum=0.9)" in repr(model)
    assert learning_rate(model.reset()) == learning_rate(model.fork()) == 0.02
    typed = resolve_method(ctta.core.registry.name_of(type(model))).parse(["lr=1e-4"])
    assert repr(method(net, lr=1e-4)) == repr(method(net, **typed))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": "fast"}, "lr must be a number of at least 0, got 'fast'"),
        ({"lr": float("nan")}, "lr must be a number of at least 0, got nan"),
        ({"lr": True}, "got True"),
        ({"lr": -1}, "got -1"),
        ({"lr": 0.1, "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0)}, "does not take lr=0.1"),
    ],
)
def test_learning_rates_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ctta.Tent(make_network(), **settings)


def test_methods_take_exactly_the_common_arguments_of_their_signature() -> None:
    common = {"lr", "policies", "batch_stats", "seed", "output"}
    assert common & inspect.signature(ctta.CoTTA).parameters.keys() == common
    assert common - inspect.signature(ctta.Tent).parameters.keys() == {"seed"}
    assert common - inspect.signature(ctta.VANE).parameters.keys() == {"batch_stats"}
    refused: list[tuple[Callable[..., ctta.AdaptiveModel], str]] = [(ctta.Tent, "seed"), (ctta.VANE, "batch_stats")]
    for method, name in refused:
        with pytest.raises(TypeError, match=rf"{method.__name__}\(\) got an unexpected keyword argument '{name}'"):
            method(make_network(), **{name: 1})


def test_keywords_without_a_type_are_those_of_the_extended_method() -> None:
    class Mine(ctta.Tent):
        def __init__(self, net: nn.Module, *, strength: float = 1.0, **common: Any) -> None:
            super().__init__(net, **common)
            self.strength = strength

    model = Mine(make_network(), strength=2.0, batch_stats=0.5)
    assert model.fork().hyperparameters == model.hyperparameters
    assert (model.hyperparameters["strength"], model.hyperparameters["batch_stats"]) == (2.0, 0.5)


def test_load_changes_the_learning_rate_and_keeps_the_momenta(tmp_path: Path) -> None:
    net, path = make_network(), tmp_path / "state.safetensors"
    model = ctta.Tent(net, lr=1e-3)
    model(torch.rand(8, 3, 16, 16))
    ctta.save(model, path)
    slower = ctta.load(path, net, lr=1e-5)
    assert learning_rate(ctta.load(path, net)) == 1e-3 and learning_rate(slower) == 1e-5
    assert slower.optimizer is not None and len(slower.optimizer.state) == 2
    assert learning_rate(slower.fork()) == 1e-5


def test_hyperparameters_are_parsed_from_text() -> None:
    found = parse_hyperparameters(
        ctta.CoTTA, ["optimizer=SGD", "lr=1e-2", "optimizer.momentum=0.9", "gate=element", "views=0"]
    )
    optimizer: Any = found.pop("optimizer")([torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer) is torch.optim.SGD
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.01, 0.9)
    assert found == {"gate": "element", "views": ()}
    assert parse_hyperparameters(ctta.Tent, ["lr=0.5"])["optimizer"].func is torch.optim.Adam
    assert [parse_hyperparameters(ctta.VANE, [f"learn={text}"])["learn"] for text in ("false", "True")] == [False, True]
    with pytest.raises(ConfigError, match="learn must be True or False, got 1"):
        parse_hyperparameters(ctta.VANE, ["learn=1"])
    for texts, words in {
        ("restore",): "NAME=VALUE",
        ("optimizer=Madam",): "a class of torch.optim",
        ("views=many",): "a number of random views",
        ("decay=much",): "decay must be a number such as 0.999",
        ("seed=1.5",): "seed must be an integer such as 0",
        ("optimizer.speed=1",): "does not take speed",
    }.items():
        with pytest.raises(ConfigError, match=words):
            parse_hyperparameters(ctta.CoTTA, texts)
    with pytest.raises(ConfigError):
        parse_hyperparameters(ctta.Source, ["lr=1"])


def test_a_word_that_starts_with_a_digit_is_text_without_a_warning() -> None:
    """The compiler has something to say about it, which a user did not ask for."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ConfigError):
            parse_hyperparameters(ctta.CoTTA, ["decay=1or"])
    assert not caught

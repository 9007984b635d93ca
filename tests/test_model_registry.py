"""Networks by name: the library's own, those of Python files, and the errors for malformed names."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ctta.errors import CheckpointError, ConfigError
from ctta.models import LOADERS, ResNeXt29, WideResNet, list_models, load, to_device


def build_classifier() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten())


# Networks of this library


def test_wrn28_10_takes_the_number_of_classes_from_its_file(tmp_path: Path) -> None:
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in WideResNet(num_classes=20).state_dict().items()}
    weights = {f"module.{name}": torch.full(shape, 0.25, dtype=torch.float16) for name, shape in shapes.items()}
    weights |= {name: value.long() for name, value in weights.items() if name.endswith("num_batches_tracked")}
    torch.save({"state_dict": weights}, tmp_path / "weights.pt")
    net = load(f"wrn28-10:{tmp_path / 'weights.pt'}")
    assert isinstance(net, WideResNet) and not net.training
    assert all((parameter == 0.25).all() for parameter in net.parameters())
    assert net.fc.out_features == 20


def test_resnext29(tmp_path: Path) -> None:
    trained = ResNeXt29(7).eval()
    torch.save({"state_dict": nn.DataParallel(trained).state_dict()}, tmp_path / "weights.pt")
    net = load(f"resnext29:{tmp_path / 'weights.pt'}")
    x = torch.rand(2, 3, 16, 16)
    assert not net.training and torch.equal(net(x), trained(x))


@pytest.mark.parametrize("prefix", ["wrn28-10", "resnext29"])
def test_weights_of_another_network(prefix: str, tmp_path: Path) -> None:
    torch.save(build_classifier().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(CheckpointError):
        load(f"{prefix}:{tmp_path / 'weights.pt'}")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(f"{prefix}:nowhere.pt")


# Names


@pytest.mark.parametrize("spec", ["resnet50", "weights.pt", "", ":", "Timm:resnet50", "http://example.org/net.pt"])
def test_an_unknown_prefix_lists_the_known_ones(spec: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown network '{spec}'.*'wrn28-10:PATH'.* or 'sliding:NETWORK'"):
        load(spec)


@pytest.mark.parametrize("form", [form for form in LOADERS if ":" in form])
def test_a_prefix_alone_reports_the_expected_form(form: str) -> None:
    prefix = form.partition(":")[0]
    for spec in (prefix, f"{prefix}:"):
        with pytest.raises(ConfigError, match=f"malformed network name '{spec}'; expected '{form}'"):
            load(spec)


def test_a_network_is_not_a_name() -> None:
    with pytest.raises(TypeError, match="Conv2d"):
        load(nn.Conv2d(3, 3, 1))  # type: ignore[arg-type]


def test_loaders_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOADERS, "whole", lambda argument: build_classifier() if argument == "" else nn.Identity())
    assert not load("whole").training
    with pytest.raises(ConfigError):
        load("whole:thing")


def test_list_models_returns_the_forms_of_names() -> None:
    assert list_models() == list(LOADERS)
    assert {"embedded", "timm:NAME", "hf:NAME"} <= set(list_models())


def test_moving_to_a_device() -> None:
    net = build_classifier()
    assert to_device(net, "cpu") is net
    with pytest.raises(ConfigError):
        to_device(net, "nonsense")


# Python files

MODEL_FILE = """
from dataclasses import dataclass
from torch import nn
from sibling_layers import width

@dataclass
class Settings:
    classes: int = 5

class Net(nn.Conv2d):
    def __init__(self):
        super().__init__(3, width, 1)

def build(): return nn.Conv2d(3, Settings().classes, 1)
def nothing(): pass
def needs(classes, width=1): return nn.Conv2d(3, classes, 1)
number = 3
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "sibling_layers.py").write_text("width = 7")
    (tmp_path / "model.py").write_text(MODEL_FILE)
    yield tmp_path / "model.py"
    sys.modules.pop("sibling_layers", None)


@pytest.mark.parametrize(("name", "classes"), [("build", 5), ("Net", 7)])
def test_a_function_or_class_of_a_file(model_file: Path, name: str, classes: int) -> None:
    path_before = list(sys.path)
    net = load(f"file:{model_file}:{name}")
    assert not net.training and net(torch.rand(1, 3, 4, 4)).shape == (1, classes, 4, 4)
    assert sys.path == path_before


def test_two_files_with_the_same_name(tmp_path: Path) -> None:
    for folder, channels in (("a", 2), ("b", 4)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.py").write_text(
            f"import torch\ndef net(): return torch.nn.Conv2d(3, {channels}, 1)"
        )
    first, second = (load(f"file:{tmp_path / folder / 'model.py'}:net") for folder in "ab")
    assert (first.get_parameter("weight").shape[0], second.get_parameter("weight").shape[0]) == (2, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("biuld", r".*model.py has no function biuld \(did you mean 'build'\?\); expected 'file:PATH.py:function'"),
        ("number", r"number in .*model.py is of type int, not a function"),
        ("nothing", r"nothing in .*model.py returned NoneType; expected a torch.nn.Module"),
        ("needs", r"needs in .*model.py must be callable without arguments: .*classes"),
    ],
)
def test_unusable_functions(model_file: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load(f"file:{model_file}:{name}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("path_and_name", "message"),
    [
        ("nowhere.py:build", "file not found: nowhere.py; expected 'file:PATH.py:function'"),
        ("model.py", "'file:model.py' names no function of a Python file"),
        ("model.py:", "'file:model.py:' names no function of a Python file"),
        ("model.pt:build", "'file:model.pt:build' names no function of a Python file"),
    ],
)
def test_malformed_file_names(path_and_name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(f"file:{path_and_name}")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise ValueError('no such weights\\nat all')", "ValueError: no such weights"),
        ("import package_that_does_not_exist", "ModuleNotFoundError: No module named 'package_that_does_not_exist'"),
        ("open('nowhere.pt')", "FileNotFoundError: .*nowhere.pt"),
    ],
)
def test_an_error_inside_the_file_is_reported_in_one_line(tmp_path: Path, statement: str, message: str) -> None:
    (tmp_path / "model.py").write_text(statement)
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=rf"model\.py failed with {message}") as raised:
        load(f"file:{tmp_path / 'model.py'}:build")
    assert "\n" not in str(raised.value)
    assert set(sys.modules) == before


def test_a_rank_without_accelerator_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigError, match="cannot use device 'cuda'"):
        to_device(nn.Linear(2, 2), "cuda")

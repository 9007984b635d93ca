"""Networks by name: what each prefix gives, and what the commonest mistake with it says.

timm, torchvision and transformers are stand-ins here: modules of the same name with the few functions that are called.
"""

import enum
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ctta
from ctta.models import LOADERS, Normalized, ResNeXt29, SlidingWindow, WideResNet, load

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def classifier() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def check_normalises(net: nn.Module, inner: nn.Module) -> None:
    """In eval mode, and `inner` sees images as it was trained on."""
    assert isinstance(net, Normalized) and net.net is inner and not inner.training
    x = torch.rand(2, 3, 8, 8)
    expected = inner((x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1))
    torch.testing.assert_close(net(x), expected)


def put(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


# The networks of this library


def test_wrn28_10_with_as_many_classes_as_its_file(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("kind", ["wrn28-10", "resnext29"])
def test_files_of_another_network(kind: str, tmp_path: Path) -> None:
    torch.save(classifier().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"weights.pt does not fit this (WideResNet|ResNeXt29): missing: "):
        load(f"{kind}:{tmp_path / 'weights.pt'}")
    with pytest.raises(FileNotFoundError, match=r"there is no file of weights at nowhere.pt"):
        load(f"{kind}:nowhere.pt")


# Names in general


@pytest.mark.parametrize("spec", ["resnet50", "weights.pt", "", ":", "Timm:resnet50", "http://example.org/net.pt"])
def test_an_unknown_prefix_lists_those_there_are(spec: str) -> None:
    with pytest.raises(ValueError, match=rf"'{spec}' names no network.*'wrn28-10:PATH'.* or 'sliding:NETWORK'"):
        load(spec)


@pytest.mark.parametrize("form", [form for form in LOADERS if ":" in form])
def test_a_prefix_alone_says_what_is_missing(form: str) -> None:
    prefix = form.partition(":")[0]
    for spec in (prefix, f"{prefix}:"):
        with pytest.raises(ValueError, match=f"'{spec}' does not say which network; expected '{form}'"):
            load(spec)


def test_a_network_is_no_name() -> None:
    with pytest.raises(TypeError, match=r"expected the name of a network.* got a Conv2d"):
        load(nn.Conv2d(3, 3, 1))  # type: ignore[arg-type]


def test_a_name_without_colon_is_one_more_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOADERS, "whole", lambda rest: classifier() if rest == "" else nn.Identity())
    assert not load("whole").training
    with pytest.raises(ValueError, match="expected 'whole'"):
        load("whole:thing")


# Files of users

MODEL_FILE = """
from dataclasses import dataclass
from torch import nn
from layers_beside import width

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
    (tmp_path / "layers_beside.py").write_text("width = 7")
    (tmp_path / "model.py").write_text(MODEL_FILE)
    yield tmp_path / "model.py"
    sys.modules.pop("layers_beside", None)


@pytest.mark.parametrize(("name", "classes"), [("build", 5), ("Net", 7)])
def test_a_function_or_class_of_a_file(model_file: Path, name: str, classes: int) -> None:
    path_before = list(sys.path)
    net = load(f"file:{model_file}:{name}")
    assert not net.training and net(torch.rand(1, 3, 4, 4)).shape == (1, classes, 4, 4)
    assert sys.path == path_before


def test_two_files_of_one_name_are_two(tmp_path: Path) -> None:
    for folder, channels in (("a", 2), ("b", 4)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.py").write_text(
            f"import torch\ndef net(): return torch.nn.Conv2d(3, {channels}, 1)"
        )
    first, second = (load(f"file:{tmp_path / folder / 'model.py'}:net") for folder in "ab")
    assert first.weight.shape[0] == 2 and second.weight.shape[0] == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("biuld", r"there is no biuld in .*model.py; expected 'file:PATH.py:function'"),
        ("number", r"number of .*model.py is of type int, not a function"),
        ("nothing", r"nothing of .*model.py returned NoneType; it must return a torch.nn.Module"),
        ("needs", r"needs of .*model.py is called without arguments, and needs some: .*classes"),
    ],
)
def test_mistakes_in_a_file(model_file: Path, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        load(f"file:{model_file}:{name}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("nowhere.py:build", "there is no file nowhere.py; expected 'file:PATH.py:function'"),
        ("model.py", "'file:model.py' does not say which function of which file"),
        ("model.py:", "'file:model.py:' does not say which function of which file"),
        ("model.pt:build", "'file:model.pt:build' does not say which function of which file"),
    ],
)
def test_mistakes_in_the_name_of_a_file(rest: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(f"file:{rest}")


def test_an_error_inside_the_file_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("1 / 0")
    before = set(sys.modules)
    with pytest.raises(ValueError, match=r"model\.py failed with ZeroDivisionError: division by zero"):
        load(f"file:{tmp_path / 'model.py'}:build")
    assert set(sys.modules) == before


# timm


def test_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = classifier()
    inner.pretrained_cfg = {"mean": MEAN, "std": STD}  # type: ignore[assignment]

    def create_model(name: str, *, pretrained: bool) -> nn.Module:
        assert name == "resnet50.tv_in1k" and pretrained
        return inner

    put(monkeypatch, "timm", create_model=create_model)
    check_normalises(load("timm:resnet50.tv_in1k"), inner)


def test_timm_without_that_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_model(name: str, *, pretrained: bool) -> nn.Module:
        raise RuntimeError(f"Unknown model ({name})")

    put(monkeypatch, "timm", create_model=create_model)
    with pytest.raises(ValueError, match=r"timm cannot give 'resnet5O' with weights: Unknown model.*list_models"):
        load("timm:resnet5O")


def test_a_network_that_does_not_say_how_it_normalises(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = classifier()
    inner.pretrained_cfg = {}  # type: ignore[assignment]
    put(monkeypatch, "timm", create_model=lambda name, pretrained: inner)
    with pytest.raises(ValueError, match=r"timm:net does not say with which mean and std.*'file:PATH.py:function'"):
        load("timm:net")


# torchvision


class Weights(enum.Enum):
    """As torchvision's: DEFAULT is an alias, and a member's transforms() has the mean and std."""

    IMAGENET1K_V1 = 1
    IMAGENET1K_V2 = 2
    DEFAULT = 2

    def transforms(self) -> SimpleNamespace:
        return SimpleNamespace(mean=list(MEAN), std=list(STD))


@pytest.fixture
def made_by_torchvision(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Weights, nn.Module]]:
    made: list[tuple[str, Weights, nn.Module]] = []

    def get_model_weights(name: str) -> type[Weights]:
        if name != "resnet50":
            raise ValueError(f"Unknown model {name}")
        return Weights

    def get_model(name: str, *, weights: Weights) -> nn.Module:
        made.append((name, weights, classifier()))
        return made[-1][2]

    put(monkeypatch, "torchvision")
    put(monkeypatch, "torchvision.models", get_model=get_model, get_model_weights=get_model_weights)
    return made


@pytest.mark.parametrize(
    ("spec", "weights"),
    [("resnet50", Weights.IMAGENET1K_V2), ("resnet50:IMAGENET1K_V1", Weights.IMAGENET1K_V1)],
)
def test_torchvision(made_by_torchvision: list[tuple[str, Weights, nn.Module]], spec: str, weights: Weights) -> None:
    net = load(f"torchvision:{spec}")
    ((name, given, inner),) = made_by_torchvision
    assert name == "resnet50" and given is weights
    check_normalises(net, inner)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("resnet5O", r"torchvision has no network 'resnet5O': torchvision.models.list_models\(\)"),
        (
            "resnet50:V1",
            r"no weights 'V1' of resnet50; there are IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT",
        ),
    ],
)
def test_torchvision_without_that(made_by_torchvision: list[Any], spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(f"torchvision:{spec}")
    assert not made_by_torchvision


# Hugging Face


class WithLogits(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.inner(pixel_values))


class HuggingFace:
    """A stand-in for transformers, whose networks and settings tests choose."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.architectures: list[str] | None = ["ResNetForImageClassification"]
        self.settings: dict[str, Any] = {"image_mean": list(MEAN), "image_std": list(STD), "rescale_factor": 0.00392156}
        self.images, self.dense = WithLogits(classifier()), WithLogits(nn.Conv2d(3, 5, 4, stride=4))
        put(
            monkeypatch,
            "transformers",
            AutoConfig=SimpleNamespace(from_pretrained=self.config),
            AutoModelForImageClassification=SimpleNamespace(from_pretrained=lambda name: self.images),
            AutoModelForSemanticSegmentation=SimpleNamespace(from_pretrained=lambda name: self.dense),
            utils=SimpleNamespace(cached_file=self.cached_file),
        )

    def config(self, name: str) -> SimpleNamespace:
        if name != "organisation/net":
            raise OSError(f"{name} is not a local folder and is not a valid model identifier.\nIf this is a private")
        return SimpleNamespace(architectures=self.architectures)

    def cached_file(self, name: str, file: str) -> str:
        assert (name, file) == ("organisation/net", "preprocessor_config.json")
        (self.folder / file).write_text(json.dumps(self.settings))
        return str(self.folder / file)


@pytest.fixture
def hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HuggingFace:
    return HuggingFace(tmp_path, monkeypatch)


@pytest.mark.parametrize("architectures", [["ResNetForImageClassification"], None])
def test_hugging_face_images(hugging_face: HuggingFace, architectures: list[str] | None) -> None:
    hugging_face.architectures = architectures
    net = load("hf:organisation/net")
    assert isinstance(net, Normalized) and net.net is hugging_face.images
    net.net = hugging_face.images.inner
    check_normalises(net, hugging_face.images.inner)


def test_hugging_face_segmentation_can_be_adapted(hugging_face: HuggingFace) -> None:
    hugging_face.architectures = ["SegformerForSemanticSegmentation"]
    net = load("hf:organisation/net")
    assert isinstance(net, Normalized) and net.net is hugging_face.dense
    assert ctta.Source(net)(torch.rand(1, 3, 16, 16)).shape == (1, 5, 16, 16)


@pytest.mark.parametrize("architectures", [["BertForMaskedLM"], ["ViTModel"], ["MaskFormerForInstanceSegmentation"]])
def test_hugging_face_for_another_task(hugging_face: HuggingFace, architectures: list[str]) -> None:
    hugging_face.architectures = architectures
    words = rf"hf:organisation/net is a {architectures[0]}, .*expected a network \.\.\.ForSemanticSegmentation or "
    with pytest.raises(ValueError, match=words):
        load("hf:organisation/net")


def test_hugging_face_in_16_bits_is_brought_to_32(hugging_face: HuggingFace) -> None:
    hugging_face.images.half()
    net = load("hf:organisation/net")
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}


def test_a_sliding_window_around_a_network_by_name(hugging_face: HuggingFace) -> None:
    hugging_face.architectures = ["SegformerForSemanticSegmentation"]
    net = load("sliding:hf:organisation/net")
    assert isinstance(net, SlidingWindow) and (net.window, net.stride) == (1024, 768) and not net.training
    assert isinstance(net.net, Normalized) and net.net.net is hugging_face.dense
    with pytest.raises(ValueError, match="'nonsense' names no network"):
        load("sliding:nonsense")


def test_hugging_face_without_normalisation(hugging_face: HuggingFace) -> None:
    hugging_face.settings = {"do_normalize": False}
    assert load("hf:organisation/net") is hugging_face.images


@pytest.mark.parametrize(
    "unusual",
    [
        {"do_rescale": False},
        {"rescale_factor": 1 / 127.5},
        {"rescale_offset": True},
        {"include_top": True},
        {"do_flip_channel_order": True, "do_normalize": False},
    ],
)
def test_hugging_face_with_more_than_a_mean(hugging_face: HuggingFace, unusual: dict[str, Any]) -> None:
    hugging_face.settings |= unusual
    with pytest.raises(ValueError, match=rf"hf:organisation/net prepares .* \({next(iter(unusual))}\): .*file:PATH.py"):
        load("hf:organisation/net")


def test_hugging_face_guesses_no_normalisation_that_it_could_not_fetch(
    hugging_face: HuggingFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_connection(name: str, file: str) -> str:
        raise OSError(f"cannot connect to fetch {file}")

    monkeypatch.setattr(sys.modules["transformers"].utils, "cached_file", lose_connection)
    config = SimpleNamespace(architectures=["SegformerForSemanticSegmentation"], model_type="segformer")
    monkeypatch.setattr(sys.modules["transformers"].AutoConfig, "from_pretrained", lambda name: config)
    with pytest.raises(ValueError, match=r"Hugging Face cannot give 'organisation/net' .* preprocessor_config\.json"):
        load("hf:organisation/net")


def test_hugging_face_without_that_network(hugging_face: HuggingFace) -> None:
    with pytest.raises(ValueError, match=r"Hugging Face cannot give 'organisation/nat'.* Check the spelling") as raised:
        load("hf:organisation/nat")
    assert "\n" not in str(raised.value)


# Libraries that are not there, or broken

NAMES = {"timm": "timm:resnet50", "torchvision": "torchvision:resnet50", "transformers": "hf:microsoft/resnet-50"}


@pytest.mark.parametrize("package", NAMES)
def test_a_library_that_is_not_installed(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    install = r"'ctta\[segmentation\]'" if package == "transformers" else package
    with pytest.raises(ImportError, match=f"needs {package}, which is not installed: pip install {install}$"):
        load(NAMES[package])


@pytest.mark.parametrize("package", NAMES)
@pytest.mark.parametrize(
    "failure",
    [
        "raise RuntimeError('operator torchvision::nms does not exist')",
        "raise AttributeError(\"partially initialized module 'torchvision' has no attribute 'extension'\")",
        "import a_package_that_is_not_there",
    ],
)
def test_a_library_that_cannot_be_imported(
    package: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{package}.py").write_text(failure)
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=rf"needs {package}, which is installed but .*pip install --upgrade torch "):
        load(NAMES[package])


def test_transformers_whose_parts_cannot_be_imported(hugging_face: HuggingFace) -> None:
    """It imports lazily: the module is there, and its attribute fails."""

    def fail(name: str) -> None:
        raise RuntimeError(f"Failed to import {name} because of: operator torchvision::nms does not exist")

    del sys.modules["transformers"].AutoModelForImageClassification
    sys.modules["transformers"].__getattr__ = fail  # type: ignore[method-assign]
    with pytest.raises(ImportError, match=r"needs transformers, which is installed but .*torchvision::nms"):
        load("hf:organisation/net")

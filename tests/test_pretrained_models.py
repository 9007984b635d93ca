"""Pretrained networks of timm, torchvision and Hugging Face, and the errors for names and libraries that fail.

The libraries are replaced by modules of the same name with the few functions that are called.
"""

import enum
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ctta
from ctta.errors import ConfigError, is_user_error
from ctta.models import Normalized, SlidingWindow, load

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def build_classifier() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def check_normalization(net: nn.Module, inner: nn.Module) -> None:
    """Check that the network is in eval mode and passes normalized images to `inner`."""
    assert isinstance(net, Normalized) and net.net is inner and not inner.training
    x = torch.rand(2, 3, 8, 8)
    expected = inner((x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1))
    torch.testing.assert_close(net(x), expected)


def install_module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Put a module with these attributes into ``sys.modules``."""
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


# timm


def test_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = build_classifier()
    inner.pretrained_cfg = {"mean": MEAN, "std": STD}  # type: ignore[assignment]

    def create_model(name: str, *, pretrained: bool) -> nn.Module:
        assert name == "resnet50.tv_in1k" and pretrained
        return inner

    install_module(monkeypatch, "timm", create_model=create_model)
    check_normalization(load("timm:resnet50.tv_in1k"), inner)


def test_unknown_timm_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_model(name: str, *, pretrained: bool) -> nn.Module:
        raise RuntimeError(f"Unknown model ({name})")

    install_module(monkeypatch, "timm", create_model=create_model)
    with pytest.raises(ConfigError, match="list_models"):
        load("timm:resnet5O")


def test_a_network_without_normalization_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = build_classifier()
    inner.pretrained_cfg = {}  # type: ignore[assignment]
    install_module(monkeypatch, "timm", create_model=lambda name, pretrained: inner)
    with pytest.raises(ConfigError):
        load("timm:net")


# torchvision


class Weights(enum.Enum):
    """Weights like torchvision's: DEFAULT is an alias, and ``transforms()`` holds the mean and std."""

    IMAGENET1K_V1 = 1
    IMAGENET1K_V2 = 2
    DEFAULT = 2

    def transforms(self) -> SimpleNamespace:
        return SimpleNamespace(mean=list(MEAN), std=list(STD))


@pytest.fixture
def torchvision_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Weights, nn.Module]]:
    calls: list[tuple[str, Weights, nn.Module]] = []

    def get_model_weights(name: str) -> type[Weights]:
        if name != "resnet50":
            raise ValueError(f"Unknown model {name}")
        return Weights

    def get_model(name: str, *, weights: Weights) -> nn.Module:
        calls.append((name, weights, build_classifier()))
        return calls[-1][2]

    install_module(monkeypatch, "torchvision")
    install_module(monkeypatch, "torchvision.models", get_model=get_model, get_model_weights=get_model_weights)
    return calls


@pytest.mark.parametrize(
    ("spec", "weights"),
    [("resnet50", Weights.IMAGENET1K_V2), ("resnet50:IMAGENET1K_V1", Weights.IMAGENET1K_V1)],
)
def test_torchvision(torchvision_calls: list[tuple[str, Weights, nn.Module]], spec: str, weights: Weights) -> None:
    net = load(f"torchvision:{spec}")
    ((name, given, inner),) = torchvision_calls
    assert name == "resnet50" and given is weights
    check_normalization(net, inner)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnet5O", r"torchvision has no network 'resnet5O': torchvision.models.list_models\(\)"),
        (
            "resnet50:V1",
            r"no weights 'V1' for resnet50; available: IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT",
        ),
    ],
)
def test_unknown_torchvision_network_or_weights(torchvision_calls: list[Any], spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(f"torchvision:{spec}")
    assert not torchvision_calls


# Hugging Face


class WithLogits(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.inner(pixel_values))


class FakeTransformers:
    """A replacement of transformers with configurable networks and settings."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.architectures: list[str] | None = ["ResNetForImageClassification"]
        self.settings: dict[str, Any] = {"image_mean": list(MEAN), "image_std": list(STD), "rescale_factor": 0.00392156}
        self.classification, self.segmentation = (
            WithLogits(build_classifier()),
            WithLogits(nn.Conv2d(3, 5, 4, stride=4)),
        )
        install_module(
            monkeypatch,
            "transformers",
            AutoConfig=SimpleNamespace(from_pretrained=self.config),
            AutoModelForImageClassification=SimpleNamespace(from_pretrained=lambda name, **_: self.classification),
            AutoModelForSemanticSegmentation=SimpleNamespace(from_pretrained=lambda name, **_: self.segmentation),
            utils=SimpleNamespace(cached_file=self.cached_file),
        )

    def config(self, name: str, **_: Any) -> SimpleNamespace:
        if name != "organization/net":
            raise OSError(f"{name} is not a local folder and is not a valid model identifier.\nIf this is a private")
        return SimpleNamespace(architectures=self.architectures)

    def cached_file(self, name: str, file: str, **_: Any) -> str:
        assert (name, file) == ("organization/net", "preprocessor_config.json")
        (self.folder / file).write_text(json.dumps(self.settings))
        return str(self.folder / file)


@pytest.fixture
def huggingface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTransformers:
    return FakeTransformers(tmp_path, monkeypatch)


@pytest.mark.parametrize("architectures", [["ResNetForImageClassification"], None])
def test_huggingface_classification(huggingface: FakeTransformers, architectures: list[str] | None) -> None:
    huggingface.architectures = architectures
    net = load("hf:organization/net")
    assert isinstance(net, Normalized) and net.net is huggingface.classification
    net.net = huggingface.classification.inner
    check_normalization(net, huggingface.classification.inner)


def test_huggingface_segmentation_can_be_adapted(huggingface: FakeTransformers) -> None:
    huggingface.architectures = ["SegformerForSemanticSegmentation"]
    net = load("hf:organization/net")
    assert isinstance(net, Normalized) and net.net is huggingface.segmentation
    assert ctta.Source(net)(torch.rand(1, 3, 16, 16)).shape == (1, 5, 16, 16)


@pytest.mark.parametrize("architectures", [["BertForMaskedLM"], ["ViTModel"], ["MaskFormerForInstanceSegmentation"]])
def test_huggingface_network_for_another_task(huggingface: FakeTransformers, architectures: list[str]) -> None:
    huggingface.architectures = architectures
    message = rf"hf:organization/net is a {architectures[0]}, .*expected a network \.\.\.ForSemanticSegmentation or "
    with pytest.raises(ConfigError, match=message):
        load("hf:organization/net")


def test_huggingface_16_bit_weights_become_32_bit(huggingface: FakeTransformers) -> None:
    huggingface.classification.half()
    net = load("hf:organization/net")
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}


def test_sliding_window_around_a_network_by_name(huggingface: FakeTransformers) -> None:
    huggingface.architectures = ["SegformerForSemanticSegmentation"]
    net = load("sliding:hf:organization/net")
    assert isinstance(net, SlidingWindow) and (net.window, net.stride) == (1024, 768) and not net.training
    assert isinstance(net.net, Normalized) and net.net.net is huggingface.segmentation
    with pytest.raises(ConfigError):
        load("sliding:nonsense")


def test_huggingface_without_normalization(huggingface: FakeTransformers) -> None:
    huggingface.settings = {"do_normalize": False}
    assert load("hf:organization/net") is huggingface.classification


@pytest.mark.parametrize(
    "unsupported",
    [
        {"do_rescale": False},
        {"rescale_factor": 1 / 127.5},
        {"rescale_offset": True},
        {"include_top": True},
        {"do_flip_channel_order": True, "do_normalize": False},
    ],
)
def test_huggingface_with_unsupported_preprocessing(huggingface: FakeTransformers, unsupported: dict[str, Any]) -> None:
    huggingface.settings |= unsupported
    with pytest.raises(ConfigError, match=next(iter(unsupported))):
        load("hf:organization/net")


def test_huggingface_does_not_guess_a_normalization_it_could_not_download(
    huggingface: FakeTransformers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_connection(name: str, file: str, **_: Any) -> str:
        raise OSError(f"cannot connect to fetch {file}")

    monkeypatch.setattr(sys.modules["transformers"].utils, "cached_file", lose_connection)
    config = SimpleNamespace(architectures=["SegformerForSemanticSegmentation"], model_type="segformer")
    monkeypatch.setattr(sys.modules["transformers"].AutoConfig, "from_pretrained", lambda name, **_: config)
    with pytest.raises(ConfigError, match="preprocessor_config"):
        load("hf:organization/net")


def test_unknown_huggingface_network(huggingface: FakeTransformers) -> None:
    with pytest.raises(ConfigError) as raised:
        load("hf:organization/nat")
    assert "\n" not in str(raised.value)


# Missing and broken libraries

SPECS = {"timm": "timm:resnet50", "torchvision": "torchvision:resnet50", "transformers": "hf:microsoft/resnet-50"}


@pytest.mark.parametrize("package", SPECS)
def test_missing_library(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    install = r"'ctta\[segmentation\]'" if package == "transformers" else package
    with pytest.raises(ImportError, match=f"needs {package}, which is not installed: pip install {install}$") as raised:
        load(SPECS[package])
    assert is_user_error(raised.value)  # the command prints the sentence alone


@pytest.mark.parametrize("package", SPECS)
@pytest.mark.parametrize(
    "failure",
    [
        "raise RuntimeError('operator torchvision::nms does not exist')",
        "raise AttributeError(\"partially initialized module 'torchvision' has no attribute 'extension'\")",
        "import a_package_that_does_not_exist",
    ],
)
def test_broken_library(package: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{package}.py").write_text(failure)
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ImportError, match=rf"needs {package}, which is installed but .*pip install --upgrade torch "
    ) as raised:
        load(SPECS[package])
    assert is_user_error(raised.value)


def test_broken_lazy_import_of_transformers(huggingface: FakeTransformers) -> None:
    """The module can be imported, but accessing its attribute fails."""

    def fail(name: str) -> None:
        raise RuntimeError(f"Failed to import {name} because of: operator torchvision::nms does not exist")

    del sys.modules["transformers"].AutoModelForImageClassification
    sys.modules["transformers"].__getattr__ = fail  # type: ignore[method-assign]
    with pytest.raises(ImportError, match="torchvision::nms"):
        load("hf:organization/net")

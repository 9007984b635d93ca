"""The head and the top layers are found by structure in networks built like those of the libraries."""

import copy
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ctta
from ctta.errors import ConfigError
from ctta.methods import CMF, DELTA, ETA, ROID, SLR, RDumb
from ctta.nn.heads import count_classes, features_and_logits, find_head, get_head, head_weight
from ctta.nn.surgery import find_top_layers
from ctta.testing import NETWORKS


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, width)  # squeeze and excitation, which some name like the classifier

    def forward(self, x: Tensor) -> Tensor:
        excited: Tensor = self.bn1(self.conv1(x)) * self.fc(x.mean((2, 3))).sigmoid()[..., None, None]
        return x + excited


class TorchvisionResNet(nn.Module):
    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4)
        for stage in range(1, 5):
            setattr(self, f"layer{stage}", nn.Sequential(*[ResidualBlock(4) for _ in range(num_blocks)]))
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class TransformerBlock(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), nn.Linear(width, width)
        self.norm2, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        mixed: Tensor = x + self.mlp(self.norm2(x))
        return mixed


class TimmViT(nn.Module):
    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 6, 8, 8)
        self.blocks = nn.Sequential(*[TransformerBlock() for _ in range(depth)])
        self.norm, self.out = nn.LayerNorm(6), nn.Linear(6, 5)
        self.unused = nn.Linear(2, 2)

    def get_classifier(self) -> nn.Module:
        return self.out

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2)
        logits: Tensor = self.out(self.norm(self.blocks(tokens)).mean(1))
        return logits


class TorchvisionViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, 6, 8, 8)
        self.encoder = nn.Module()
        self.encoder.layers = nn.Sequential()
        for number in range(12):
            self.encoder.layers.add_module(f"encoder_layer_{number}", TransformerBlock())
        self.encoder.ln = nn.LayerNorm(6)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv_proj(x).flatten(2).transpose(1, 2)
        encoded = self.get_submodule("encoder.ln")(self.get_submodule("encoder.layers")(tokens))
        logits: Tensor = self.heads(encoded[:, 0])
        return logits


class TorchvisionFCN(nn.Module):
    """Dense logits and an auxiliary classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU())
        self.classifier = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 5, 1))
        self.aux_classifier = nn.Sequential(nn.Conv2d(6, 5, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.backbone(x)
        return {"out": self.classifier(hidden), "aux": self.aux_classifier(hidden)}


class Normalized(nn.Module):
    """A wrapper that normalizes its input, as benchmarks have it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.model = net

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model((x - 0.5) / 0.25)
        return logits


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits


HEADS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "torchvision_resnet": (TorchvisionResNet, "fc"),
    "normalized": (lambda: Normalized(TorchvisionResNet()), "model.fc"),
    "timm": (TimmViT, "out"),
    "normalized_timm": (lambda: Normalized(TimmViT()), "model.out"),
    "torchvision_vit": (TorchvisionViT, "heads.head"),
    "torchvision_fcn": (TorchvisionFCN, "classifier.2"),
    "mobile_net": (MobileNet, "classifier.1"),
    "batch_norm": (NETWORKS["batch_norm"], "8"),
    "vit": (NETWORKS["vit"], "head"),
    "segmentation": (NETWORKS["segmentation"], "6"),
}


@pytest.mark.parametrize("name", HEADS)
def test_the_head_is_found(name: str) -> None:
    build, expected = HEADS[name]
    net = build().eval()
    assert find_head(net) == expected
    assert find_head(net, expected) == expected
    assert count_classes(net) == 5


class UsesHead(ctta.AdaptiveModel):
    """Predicts by its head alone, from the features of one pass."""

    def __init__(self, net: nn.Module, *, head: str | None = None) -> None:
        super().__init__(net)
        self.head = head
        self.use_head(head)
        self.twin = self.copy_of_source()

    def adapt_step(self, x: Tensor) -> Tensor:
        features, logits = features_and_logits(self.twin, x)
        by_head: Tensor = get_head(self.twin)(features)
        assert by_head.shape[:2] == logits.shape[:2]
        return by_head if by_head.shape == logits.shape else nn.functional.interpolate(by_head, x.shape[2:])


@pytest.mark.parametrize("name", HEADS)
def test_features_and_logits_come_from_one_pass(name: str) -> None:
    torch.manual_seed(0)
    net = HEADS[name][0]().eval()
    model, x = UsesHead(net), torch.rand(4, 3, 16, 16)
    features, logits = features_and_logits(model.twin, x)
    torch.testing.assert_close(logits.detach(), ctta.BNStats(net)(x))
    assert features.shape[:2] == (4, head_weight(model.twin).shape[1])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.fork(), copy.deepcopy(model).reset()):
        for net in (twin.twin, twin.source):
            torch.testing.assert_close(features_and_logits(net, x)[0], features)
    assert not any(module._forward_pre_hooks for module in model.deploy([x]).modules() if isinstance(module, nn.Linear))


def test_a_method_that_uses_the_head_keeps_the_contract() -> None:
    ctta.testing.check_method(UsesHead, networks={"batch_norm": NETWORKS["batch_norm"]})


def two_heads() -> nn.Module:
    net = nn.Module()
    net.norm, net.cls_classifier, net.distillation_classifier = nn.LayerNorm(4), nn.Linear(4, 5), nn.Linear(4, 5)
    return net


def test_several_heads_are_listed() -> None:
    with pytest.raises(ctta.ConfigError, match=r"'cls_classifier'.*'distillation_classifier'"):
        find_head(two_heads())
    assert find_head(two_heads(), "cls_classifier") == "cls_classifier"


@pytest.mark.parametrize(
    ("net", "head", "word"),
    [
        (nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)), None, "BatchNorm1d"),
        (nn.Sequential(nn.Linear(4, 5)), "fc", "'fc'"),
        (nn.Sequential(nn.Linear(4, 5), nn.ReLU()), "1", "'1'"),
        (nn.Flatten(), None, "no weights"),
    ],
)
def test_a_missing_head_is_explained(net: nn.Module, head: str | None, word: str) -> None:
    with pytest.raises(ctta.ConfigError, match=word):
        find_head(net, head)


def test_a_head_that_runs_on_every_token_is_refused() -> None:
    class PoolsLogits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.fc(x.flatten(2).transpose(1, 2)).mean(1)
            return logits

    with pytest.raises(ctta.ConfigError):
        UsesHead(PoolsLogits())(torch.rand(2, 3, 4, 4))


def nested(**children: nn.Module) -> nn.Module:
    net = nn.Module()
    for name, child in children.items():
        net.add_module(name, child)
    return net


def swin() -> nn.Module:
    """Stages and mergers in turn, behind a stem that is a Sequential too."""
    stem = nn.Sequential(nn.Conv2d(3, 6, 4, 4), nn.LayerNorm(6))
    parts: list[nn.Module] = [stem]
    for stage in range(4):
        parts.append(nn.Sequential(*[TransformerBlock() for _ in range(2)]))
        parts += [nested(norm=nn.LayerNorm(6))] if stage < 3 else []
    return nested(features=nn.Sequential(*parts), norm=nn.LayerNorm(6), head=nn.Linear(6, 5))


def seg_former() -> nn.Module:
    """Lists of stages, of their embeddings and of their norms, side by side."""
    stages = nn.ModuleList([nn.ModuleList([TransformerBlock() for _ in range(2)]) for _ in range(4)])
    embeddings = nn.ModuleList([nested(norm=nn.LayerNorm(6), proj=nn.Conv2d(3, 6, 3)) for _ in range(4)])
    norms = nn.ModuleList([nn.LayerNorm(6) for _ in range(4)])
    encoder = nested(patch_embeddings=embeddings, block=stages, layer_norm=norms)
    decoder = nn.ModuleDict({"batch_norm": nn.BatchNorm2d(6), "classifier": nn.Conv2d(6, 5, 1)})
    return nested(encoder=encoder, decode_head=decoder)


TOPS: dict[str, tuple[Callable[[], nn.Module], list[str] | None]] = {
    "resnet": (TorchvisionResNet, ["layer4"]),
    "resnet_of_single_blocks": (lambda: TorchvisionResNet(1), ["layer4"]),
    "normalized": (lambda: Normalized(TorchvisionResNet()), ["model.layer4"]),
    "timm_vit": (TimmViT, ["blocks.9", "blocks.10", "blocks.11", "norm"]),
    "small_vit": (lambda: TimmViT(3), ["blocks.2", "norm"]),
    "torchvision_vit": (
        TorchvisionViT,
        [*[f"encoder.layers.encoder_layer_{number}" for number in (9, 10, 11)], "encoder.ln"],
    ),
    "swin": (swin, ["features.7", "norm"]),
    "seg_former": (seg_former, ["encoder.block.3", "encoder.layer_norm.3", "decode_head.batch_norm"]),
    "wide_resnet": (lambda: ctta.models.WideResNet(10, 1), ["block3", "bn1"]),
    "resnext": (ctta.models.ResNeXt29, ["stage_3"]),
    "resnet20": (lambda: ctta.models.load("embedded"), None),
    "batch_norm": (NETWORKS["batch_norm"], ["4"]),
    "vit": (NETWORKS["vit"], ["mlp.0"]),
    "unused_norm_after_the_head": (
        lambda: nested(
            norm1=nn.LayerNorm(4), norm2=nn.LayerNorm(4), fc=nn.Linear(4, 5), unused=nn.Sequential(nn.LayerNorm(4))
        ),
        ["norm2"],
    ),
    "one_norm": (lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), []),
}


@pytest.mark.parametrize("name", TOPS)
def test_top_layers_are_found_by_structure(name: str) -> None:
    build, expected = TOPS[name]
    found = find_top_layers(build())
    assert found and "3" in found[0] if expected is None else list(found) == expected


class SkipsTop(ctta.AdaptiveModel):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.student = self.copy_of_source()
        self.train_norms_(self.student, skip_top=True)

    def adapt_step(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def test_skipped_layers_are_shown_and_not_trained() -> None:
    model = SkipsTop(TorchvisionResNet())
    trained = [name for name, parameter in model.student.named_parameters() if parameter.requires_grad]
    assert "bn1.weight" in trained and "layer3.1.bn1.bias" in trained
    assert not any(name.startswith("layer4") for name in trained)
    assert "skipped_layers=(layer4)" in repr(model)


def test_transformers_networks() -> None:
    transformers: Any = importlib.import_module("transformers")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.ViTConfig(num_hidden_layers=4, image_size=16, patch_size=8, num_labels=5, **sizes)
    net = transformers.ViTForImageClassification(config).eval()
    assert find_head(net) == "classifier"
    assert find_top_layers(net) == ("vit.layers.3", "vit.layernorm")
    features, logits = features_and_logits(UsesHead(net).twin, torch.rand(2, 3, 16, 16))
    assert features.shape == (2, 8) and logits.shape == (2, 5)
    dense = transformers.SegformerForSemanticSegmentation(
        transformers.SegformerConfig(
            depths=[1] * 4, hidden_sizes=[4] * 4, num_attention_heads=[1] * 4, decoder_hidden_size=8, num_labels=5
        )
    ).eval()
    assert find_head(dense) == "decode_head.classifier"
    assert find_top_layers(dense) == ("segformer.stages.3", "decode_head.batch_norm")
    features, logits = features_and_logits(UsesHead(dense).twin, torch.rand(2, 3, 32, 32))
    assert features.shape[:2] == (2, 8) and logits.shape == (2, 5, 32, 32)


class WithoutHeadLayer(nn.Module):
    """Computes its logits from a parameter of its own, so that no layer can be found to be the head."""

    def __init__(self, num_classes: int = 5, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.weight = nn.Parameter(scale * torch.randn(num_classes, 8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.body(x).mean((2, 3)), self.weight)


COUNTING: dict[str, Any] = {"roid": ROID, "cmf": CMF, "eta": ETA, "rdumb": RDumb, "slr": SLR, "delta": DELTA}


@pytest.mark.parametrize("num_classes", [2, 1000])
@pytest.mark.parametrize("name", COUNTING)
def test_the_first_output_tells_the_classes_if_the_head_is_not_found(
    name: str, num_classes: int, tmp_path: Path
) -> None:
    net = ctta.models.Normalized(WithoutHeadLayer(num_classes, scale=20.0).eval(), (0.5,) * 3, (0.2,) * 3)
    method = COUNTING[name]
    settings = {**ctta.testing.select_settings(method), "lr": 1e-2}
    found, given = method(net, **settings), method(net, **settings, num_classes=num_classes)
    for number in range(3):
        x = torch.rand(20, 3, 8, 8, generator=torch.Generator().manual_seed(number))
        assert torch.equal(found(x), given(x))
        if number == 1:
            ctta.save(found, tmp_path / "stream.safetensors")
            found = ctta.load(tmp_path / "stream.safetensors", net)
    assert found.average.shape == (num_classes,) and torch.equal(found.average, given.average)
    for model in (found, given):
        model.restart_()
    assert found.average.numel() == 0 and torch.equal(given.average, given.fork().average)


@pytest.mark.parametrize("name", ["roid", "eta", "slr", "delta"])
def test_the_contract_holds_where_the_head_is_not_found(name: str) -> None:
    ctta.testing.check_method(COUNTING[name], networks={"no_head": lambda: WithoutHeadLayer().eval()})


def test_a_wrong_number_of_classes_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_classes"):
        ETA(WithoutHeadLayer().eval(), num_classes=1)

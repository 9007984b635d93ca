"""SegFormer of transformers: built without weights, loaded from folders, and adapted by every method."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from other_networks import check_on
from torch import Tensor, nn

import ctta
from ctta.errors import ConfigError, InputError
from ctta.models import Normalized, SlidingWindow, load, segformer
from ctta.models.pretrained import TransformersModel

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: The configuration of NVIDIA's repository, in its older format, with fewer and narrower layers.
HUB_CONFIG = {
    "architectures": ["SegformerForSemanticSegmentation"],
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout_prob": 0.1,
    "decoder_hidden_size": 12,
    "depths": [1, 2, 1, 1],
    "downsampling_rates": [1, 4, 8, 16],
    "drop_path_rate": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_sizes": [8, 8, 20, 16],
    "id2label": {str(number): name for number, name in enumerate(ctta.data.datasets.scenes.CLASS_NAMES)},
    "image_size": 224,
    "initializer_range": 0.02,
    "label2id": {name: number for number, name in enumerate(ctta.data.datasets.scenes.CLASS_NAMES)},
    "layer_norm_eps": 1e-06,
    "mlp_ratios": [4, 4, 4, 4],
    "model_type": "segformer",
    "num_attention_heads": [1, 2, 5, 8],
    "num_channels": 3,
    "num_encoder_blocks": 4,
    "patch_sizes": [7, 3, 3, 3],
    "reshape_last_stage": True,
    "sr_ratios": [8, 4, 2, 1],
    "strides": [4, 2, 2, 2],
    "torch_dtype": "float32",
    "transformers_version": "4.18.0",
}
HUB_PROCESSOR = {
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "SegformerFeatureExtractor",
    "image_mean": [0.5, 0.25, 0.75],
    "image_std": [0.125, 0.25, 0.5],
    "reduce_labels": False,
    "resample": 2,
    "size": 1024,
}


def build_random_segformer(**changes: Any) -> Any:
    """Return a small SegFormer of transformers with fixed random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network: Any = transformers.SegformerForSemanticSegmentation
        return network(transformers.SegformerConfig.from_dict(HUB_CONFIG | changes)).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder like a repository on the hub, with random weights and settings that differ from the defaults."""
    build_random_segformer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(HUB_CONFIG))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(HUB_PROCESSOR))
    return tmp_path


def compute_logits(net: nn.Module, x: Tensor, mean: Any, std: Any) -> Tensor:
    normalized = torch.stack([(x[:, i] - mean[i]) / std[i] for i in range(3)], 1)
    logits: Tensor = net(normalized).logits
    return nn.functional.interpolate(logits, size=x.shape[2:], mode="bilinear", align_corners=False)


# Loaded from a folder


def test_folder_like_on_the_hub(folder: Path) -> None:
    net, x = load(f"hf:{folder}"), torch.rand(2, 3, 40, 70)
    assert isinstance(net, Normalized) and not any(module.training for module in net.modules())
    with torch.no_grad():
        expected = compute_logits(build_random_segformer(), x, HUB_PROCESSOR["image_mean"], HUB_PROCESSOR["image_std"])
    torch.testing.assert_close(ctta.Source(net)(x), expected)
    assert expected.shape == (2, 19, 40, 70)


def test_segformer_without_processor_uses_imagenet_normalization(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    net, x = load(f"hf:{folder}"), torch.rand(1, 3, 32, 64)
    with torch.no_grad():
        torch.testing.assert_close(ctta.Source(net)(x), compute_logits(build_random_segformer(), x, MEAN, STD))


def test_other_network_without_processor_is_rejected(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1])
    network: Any = transformers.ResNetForImageClassification
    network(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError):
        load(f"hf:{tmp_path}")


def test_16_bit_weights_are_adapted_in_32_bit(folder: Path) -> None:
    build_random_segformer().half().save_pretrained(folder)
    net = load(f"hf:{folder}")
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    ctta.Tent(net)(torch.rand(1, 3, 32, 32))


def test_backbone_without_head_is_rejected(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(HUB_CONFIG | {"architectures": ["SegformerModel"]}))
    with pytest.raises(ConfigError):
        load(f"hf:{folder}")


def test_missing_folder() -> None:
    with pytest.raises(ConfigError):
        load("hf:./nowhere")


# Built without weights


@pytest.mark.parametrize(
    ("size", "millions"), [("b0", 3.8), ("b1", 13.7), ("b2", 27.5), ("b3", 47.3), ("b4", 64.1), ("b5", 84.7)]
)
def test_parameter_counts(size: str, millions: float) -> None:
    """Compare with Table 1 of the paper, which is for the 150 classes of ADE20K."""
    with torch.device("meta"):
        net = segformer(size, num_classes=150)
    assert round(sum(parameter.numel() for parameter in net.parameters()) / 1e6, 1) == millions


def test_built_networks_normalize_images_in_the_unit_range() -> None:
    net, x = segformer("b0", num_classes=7), torch.rand(1, 3, 48, 64)
    assert isinstance(net, Normalized) and not net.net.training
    with torch.no_grad():
        torch.testing.assert_close(ctta.Source(net)(x), compute_logits(net.net, x, MEAN, STD))


def test_invalid_sizes() -> None:
    with pytest.raises(ConfigError):
        segformer("B6")
    with pytest.raises(ConfigError):
        segformer("b0", num_classes=0)


def test_missing_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers, .*: pip install 'ctta\[segmentation\]'$"):
        segformer("b0")


def test_networks_can_be_pickled_after_a_call() -> None:
    """The hooks of transformers, which pass hidden states to the decoder, cannot be pickled."""
    net, x = TransformersModel(build_random_segformer(), MEAN, STD).eval(), torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        expected = net(x).logits
        with pytest.raises((AttributeError, pickle.PicklingError)):
            pickle.dumps(net.net)
        restored = pickle.loads(pickle.dumps(net))
        for _ in range(2):
            assert torch.equal(restored(x).logits, expected)
            assert torch.equal(net(x).logits, expected)


# Adapted


@pytest.fixture(scope="module")
def b0() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return segformer("b0")


def make_scene(height: int, width: int) -> Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(height))


def build_model(method: str, net: nn.Module) -> ctta.AdaptiveModel:
    if method == "cotta":
        return ctta.CoTTA.official_segmentation(net)
    return ctta.METHODS[method](net)


@pytest.mark.parametrize("size", [(128, 256), (75, 133)])
@pytest.mark.parametrize(
    "method", ["tent", *(pytest.param(name, marks=pytest.mark.long) for name in ("bn_stats", "pseudo_label", "cotta"))]
)
def test_single_scenes_are_predicted_and_learned_from(method: str, size: tuple[int, int], b0: nn.Module) -> None:
    model, x = build_model(method, b0), make_scene(*size)
    predicted = model.predict(x)
    logits = model(x)
    assert logits.shape == (1, 19, *size) and logits.isfinite().all()
    assert torch.equal(predicted, logits)
    assert not torch.equal(logits, ctta.Source(b0)(x))
    if method != "bn_stats":
        assert model.last_step is not None and not model.last_step.skipped
        assert not torch.equal(model(x), logits), "nothing was learned"


def test_teacher_sees_one_view_at_a_time(b0: nn.Module) -> None:
    model, seen = ctta.CoTTA.official_segmentation(b0), []
    model.teacher.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    model(make_scene(65, 127))
    sizes = [(32, 64), (49, 95), (65, 127), (81, 159), (98, 190), (114, 222), (130, 254)]
    assert seen == [(1, 3, *size) for size in sizes for _flip in range(2)]


def test_too_small_scenes_are_rejected(b0: nn.Module) -> None:
    with pytest.raises(InputError):
        ctta.Source(b0)(make_scene(16, 24))
    model = ctta.CoTTA.official_segmentation(b0)
    with pytest.raises(InputError):
        model(make_scene(40, 64))
    assert model.num_steps == 0
    for size in ((32, 32), (29, 64)):
        assert ctta.Source(b0)(make_scene(*size)).shape == (1, 19, *size)


class LogitsOnly(nn.Module):
    """A network that returns a tensor, as the contract checks expect."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x).logits
        return logits


def build_small_segformer() -> nn.Module:
    """Return a SegFormer for 16x16 images whose feature maps have several pixels.

    On maps of one pixel, torch's bfloat16 convolutions compute gradients from uninitialized memory.
    """
    net = build_random_segformer(strides=[2, 2, 2, 1], patch_sizes=[3, 3, 3, 3], sr_ratios=[2, 1, 1, 1])
    return LogitsOnly(TransformersModel(net, MEAN, STD))


@pytest.mark.parametrize(
    "method", ["tent", *(pytest.param(name, marks=pytest.mark.long) for name in ("bn_stats", "pseudo_label", "cotta"))]
)
def test_contract(method: str) -> None:
    settings: dict[str, Any] = {}
    if method == "cotta":
        settings = dict(ctta.methods.cotta.OFFICIAL_SEGMENTATION) | {"views": ctta.views.multiscale_flip((1,))}
    check_on(build_small_segformer, ctta.METHODS[method], **settings)


def test_sliding_window(b0: nn.Module) -> None:
    """Slide over views that are larger than the window too, as the reference implementation does."""
    sliding = SlidingWindow(b0, window=64, stride=48)
    model = ctta.CoTTA.official_segmentation(sliding, views=ctta.views.multiscale_flip((1, 1.5)))
    logits = model(make_scene(70, 100))
    assert logits.shape == (1, 19, 70, 100)
    assert model.last_step is not None and not model.last_step.skipped
    assert not torch.equal(logits, ctta.CoTTA.official_segmentation(b0, views=model.views)(make_scene(70, 100)))

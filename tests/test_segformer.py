"""SegFormer through transformers: built without weights, loaded from folders, and adapted by every method."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import SegformerConfig, SegformerForSemanticSegmentation

import ctta
from ctta.errors import ConfigError, InputError
from ctta.models import Normalized, SlidingWindow, load, segformer
from ctta.models.huggingface import TransformersModel
from ctta.testing import check_method

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: The configuration of nvidia's repository in its own, older words, with fewer and narrower layers.
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
    "id2label": {str(number): name for number, name in enumerate(ctta.datasets.segmentation.CLASS_NAMES)},
    "image_size": 224,
    "initializer_range": 0.02,
    "label2id": {name: number for number, name in enumerate(ctta.datasets.segmentation.CLASS_NAMES)},
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
HUB_PREPARATION = {
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "SegformerFeatureExtractor",
    "image_mean": [0.5, 0.25, 0.75],
    "image_std": [0.125, 0.25, 0.5],
    "reduce_labels": False,
    "resample": 2,
    "size": 1024,
}


def random_segformer(**changes: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net: nn.Module = SegformerForSemanticSegmentation(SegformerConfig.from_dict(HUB_CONFIG | changes)).eval()
    return net


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As the hub has it: weights of a random network, and settings by which to tell them from defaults."""
    random_segformer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(HUB_CONFIG))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(HUB_PREPARATION))
    return tmp_path


def logits_of(net: nn.Module, x: Tensor, mean: Any, std: Any) -> Tensor:
    normalised = torch.stack([(x[:, i] - mean[i]) / std[i] for i in range(3)], 1)
    logits: Tensor = net(normalised).logits
    return nn.functional.interpolate(logits, size=x.shape[2:], mode="bilinear", align_corners=False)


# From a folder


def test_a_folder_as_the_hub_has_it(folder: Path) -> None:
    net, x = load(f"hf:{folder}"), torch.rand(2, 3, 40, 70)
    assert isinstance(net, Normalized) and not any(module.training for module in net.modules())
    with torch.no_grad():
        expected = logits_of(random_segformer(), x, HUB_PREPARATION["image_mean"], HUB_PREPARATION["image_std"])
    torch.testing.assert_close(ctta.Source(net)(x), expected)
    assert expected.shape == (2, 19, 40, 70)


def test_a_segformer_saved_without_its_processor_is_normalised_as_imagenet(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    net, x = load(f"hf:{folder}"), torch.rand(1, 3, 32, 64)
    with torch.no_grad():
        torch.testing.assert_close(ctta.Source(net)(x), logits_of(random_segformer(), x, MEAN, STD))


def test_another_network_saved_without_its_processor_is_refused(tmp_path: Path) -> None:
    from transformers import ResNetConfig, ResNetForImageClassification

    ResNetForImageClassification(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1])).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"Hugging Face has no network .*preprocessor_config\.json"):
        load(f"hf:{tmp_path}")


def test_weights_in_16_bits_are_adapted_in_32(folder: Path) -> None:
    random_segformer().half().save_pretrained(folder)
    net = load(f"hf:{folder}")
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    ctta.Tent(net)(torch.rand(1, 3, 32, 32))


def test_a_backbone_alone_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(HUB_CONFIG | {"architectures": ["SegformerModel"]}))
    with pytest.raises(ConfigError, match=r"is a SegformerModel, .* expected a network \.\.\.ForSemanticSegmentation"):
        load(f"hf:{folder}")


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"Hugging Face has no network './nowhere' .* Check the spelling"):
        load("hf:./nowhere")


# Built without weights


@pytest.mark.parametrize(
    ("size", "millions"), [("b0", 3.8), ("b1", 13.7), ("b2", 27.5), ("b3", 47.3), ("b4", 64.1), ("b5", 84.7)]
)
def test_sizes(size: str, millions: float) -> None:
    """As many parameters as the paper's first table says, there with the 150 classes of ADE20K."""
    with torch.device("meta"):
        net = segformer(size, num_classes=150)
    assert round(sum(parameter.numel() for parameter in net.parameters()) / 1e6, 1) == millions


def test_built_networks_take_images_between_0_and_1() -> None:
    net, x = segformer("b0", num_classes=7), torch.rand(1, 3, 48, 64)
    assert isinstance(net, Normalized) and not net.net.training
    with torch.no_grad():
        torch.testing.assert_close(ctta.Source(net)(x), logits_of(net.net, x, MEAN, STD))


def test_sizes_that_there_are_not() -> None:
    with pytest.raises(ConfigError, match=r"size must be one of b0, b1, b2, b3, b4, b5, got 'B6'"):
        segformer("B6")
    with pytest.raises(ConfigError, match=r"num_classes must be at least 1, got 0"):
        segformer("b0", num_classes=0)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers, .*: pip install 'ctta\[segmentation\]'$"):
        segformer("b0")


def test_networks_are_pickled_after_a_call() -> None:
    """Transformers' own hooks, which hand hidden states to the decoder, cannot be."""
    net, x = TransformersModel(random_segformer(), MEAN, STD).eval(), torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        expected = net(x).logits
        with pytest.raises((AttributeError, pickle.PicklingError)):
            pickle.dumps(net.net)
        again = pickle.loads(pickle.dumps(net))
        for _ in range(2):
            assert torch.equal(again(x).logits, expected)
            assert torch.equal(net(x).logits, expected)


# Adapted


@pytest.fixture(scope="module")
def b0() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return segformer("b0")


def scene(height: int, width: int) -> Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(height))


def model_of(method: str, net: nn.Module) -> ctta.AdaptiveModel:
    if method == "cotta":
        return ctta.CoTTA.official_segmentation(net)
    return ctta.METHODS[method](net)


@pytest.mark.parametrize("size", [(128, 256), (75, 133)])
@pytest.mark.parametrize("method", ["bn_stats", "pseudo_label", "tent", "cotta"])
def test_a_single_scene_is_predicted_and_learnt_from(method: str, size: tuple[int, int], b0: nn.Module) -> None:
    model, x = model_of(method, b0), scene(*size)
    predicted = model.predict(x)
    logits = model(x)
    assert logits.shape == (1, 19, *size) and logits.isfinite().all()
    assert torch.equal(predicted, logits)
    assert not torch.equal(logits, ctta.Source(b0)(x))
    if method != "bn_stats":
        assert model.last_step is not None and not model.last_step.skipped
        assert not torch.equal(model(x), logits), "nothing was learnt"


def test_views_go_through_the_teacher_one_at_a_time(b0: nn.Module) -> None:
    model, seen = ctta.CoTTA.official_segmentation(b0), []
    model.teacher.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    model(scene(65, 127))
    sizes = [(32, 64), (49, 95), (65, 127), (81, 159), (98, 190), (114, 222), (130, 254)]
    assert seen == [(1, 3, *size) for size in sizes for _flip in range(2)]


def test_scenes_that_are_too_small_are_told_so(b0: nn.Module) -> None:
    with pytest.raises(InputError, match=r"images of 16x24 pixels are too small for SegformerForSemanticSegmentation"):
        ctta.Source(b0)(scene(16, 24))
    model = ctta.CoTTA.official_segmentation(b0)
    with pytest.raises(InputError, match=r"images of 20x32 pixels are too small .* views that shrink them less"):
        model(scene(40, 64))
    assert model.num_steps == 0
    for size in ((32, 32), (29, 64)):
        assert ctta.Source(b0)(scene(*size)).shape == (1, 19, *size)


class Logits(nn.Module):
    """The checks of the contract look at what a network returns."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x).logits
        return logits


def small_segformer() -> nn.Module:
    """For images of 16x16 pixels. On a map of one, torch's convolutions in bfloat16 have gradients of random memory."""
    net = random_segformer(strides=[2, 2, 2, 1], patch_sizes=[3, 3, 3, 3], sr_ratios=[2, 1, 1, 1])
    return Logits(TransformersModel(net, MEAN, STD))


@pytest.mark.parametrize("method", ["bn_stats", "pseudo_label", "tent", "cotta"])
def test_the_contract(method: str) -> None:
    settings: dict[str, Any] = {}
    if method == "cotta":
        settings = dict(ctta.methods.cotta.OFFICIAL_SEGMENTATION) | {"views": ctta.views.multiscale_flip((1,))}
    check_method(ctta.METHODS[method], networks={"segformer": small_segformer}, **settings)


def test_through_a_sliding_window(b0: nn.Module) -> None:
    """Views that are larger than the window too, as the authors do."""
    sliding = SlidingWindow(b0, window=64, stride=48)
    model = ctta.CoTTA.official_segmentation(sliding, views=ctta.views.multiscale_flip((1, 1.5)))
    logits = model(scene(70, 100))
    assert logits.shape == (1, 19, 70, 100)
    assert model.last_step is not None and not model.last_step.skipped
    assert not torch.equal(logits, ctta.CoTTA.official_segmentation(b0, views=model.views)(scene(70, 100)))

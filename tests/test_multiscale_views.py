"""Scaled views: sizes that a network takes, images in 0 to 255, and views that count by confidence."""

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ctta
from ctta.errors import ConfigError, InputError
from ctta.views import ScaledView, View, average_views, multiscale_flip


class SkipNetwork(nn.Module):
    """A network of stride 16 whose skip connections take only images with sides that are multiples of 16."""

    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.ModuleList(nn.Conv2d(channels, 4, 3, 2, padding=1) for channels in (3, 4, 4, 4))
        self.head = nn.Conv2d(4, num_classes, 1)
        self.sizes: list[tuple[int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append((x.shape[2], x.shape[3]))
        levels = []
        for layer in self.down:
            x = layer(x).relu()
            levels.append(x)
        for level in reversed(levels[:-1]):
            x = F.interpolate(x, scale_factor=2.0) + level
        logits: Tensor = self.head(x)
        return logits


def make_scene(height: int = 256, width: int = 480) -> Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("at_once", [1, 4])
def test_scales_are_rounded_to_what_the_network_takes(at_once: int) -> None:
    net = SkipNetwork().eval()
    with pytest.raises(RuntimeError, match="must match"):
        net(F.interpolate(make_scene(), scale_factor=0.75))
    logits = average_views(multiscale_flip(), net, make_scene(), "probabilities", at_once)
    assert logits.shape == (1, 4, 64 * 4, 120 * 4)
    net.sizes.clear()
    again = average_views(multiscale_flip(), net, make_scene(), "probabilities", at_once)
    torch.testing.assert_close(again, logits, rtol=0, atol=0)
    # Known from the first time. Only the sides that do not fit are rounded: 480 * 0.75 = 360 to 352, 840 to 832.
    assert set(net.sizes) == {(128, 240), (192, 352), (256, 480), (320, 608), (384, 720), (448, 832), (512, 960)}
    assert len(net.sizes) == (14 if at_once == 1 else 7)


def test_a_network_that_takes_any_size_sees_the_scales_as_they_are() -> None:
    sizes = []

    def model(x: Tensor) -> Tensor:
        sizes.append(tuple(x.shape[2:]))
        return x

    average_views(multiscale_flip((0.5, 0.75)), model, make_scene(37, 51), "logits")
    assert sizes == [(18, 26), (18, 26), (28, 38), (28, 38)]


def test_the_multiple_can_be_given() -> None:
    net = SkipNetwork().eval()
    average_views(multiscale_flip((0.75, 1.0), multiple_of=32), net, make_scene(), "logits")
    assert set(net.sizes) == {(192, 352), (256, 480)} and len(net.sizes) == 4
    assert repr(ScaledView(0.75, True, 32)) == "ScaledView(scale=0.75, flip=True, multiple_of=32)"
    assert repr(ScaledView(0.75, True)) == "ScaledView(scale=0.75, flip=True)"
    for wrong in (0, 1.5, True):
        with pytest.raises(ConfigError):
            multiscale_flip(multiple_of=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("at_once", [1, 2])
def test_the_error_names_the_view(at_once: int) -> None:
    def takes_one_size(x: Tensor) -> Tensor:
        if x.shape[2:] != (32, 64):
            raise RuntimeError("the size of tensor a must match")
        return x

    with pytest.raises(RuntimeError, match="the size of tensor a") as raised:
        average_views(multiscale_flip((1.0, 0.75)), takes_one_size, make_scene(32, 64), "logits", at_once)
    notes = raised.value.__notes__
    assert notes[0].startswith("View scale 0.75: the network failed on 24x48 pixels.")
    assert "multiscale_flip(multiple_of=32)" in notes[0]


def test_other_errors_are_not_mistaken_for_a_wrong_size() -> None:
    calls = []

    def broken(x: Tensor) -> Tensor:
        calls.append(x)
        raise InputError("nothing works")

    with pytest.raises(InputError, match="nothing works"):
        ScaledView(0.75, False)(broken, make_scene(32, 64))
    assert len(calls) == 1


def test_rounded_views_adapt_save_and_resume(tmp_path: Any) -> None:
    settings = {"views": multiscale_flip((0.75, 1.0)), "threshold": 2.0}
    model = ctta.CoTTA.official_segmentation(SkipNetwork(), **settings)
    x = make_scene(32, 80)
    model(x)
    ctta.save(model, tmp_path / "model.safetensors")
    restored = ctta.load(tmp_path / "model.safetensors", SkipNetwork())
    assert torch.equal(restored(x), model(x))
    view = ScaledView(0.5, True, 32)
    assert pickle.loads(pickle.dumps(view)) == view


@pytest.mark.parametrize(
    "build", [ctta.CoTTA.official_segmentation, partial(ctta.TestAug, views=multiscale_flip((1.0,)))]
)
def test_images_in_0_to_255_are_refused(build: Any) -> None:
    model = build(nn.Conv2d(3, 4, 1))
    with pytest.raises(InputError):
        model(255 * make_scene(16, 16))
    for harmless in (make_scene(16, 16), make_scene(16, 16) / 0.1, 255 * make_scene(16, 16) - 120):
        assert model(harmless).shape == (1, 4, 16, 16)
    assert ctta.TestAug(nn.Conv2d(5, 4, 1), views=multiscale_flip((1.0,)))(torch.full((1, 5, 8, 8), 900.0)).shape


def make_views(*logits: Tensor) -> list[View]:
    return [lambda model, x, each=each: each for each in logits]  # type: ignore[misc]


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_views_count_by_confidence_for_each_image(average: Any) -> None:
    """The first image is sure in the first view, the second image in the second."""
    sure, unsure = torch.tensor([5.0, 0.0, 0.0]), torch.tensor([0.0, 0.3, 0.0])
    views = make_views(torch.stack([sure, unsure]), torch.stack([unsure, sure]))
    equal, weighted = (
        average_views(views, lambda x: x, torch.zeros(2, 1), average, weights=weights)
        for weights in ("equal", "confidence")
    )
    assert torch.equal(weighted[0], weighted[1])
    torch.testing.assert_close(weighted[0].softmax(0), sure.softmax(0), atol=1e-3, rtol=0)
    assert equal[0].softmax(0)[0] < 0.95 * sure.softmax(0)[0]


def test_a_view_counts_by_the_power_of_its_mean_entropy() -> None:
    torch.manual_seed(0)
    logits = [3 * torch.randn(2, 5, 6, 7, dtype=torch.float64) * factor for factor in (1.0, 0.5, 0.7)]
    entropies = torch.stack([-(each.softmax(1) * each.log_softmax(1)).sum(1).mean((1, 2)) for each in logits])
    weights = (entropies / torch.log(torch.tensor(5.0))) ** -4
    expected = sum(
        weight[:, None, None, None] * each.softmax(1)
        for weight, each in zip(weights / weights.sum(0), logits, strict=True)
    )
    found = average_views(make_views(*logits), lambda x: x, torch.zeros(2, 1), "probabilities", weights="confidence")
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(found.exp(), expected)


def test_equally_sure_views_and_certain_ones_count_equally() -> None:
    certain = [torch.tensor([[200.0, -200.0]]), torch.tensor([[-200.0, 200.0]])]
    mean = average_views(make_views(*certain), lambda x: x, torch.zeros(1, 1), "probabilities", weights="confidence")
    torch.testing.assert_close(mean.exp(), torch.tensor([[0.5, 0.5]]))


def test_cotta_weighs_its_views() -> None:
    x, views = make_scene(32, 64), multiscale_flip((0.5, 1.0))
    equal, weighted = (
        ctta.CoTTA.official_segmentation(SkipNetwork(), views=views, threshold=2.0, view_weights=weights)
        for weights in ("equal", "confidence")
    )
    assert not torch.equal(equal.predict(x), weighted.predict(x))
    expected = average_views(views, weighted.teacher, x, "probabilities", weights="confidence")
    torch.testing.assert_close(weighted.predict(x), expected)
    with pytest.raises(ConfigError):
        ctta.CoTTA(SkipNetwork(), view_weights="entropy")  # type: ignore[arg-type]

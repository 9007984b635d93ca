"""Sliding-window inference against a naive implementation that averages pixel by pixel."""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from other_networks import check_on
from torch import Tensor, nn
from torch.nn import functional as F

import ctta
from ctta.errors import ConfigError, InputError
from ctta.models import SlidingWindow
from ctta.models.segmentation import compute_window_slices
from ctta.testing import NETWORKS


def build_network() -> nn.Module:
    """Return a network with a stride of 2, so that windows at odd positions differ from crops of the whole output."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(5, 4, 3, padding=1)).eval()


def average_windows(net: nn.Module, x: Tensor, window: int, stride: int) -> Tensor:
    """Return for every pixel the mean of the predictions of all windows that contain it."""
    height, width = x.shape[2:]
    starts = []
    for side in (height, width):
        places = {0}
        while max(places) + window < side:
            places.add(min(max(places) + stride, side - window))
        starts.append(sorted(places))
    predictions: dict[tuple[int, int], list[Tensor]] = {place: [] for place in product(range(height), range(width))}
    for top, left in product(*starts):
        part = x[:, :, top : min(top + window, height), left : min(left + window, width)]
        logits = F.interpolate(net(part), size=part.shape[2:], mode="bilinear", align_corners=False)
        for row, column in product(range(part.shape[2]), range(part.shape[3])):
            predictions[top + row, left + column].append(logits[:, :, row, column])
    means = [torch.stack(predictions[place]).mean(0) for place in sorted(predictions)]
    return torch.stack(means, -1).reshape(len(x), -1, height, width)


@pytest.mark.parametrize("size", [(16, 16), (17, 16), (12, 40), (40, 12), (33, 47), (28, 28), (9, 11)])
@pytest.mark.parametrize(("window", "stride"), [(16, 12), (16, 16), (16, 5), (13, 1)])
def test_logits_are_the_mean_over_windows(size: tuple[int, int], window: int, stride: int) -> None:
    net, x = build_network(), torch.rand(2, 3, *size)
    ours = SlidingWindow(net, window=window, stride=stride)(x)
    torch.testing.assert_close(ours, average_windows(net, x, window, stride))


def test_gradients_match_those_of_the_naive_implementation() -> None:
    net, x = build_network(), torch.rand(1, 3, 20, 30, requires_grad=True)
    weights = torch.rand(1, 4, 20, 30)
    inputs = [x, *net.parameters()]
    ours = torch.autograd.grad((SlidingWindow(net, window=16, stride=12)(x) * weights).sum(), inputs)
    theirs = torch.autograd.grad((average_windows(net, x, 16, 12) * weights).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_windows_of_the_reference_implementation_on_a_full_scene() -> None:
    assert compute_window_slices(1920, 1024, 768) == [slice(0, 1024), slice(768, 1792), slice(896, 1920)]
    assert compute_window_slices(1080, 1024, 768) == [slice(0, 1024), slice(56, 1080)]
    assert compute_window_slices(2048, 1024, 1024) == [slice(0, 1024), slice(1024, 2048)]
    assert compute_window_slices(960, 1024, 768) == [slice(0, 960)]


def test_images_no_larger_than_the_window_are_not_cut() -> None:
    seen: list[tuple[int, ...]] = []
    net = build_network()
    net.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    sliding = SlidingWindow(net, window=16, stride=12)
    for size in ((16, 16), (7, 16), (5, 9)):
        sliding(torch.rand(1, 3, *size))
    assert seen == [(1, 3, 16, 16), (1, 3, 7, 16), (1, 3, 5, 9)]


class WithPackedOutput(nn.Module):
    """A network that packs its logits as other libraries do."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.pack = build_network(), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.net(x))


@pytest.mark.parametrize(
    ("pack", "output"),
    [
        (lambda logits: {"out": logits, "aux": logits * 0}, None),
        (lambda logits: SimpleNamespace(logits=logits), None),
        (lambda logits: (logits * 0, logits), 1),
    ],
)
def test_logits_are_found_in_packed_outputs(pack: Callable[[Tensor], Any], output: Any) -> None:
    x = torch.rand(1, 3, 20, 30)
    expected = SlidingWindow(build_network(), window=16, stride=12)(x)
    assert torch.equal(SlidingWindow(WithPackedOutput(pack), window=16, stride=12, output=output)(x), expected)


class WritesToItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = build_network()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x.mul_(0.5))
        return logits


def test_overlapping_windows_do_not_share_memory() -> None:
    net, x = WritesToItsInput(), torch.rand(1, 3, 20, 30)
    ours = ctta.Source(SlidingWindow(net, window=16, stride=12))(x)
    torch.testing.assert_close(ours, average_windows(net.net, x / 2, 16, 12))


def test_sums_are_computed_in_float32() -> None:
    net, x = build_network(), torch.rand(1, 3, 20, 30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = SlidingWindow(net, window=16, stride=5)(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, average_windows(net, x, 16, 5), rtol=0.05, atol=0.02)


@pytest.mark.parametrize(
    "method",
    [ctta.Tent, *(pytest.param(each, marks=pytest.mark.long) for each in (ctta.BNStats, ctta.PseudoLabel, ctta.CoTTA))],
)
def test_contract(method: type[ctta.AdaptiveModel]) -> None:
    views: dict[str, Any] = {"views": ctta.views.multiscale_flip((1, 1.5))} if method is ctta.CoTTA else {}
    check_on(lambda: SlidingWindow(NETWORKS["segmentation"](), window=12, stride=8), method, **views)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "window must be an integer of at least 1, got 0"),
        ({"window": 16, "stride": 17}, "stride must be an integer from 1 to 16, got 17"),
        ({"window": 16, "stride": 0}, "stride must be an integer from 1 to 16, got 0"),
    ],
)
def test_invalid_windows(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SlidingWindow(build_network(), **settings)


def test_invalid_images_and_networks() -> None:
    with pytest.raises(InputError):
        SlidingWindow(build_network())(torch.rand(3, 20, 30))
    classifier = nn.Sequential(build_network(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ConfigError):
        SlidingWindow(classifier, window=16, stride=12)(torch.rand(1, 3, 20, 30))


def test_identity_network_returns_the_image() -> None:
    net = SlidingWindow(nn.Identity(), window=16, stride=7)
    x = torch.from_numpy(np.random.default_rng(0).random((1, 2, 61, 45)))
    torch.testing.assert_close(net(x), x)

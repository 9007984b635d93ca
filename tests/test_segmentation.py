"""Segmentation: outputs of common libraries, single scenes, odd sizes, views one at a time."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ctta
from ctta.testing import NETWORKS

SIZES = [(64, 96), (33, 57), (7, 91)]
METHODS: dict[str, Callable[[nn.Module], ctta.AdaptiveModel]] = {
    "source": ctta.Source,
    "bn_stats": ctta.BNStats,
    "pseudo_label": ctta.PseudoLabel,
    "tent": ctta.Tent,
    "cotta": ctta.CoTTA.official_segmentation,
    "cotta, any network": ctta.CoTTA.segmentation,
    "cotta, paper": lambda net: ctta.CoTTA.official_segmentation(net, loss="cross_entropy", predict_with="teacher"),
}


class WithOutput(nn.Module):
    """A network whose logits are returned inside the output of another library."""

    def __init__(self, net: nn.Module, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.pack = net, pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.net(x))


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS["segmentation"]().eval()


def make_scenes(size: tuple[int, int]) -> list[Tensor]:
    return [torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(number)) for number in range(3)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_scenes_of_any_size_and_every_common_output(name: str, size: tuple[int, int]) -> None:
    logits_by_output = []
    for pack in (
        lambda logits: logits,
        lambda logits: {"out": logits, "aux": logits[:, :1]},
        lambda logits: SimpleNamespace(logits=logits),
    ):
        model = METHODS[name](WithOutput(make_network(), pack))
        logits_by_output.append([model(x) for x in make_scenes(size)])
    for plain, *others in zip(*logits_by_output, strict=True):
        assert plain.shape == (1, 5, *size) and plain.isfinite().all()
        for other in others:
            assert torch.equal(plain, other)


@pytest.mark.parametrize("name", ["pseudo_label", "tent", "cotta"])
def test_methods_learn_from_scenes(name: str) -> None:
    model, x = METHODS[name](make_network()), make_scenes((33, 57))[0]
    logits = model(x)
    assert model.last_step is not None and not model.last_step.skipped
    assert not torch.equal(model(x), logits)


def test_the_gate_decides_for_each_pixel() -> None:
    """Where the source is confident the prediction is the teacher's, elsewhere the mean over views."""
    net, x = make_network(), make_scenes((33, 57))[0]
    direct = ctta.Source(net)(x)
    confidence = ctta.functional.confidence(direct)
    threshold = float(confidence.median())
    logits = ctta.CoTTA.official_segmentation(net, threshold=threshold).predict(x)
    same = (logits == direct).all(1)
    assert torch.equal(same, confidence >= threshold) and 0.4 < same.float().mean() < 0.6


def test_views_go_through_the_teacher_one_at_a_time() -> None:
    model, seen = ctta.CoTTA.official_segmentation(make_network()), []
    model.teacher.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    model(make_scenes((33, 57))[0])
    sides = [(16, 28), (25, 43), (33, 57), (41, 71), (50, 86), (58, 100), (66, 114)]
    assert seen[-14:] == [(1, 3, *side) for side in sides for _flip in range(2)]


def test_the_preset_for_any_network_picks_the_statistics_that_suit_it() -> None:
    own_norms = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(1, 4), nn.Conv2d(4, 5, 1))
    without_statistics = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.Conv2d(3, 5, 1))
    for net, fraction in ((make_network(), 1.0), (own_norms, 0.0), (without_statistics, 1.0)):
        model = ctta.CoTTA.segmentation(net)
        assert model.batch_stats == fraction and f"batch_stats={fraction}" in repr(model)
        assert model.view_weights == "confidence" and "view_weights='confidence'" in repr(model)
        assert model(make_scenes((33, 57))[0]).shape == (1, 5, 33, 57)
    assert ctta.CoTTA.segmentation(own_norms, batch_stats=0.5).batch_stats == 0.5
    assert repr(ctta.adapt(own_norms, "cotta_segmentation")) == repr(ctta.CoTTA.segmentation(own_norms))

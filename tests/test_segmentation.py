"""Pixels: plain fully convolutional networks and dict outputs, single scenes, odd sizes, views one at a time."""

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
    "cotta, the paper": lambda net: ctta.CoTTA.official_segmentation(net, loss="cross_entropy", predict_with="teacher"),
}


class Packed(nn.Module):
    """A fully convolutional network, its answer packed as other libraries do."""

    def __init__(self, net: nn.Module, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.pack = net, pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.net(x))


def network() -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS["segmentation"]().eval()


def scenes(size: tuple[int, int]) -> list[Tensor]:
    return [torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(number)) for number in range(3)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_single_scenes_of_any_size_from_any_kind_of_output(name: str, size: tuple[int, int]) -> None:
    answers = []
    for pack in (
        lambda logits: logits,
        lambda logits: {"out": logits, "aux": logits[:, :1]},
        lambda logits: SimpleNamespace(logits=logits),
    ):
        model = METHODS[name](Packed(network(), pack))
        answers.append([model(x) for x in scenes(size)])
    for plain, *others in zip(*answers, strict=True):
        assert plain.shape == (1, 5, *size) and plain.isfinite().all()
        for other in others:
            assert torch.equal(plain, other)


@pytest.mark.parametrize("name", ["pseudo_label", "tent", "cotta"])
def test_scenes_are_learnt_from(name: str) -> None:
    model, x = METHODS[name](network()), scenes((33, 57))[0]
    logits = model(x)
    assert model.last_step is not None and not model.last_step.skipped
    assert not torch.equal(model(x), logits)


def test_pixels_are_gated_one_by_one() -> None:
    """Where the source is sure the answer is the teacher's, elsewhere the mean over views."""
    net, x = network(), scenes((33, 57))[0]
    direct = ctta.Source(net)(x)
    certainty = ctta.functional.confidence(direct)
    threshold = float(certainty.median())
    answer = ctta.CoTTA.official_segmentation(net, threshold=threshold).predict(x)
    same = (answer == direct).all(1)
    assert torch.equal(same, certainty >= threshold) and 0.4 < same.float().mean() < 0.6


def test_views_go_through_the_teacher_one_at_a_time() -> None:
    model, seen = ctta.CoTTA.official_segmentation(network()), []
    model.teacher.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    model(scenes((33, 57))[0])
    sides = [(16, 28), (25, 43), (33, 57), (41, 71), (50, 86), (58, 100), (66, 114)]
    assert seen[-14:] == [(1, 3, *side) for side in sides for _flip in range(2)]

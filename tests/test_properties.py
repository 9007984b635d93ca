"""Properties that hold for any value, found by trying many."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ctta
from ctta.functional import bernoulli_positions, confidence, ema_update_, entropy, stochastic_restore_

FRACTIONS = st.floats(0, 1)
SEEDS = st.integers(0, 2**32)


def two_networks(seed: int, scale: float = 1.0) -> tuple[nn.Module, nn.Module]:
    generator = torch.Generator().manual_seed(seed)
    pair = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5)), nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    with torch.no_grad():
        for net in pair:
            for parameter in net.parameters():
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return pair


def values(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


@given(SEEDS)
def test_restoring_nothing_is_the_identity(seed: int) -> None:
    student, source = two_networks(seed)
    before = values(student)
    stochastic_restore_(student, source, 0.0, torch.Generator().manual_seed(seed))
    assert torch.equal(values(student), before)


@given(SEEDS)
def test_restoring_everything_is_the_source_exactly(seed: int) -> None:
    student, source = two_networks(seed)
    stochastic_restore_(student, source, 1.0, torch.Generator().manual_seed(seed))
    assert torch.equal(values(student), values(source))


@given(SEEDS, FRACTIONS)
def test_every_restored_weight_is_the_sources_and_every_other_stays(seed: int, probability: float) -> None:
    student, source = two_networks(seed)
    before = values(student)
    stochastic_restore_(student, source, probability, torch.Generator().manual_seed(seed))
    after = values(student)
    assert ((after == before) | (after == values(source))).all()


def test_frozen_parameters_are_not_restored_and_any_layout_is() -> None:
    student = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)).to(memory_format=torch.channels_last)
    source = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1))
    student[1].requires_grad_(False)
    kept = student[1].weight.clone()
    stochastic_restore_(student, source, 1.0, torch.Generator())
    assert torch.equal(student[0].weight, source[0].weight)
    assert torch.equal(student[1].weight, kept)


def test_scalar_parameters_are_restored() -> None:
    student, source = nn.ParameterList([torch.tensor(1.0)]), nn.ParameterList([torch.tensor(2.0)])
    stochastic_restore_(student, source, 1.0, torch.Generator())
    assert student[0] == 2


@given(st.integers(0, 500), FRACTIONS, SEEDS)
def test_positions_are_ascending_and_inside(count: int, probability: float, seed: int) -> None:
    positions = bernoulli_positions(count, probability, torch.Generator().manual_seed(seed))
    assert (positions.diff() > 0).all()
    assert len(positions) == 0 or (positions[0] >= 0 and positions[-1] < count)


@pytest.mark.parametrize("probability", [0.001, 0.01, 0.3, 0.97])
def test_each_position_is_chosen_with_the_probability_and_independently(probability: float) -> None:
    count, draws, generator = 50, 20_000, torch.Generator().manual_seed(0)
    hits = torch.zeros(draws, count)
    for row in hits:
        row[bernoulli_positions(count, probability, generator)] = 1
    spread = math.sqrt(probability * (1 - probability) / draws)
    assert (hits.mean(0) - probability).abs().max() < 4.5 * spread
    together = (hits[:, :-1] * hits[:, 1:]).mean(0)
    assert (together - probability**2).abs().max() < 5 * math.sqrt(probability**2 / draws) + 5 / draws
    total = hits.sum(1).var() / (count * probability * (1 - probability))
    assert 0.95 < total < 1.05


@given(SEEDS, FRACTIONS, st.floats(1e-6, 1e6))
def test_the_moving_average_lies_between_teacher_and_student(seed: int, decay: float, scale: float) -> None:
    teacher, student = two_networks(seed, scale)
    before, target = values(teacher), values(student)
    ema_update_(teacher, student, decay)
    after = values(teacher)
    assert (torch.minimum(before, target) <= after).all()
    assert (after <= torch.maximum(before, target)).all()


@given(SEEDS)
def test_the_ends_of_the_moving_average_are_exact(seed: int) -> None:
    teacher, student = two_networks(seed)
    before = values(teacher)
    ema_update_(teacher, student, 1.0)
    assert torch.equal(values(teacher), before)
    ema_update_(teacher, student, 0.0)
    assert torch.equal(values(teacher), values(student))


@given(SEEDS, st.floats(1e-3, 1e3))
def test_confidence_and_entropy_stay_in_their_ranges(seed: int, scale: float) -> None:
    logits = scale * torch.randn(4, 7, generator=torch.Generator().manual_seed(seed))
    assert (confidence(logits) <= 1 + 1e-5).all()
    assert (confidence(logits) >= 1 / 7 - 1e-5).all()
    assert (entropy(logits) >= -1e-5).all()
    assert (entropy(logits) <= math.log(7) + 1e-4).all()


class Counted(nn.Module):
    """A classifier that notes its calls; copies of it note them in the same list."""

    calls: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls.append("forward")
        return self.layer(x.flatten(1))


@settings(max_examples=30)
@given(SEEDS, st.sampled_from(["batch", "element"]), st.sampled_from(["refined", "teacher"]))
def test_a_confident_batch_computes_no_view(seed: int, gate: str, predict_with: str) -> None:
    def forbidden(model, x):
        raise AssertionError("a view was computed")

    Counted.calls = []
    x = torch.rand(4, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
    model = ctta.CoTTA(Counted(), views=(forbidden,), threshold=1e-6, gate=gate, predict_with=predict_with)
    model(x)
    assert len(Counted.calls) == 3, "source, teacher and student, once each"
    model.threshold = 0.0
    Counted.calls.clear()
    model(x)
    assert len(Counted.calls) == 2, "a gate that never opens needs no source"


@pytest.mark.parametrize(
    ("settings_", "forwards"),
    [
        ({"threshold": 0.999999}, 1 + 2 + 1),  # source, views, student: the direct teacher is not used
        ({"threshold": 2.0}, 2 + 1),  # the gate is always open: no source
        ({"threshold": 2.0, "predict_with": "teacher"}, 1 + 2 + 1),
        ({"threshold": 0.999999, "predict_with": "teacher"}, 1 + 1 + 2 + 1),
        ({"views": (), "threshold": 0.5}, 1 + 1),  # teacher and student
    ],
)
def test_no_forward_whose_result_is_not_used(settings_: dict, forwards: int) -> None:
    views = (lambda model, x: model(x), lambda model, x: model(x.flip(-1)))
    Counted.calls = []
    ctta.CoTTA(Counted(), **{"views": views} | settings_)(torch.rand(4, 3, 2, 2))
    assert len(Counted.calls) == forwards


def test_without_batch_statistics_only_unsure_samples_are_viewed() -> None:
    seen = []

    def view(model, x):
        seen.append(x)
        return model(x)

    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), torch.rand(6, 3, 2, 2)
    certainty = confidence(net(x)).detach()
    model = ctta.CoTTA(net, views=(view,), gate="element", threshold=float(certainty.median()) + 1e-6)
    unsure = certainty < model.threshold
    assert 0 < unsure.sum() < 6
    model(x)
    assert torch.equal(seen[0], x[unsure])
    assert float(model.last_step.augmented) == pytest.approx(float(unsure.float().mean()))


def test_restoring_a_network_with_nothing_trainable_is_the_identity() -> None:
    student, source = two_networks(0)
    before = values(student)
    stochastic_restore_(student.requires_grad_(False), source, 1.0, torch.Generator())
    assert torch.equal(values(student), before)

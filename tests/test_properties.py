"""Properties of the equations that hold for all values."""

import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ctta
from ctta.functional import bernoulli_positions, confidence, ema_update_, entropy, stochastic_restore_
from ctta.views.average import Model

FRACTIONS = st.floats(0, 1)
SEEDS = st.integers(0, 2**32)


def make_two_networks(seed: int, scale: float = 1.0) -> tuple[nn.Module, nn.Module]:
    generator = torch.Generator().manual_seed(seed)
    pair = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5)), nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    with torch.no_grad():
        for net in pair:
            for parameter in net.parameters():
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return pair


def values(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


@given(SEEDS)
def test_restoring_nothing_is_the_identity(seed: int) -> None:
    student, source = make_two_networks(seed)
    before = values(student)
    stochastic_restore_(student, source, 0.0, torch.Generator().manual_seed(seed))
    assert torch.equal(values(student), before)


@given(SEEDS)
def test_restoring_everything_gives_the_source_exactly(seed: int) -> None:
    student, source = make_two_networks(seed)
    stochastic_restore_(student, source, 1.0, torch.Generator().manual_seed(seed))
    assert torch.equal(values(student), values(source))


@given(SEEDS, FRACTIONS)
def test_every_weight_is_the_sources_or_unchanged(seed: int, probability: float) -> None:
    student, source = make_two_networks(seed)
    before = values(student)
    stochastic_restore_(student, source, probability, torch.Generator().manual_seed(seed))
    after = values(student)
    assert ((after == before) | (after == values(source))).all()


def test_frozen_parameters_are_not_restored_and_any_memory_format_is() -> None:
    student, source = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)) for _ in range(2))
    trained, frozen = student.get_parameter("0.weight"), student.get_parameter("1.weight")
    trained.data = trained.data.to(memory_format=torch.channels_last)
    frozen.requires_grad_(False)
    kept = frozen.clone()
    stochastic_restore_(student, source, 1.0, torch.Generator())
    assert torch.equal(trained, source.get_parameter("0.weight"))
    assert torch.equal(frozen, kept)


@pytest.mark.parametrize("probability", [0.001, 0.3])
@pytest.mark.parametrize(
    "formats",
    [(torch.channels_last, torch.channels_last), (torch.channels_last, None), (None, torch.channels_last)],
)
def test_the_same_weights_are_restored_in_any_memory_format(formats: Any, probability: float) -> None:
    """Also where most parameters have none to restore."""

    def restore(*formats: Any) -> Tensor:
        student, source = (nn.Sequential(nn.Conv2d(5, 7, 3), nn.Conv2d(7, 2, 1)) for _ in range(2))
        for number, (net, layout) in enumerate(zip((student, source), formats, strict=True)):
            for parameter in net.parameters():
                values = number * 1000.0 + torch.arange(parameter.numel()).view(parameter.shape)
                has_layout = layout is not None and values.ndim == 4
                parameter.data = values.to(memory_format=layout) if has_layout else values
        stochastic_restore_(student, source, probability, torch.Generator().manual_seed(1))
        return torch.cat([parameter.detach().reshape(-1) for parameter in student.parameters()])

    found = restore(*formats)
    assert torch.equal(found, restore(None, None)) and bool((found >= 1000).any())


def test_scalar_parameters_are_restored() -> None:
    student, source = nn.ParameterList([torch.tensor(1.0)]), nn.ParameterList([torch.tensor(2.0)])
    stochastic_restore_(student, source, 1.0, torch.Generator())
    assert student[0] == 2


@given(st.integers(0, 500), FRACTIONS, SEEDS)
def test_positions_are_ascending_and_in_range(count: int, probability: float, seed: int) -> None:
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
    teacher, student = make_two_networks(seed, scale)
    before, target = values(teacher), values(student)
    ema_update_(teacher, student, decay)
    after = values(teacher)
    assert (torch.minimum(before, target) <= after).all()
    assert (after <= torch.maximum(before, target)).all()


@given(SEEDS)
def test_the_moving_average_is_exact_for_decay_0_and_1(seed: int) -> None:
    teacher, student = make_two_networks(seed)
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


class CountedNet(nn.Module):
    """A classifier that counts its forward passes; all copies share one count."""

    num_calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        CountedNet.num_calls += 1
        logits: Tensor = self.layer(x.flatten(1))
        return logits


@settings(max_examples=30)
@given(SEEDS, st.sampled_from(["batch", "element"]), st.sampled_from(["refined", "teacher"]))
def test_a_confident_batch_computes_no_view(
    seed: int, gate: Literal["batch", "element"], predict_with: Literal["refined", "teacher"]
) -> None:
    def forbidden(model: Model, x: Tensor) -> Tensor:
        raise AssertionError("a view was computed")

    CountedNet.num_calls = 0
    x = torch.rand(4, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
    model = ctta.CoTTA(CountedNet(), views=(forbidden,), threshold=1e-6, gate=gate, predict_with=predict_with)
    model(x)
    assert CountedNet.num_calls == 3, "source, teacher and student, once each"
    model.threshold = 0.0
    CountedNet.num_calls = 0
    model(x)
    assert CountedNet.num_calls == 2, "a gate that never opens needs no source"


@pytest.mark.parametrize(
    ("changes", "num_calls"),
    [
        ({"threshold": 0.999999}, 1 + 2 + 1),  # source, views, student: the direct teacher is not used
        ({"threshold": 2.0}, 2 + 1),  # the gate is always open: no source
        ({"threshold": 2.0, "predict_with": "teacher"}, 1 + 2 + 1),
        ({"threshold": 0.999999, "predict_with": "teacher"}, 1 + 1 + 2 + 1),
        ({"views": (), "threshold": 0.5}, 1 + 1),  # teacher and student
    ],
)
def test_no_forward_pass_is_wasted(changes: dict[str, Any], num_calls: int) -> None:
    views = (lambda model, x: model(x), lambda model, x: model(x.flip(-1)))
    CountedNet.num_calls = 0
    ctta.CoTTA(CountedNet(), **{"views": views} | changes)(torch.rand(4, 3, 2, 2))
    assert CountedNet.num_calls == num_calls


def test_without_batch_statistics_only_uncertain_images_are_augmented() -> None:
    seen: list[Tensor] = []

    def view(model: Model, x: Tensor) -> Tensor:
        seen.append(x)
        return model(x)

    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), torch.rand(6, 3, 2, 2)
    confidences = confidence(net(x)).detach()
    model = ctta.CoTTA(net, views=(view,), gate="element", threshold=float(confidences.median()) + 1e-6)
    is_uncertain = confidences < model.threshold
    assert 0 < is_uncertain.sum() < 6
    model(x)
    assert torch.equal(seen[0], x[is_uncertain])
    assert model.last_step is not None and model.last_step.augmented is not None
    assert float(model.last_step.augmented) == pytest.approx(float(is_uncertain.float().mean()))


def test_restoring_a_frozen_network_is_the_identity() -> None:
    student, source = make_two_networks(0)
    before = values(student)
    stochastic_restore_(student.requires_grad_(False), source, 1.0, torch.Generator())
    assert torch.equal(values(student), before)

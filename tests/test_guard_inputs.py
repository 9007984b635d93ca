"""Input validation of a guard: declared, learned, and the rows that the source predicts instead."""

from typing import Any

import pytest
import torch
from guarded_streams import (
    NUM_CLASSES,
    are_equal,
    event_kinds,
    make_batch,
    make_batches,
    make_tent,
    student_weights,
    trained_network,
)
from torch import Tensor, nn

import ctta
from ctta.errors import ConfigError, InputError
from ctta.guard import Guarded, InputSpec


@pytest.fixture
def source() -> nn.Module:
    return trained_network()


@pytest.mark.parametrize(
    ("declared", "bad", "message"),
    [
        ({"shape": (3, 8, 8)}, torch.rand(4, 3, 9, 9), "inputs of 3x8x8, got 3x9x9"),
        ({"shape": (3, None, None)}, torch.rand(4, 1, 8, 8), "inputs of 3xanyxany, got 1x8x8"),
        ({"dtype": "float32"}, torch.rand(4, 3, 8, 8).double(), "takes float32, got float64"),
        ({"high": 1}, torch.rand(4, 3, 8, 8) * 255, "4 of 4 inputs"),
        ({"low": 0}, torch.rand(4, 3, 8, 8) - 2, "outside \\[0, inf\\]"),
        ({"learn": False}, torch.full((4, 3, 8, 8), torch.nan), "NaN"),
    ],
)
def test_declared_properties_are_checked_from_the_first_batch_on(
    source: nn.Module, declared: dict[str, Any], bad: Tensor, message: str
) -> None:
    model = Guarded(make_tent(source), input_spec=InputSpec(**declared))
    before = student_weights(model.wrapped)
    for call in (model, model.predict):
        with pytest.raises((InputError, TypeError), match=message):
            call(bad)
    assert event_kinds(model) == ["refusal", "refusal"] and model.num_steps == 0
    assert are_equal(student_weights(model.wrapped), before)


@pytest.mark.parametrize(
    "bad",
    [torch.rand(4, 3, 9, 9), torch.rand(4, 1, 8, 8), torch.rand(4, 3, 8, 8).double(), torch.rand(4, 3, 8, 8) * 255],
)
def test_other_properties_are_learned_from_the_first_batch(source: nn.Module, bad: Tensor) -> None:
    model = Guarded(make_tent(source))
    model(make_batch())
    with pytest.raises((InputError, TypeError)):
        model(bad)
    free = Guarded(ctta.BNStats(source), input_spec=InputSpec(learn=False))
    free(make_batch())
    free(torch.rand(4, 3, 9, 9) * 255)


def test_any_size_learns_the_channels_only(source: nn.Module) -> None:
    model = Guarded(make_tent(source), input_spec=InputSpec(any_size=True))
    model(make_batch())
    assert model(torch.rand(4, 3, 12, 10)).shape == (4, NUM_CLASSES)
    with pytest.raises(InputError):
        model(torch.rand(4, 4, 8, 8))


def test_the_learned_range_of_normalized_inputs_is_extended(source: nn.Module) -> None:
    model = Guarded(make_tent(source))
    model(torch.randn(64, 3, 8, 8))
    model(1.5 * torch.randn(64, 3, 8, 8))
    with pytest.raises(InputError):
        model(50 * torch.randn(64, 3, 8, 8))


@pytest.mark.parametrize("wrong", [{"dtype": "int8"}, {"shape": ()}, {"low": 1, "high": 0}])
def test_contradictory_specs_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        InputSpec(**wrong)


def test_bad_rows_are_predicted_by_the_source_and_leave_no_trace(source: nn.Module) -> None:
    """The others are predicted and adapted to exactly as if they had come alone."""
    spoiled, clean = (Guarded(make_tent(source, 1e-2), bad_rows="source") for _ in range(2))
    for number, x in enumerate(make_batches(6)):
        mixed = x.clone()
        mixed[3], mixed[7, 0, 0, 0] = torch.nan, 300.0  # 300 is out of the range learned from the first batch
        good = torch.ones(len(x), dtype=torch.bool)
        good[[3, 7] if number else [3]] = False
        if number == 0:
            mixed[7] = x[7]
        predicted = spoiled.predict(mixed)
        logits = spoiled(mixed)
        assert torch.equal(logits.nan_to_num(), predicted.nan_to_num())
        assert torch.equal(logits[good], clean(x[good]))
        assert torch.equal(logits[~good].nan_to_num(), source(mixed)[~good].nan_to_num()), "with running statistics"
    assert are_equal(student_weights(spoiled.wrapped), student_weights(clean.wrapped))
    assert event_kinds(spoiled) == ["bad_rows"] * 6


def test_a_batch_of_bad_rows_only_is_predicted_and_not_adapted_to(source: nn.Module) -> None:
    model = Guarded(make_tent(source), bad_rows="source", input_spec=InputSpec(high=1))
    before = student_weights(model.wrapped)
    x = make_batch() + 5
    assert torch.equal(model(x), source(x))
    assert are_equal(student_weights(model.wrapped), before)
    assert model.num_steps == 1 and model.wrapped.num_steps == 0
    assert model.last_step is None


def test_an_empty_batch_and_a_single_image(source: nn.Module) -> None:
    model = Guarded(make_tent(source))
    empty = torch.empty(0, 3, 8, 8)
    assert model(empty) is empty and model.num_steps == 0
    assert model(make_batch()[:1]).shape == (1, NUM_CLASSES)
    assert model.health.confidence is not None and model.health.class_sorting is None

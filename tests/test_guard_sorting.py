"""Batches of few classes: noticed by the source's answers, the first one too, and answered by the source."""

import pytest
import torch
from guarded_streams import (
    NUM_CLASSES,
    are_equal,
    event_kinds,
    make_batches,
    make_images,
    make_tent,
    student_weights,
    trained_network,
)
from torch import Tensor

from ctta.guard import CollapseThresholds, Guarded
from ctta.guard.detector import MAX_CHANCE, CollapseDetector
from ctta.guard.diagnostics import source_as_trained
from ctta.guard.summary import PredictionSummary, summarize

LOW, HIGH = 3.0, 9.0  # logits of the predicted class


def summarize_classes(classes: Tensor, num_classes: int, logit: float) -> PredictionSummary:
    return summarize(logit * torch.nn.functional.one_hot(classes, num_classes).float())


def draw_classes(num_batches: int, size: int, num_classes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(num_classes, (size,), generator=generator) for _ in range(num_batches)]


@pytest.mark.parametrize("num_classes", [2, 3, 10, 100, 1000])
@pytest.mark.parametrize("size", [8, 16, 50, 200])
def test_chance_raises_no_alarm_for_any_number_of_classes(num_classes: int, size: int) -> None:
    """Also where the source is far more confident than the anchor."""
    detector = CollapseDetector(CollapseThresholds())
    scores = []
    for classes in draw_classes(300, size, num_classes):
        source, anchor = (summarize_classes(classes, num_classes, logit) for logit in (HIGH, LOW))
        scores.append(detector.judge_batch(source, anchor))
    assert sum(score >= 1 for score in scores) <= 1, "of 300, each with a probability of at most 1/1000"


@pytest.mark.parametrize("num_classes", [2, 3, 10, 100, 1000])
@pytest.mark.parametrize("size", [16, 50, 200])
def test_a_batch_of_one_class_raises_the_alarm_at_once(num_classes: int, size: int) -> None:
    detector = CollapseDetector(CollapseThresholds())
    classes = torch.ones(size, dtype=torch.long)
    spread = draw_classes(1, size, num_classes)[0]
    source, anchor = summarize_classes(classes, num_classes, HIGH), summarize_classes(spread, num_classes, LOW)
    assert detector.judge_batch(source, anchor) >= 1
    assert detector.judge_batch(anchor, source) == 0, "a confident anchor is right"


def test_two_classes_and_few_images_may_be_chance() -> None:
    detector = CollapseDetector(CollapseThresholds())
    excess, chance = detector.measure_concentration(summarize_classes(torch.zeros(8, dtype=torch.long), 2, 50.0))
    assert excess == pytest.approx(1) and chance > MAX_CHANCE


def test_a_domain_in_which_the_source_sees_few_classes_becomes_usual() -> None:
    """Where the anchor was as confident, the source's mistakes are the explanation, and not the order of the images."""
    detector, skewed = CollapseDetector(CollapseThresholds()), torch.arange(40) % 3
    source, anchor = (summarize_classes(skewed, 10, logit) for logit in (LOW, LOW))
    assert detector.measure_concentration(source)[0] > detector.thresholds.few_classes
    detector.remember_(detector.judge(anchor, anchor, source))
    assert detector.measure_concentration(source)[0] < detector.thresholds.few_classes


def test_the_first_batch_of_one_class_is_answered_by_the_source() -> None:
    source = trained_network()
    model = Guarded(make_tent(source))
    before = student_weights(model.wrapped)
    for number in range(NUM_CLASSES):
        x, y = make_images(32, number, classes=[number])
        predicted = model.predict(x)
        logits = model(x)
        assert torch.equal(logits, predicted) and torch.equal(logits, source_as_trained(model.source)(x))
        assert (logits.argmax(1) == y).float().mean() > 0.9
        assert model.health.answered_by_source and not model.health.adapted and model.collapse_score >= 1
    assert are_equal(student_weights(model.wrapped), before)
    assert set(event_kinds(model)) == {"sorted_stream"}


def test_a_batch_of_one_class_between_inspections_is_noticed() -> None:
    model = Guarded(make_tent(trained_network()))
    for x in make_batches(20):
        model(x)
    while model.schedule.should_inspect(0):
        model(make_batches(1)[0])
    before = student_weights(model.wrapped)
    model(make_images(48, 0, classes=[2])[0])
    assert model.health.answered_by_source and are_equal(student_weights(model.wrapped), before)
    assert event_kinds(model) == ["sorted_stream"] and model.events[0].cause == "the batch has few classes"
    model(make_batches(1)[0])
    assert model.health.adapted, "the next batch is adapted to"


def test_the_source_is_asked_between_inspections_only_if_the_method_is_unsure(monkeypatch: pytest.MonkeyPatch) -> None:
    """About a part of the batch; and if the method is suddenly sure, the next batch is inspected."""
    model, x = Guarded(make_tent(trained_network())), make_batches(1)[0]
    while model.schedule.should_inspect(0):
        model(x)
    sizes: list[int] = []
    source_as_trained(model.source).register_forward_hook(lambda _net, inputs, _logits: sizes.append(len(inputs[0])))
    model(x)
    assert not sizes and 0 < model.detector.usual_confidence <= 1
    model.detector.usual_confidence.fill_(2.0)
    model(x)
    assert sizes == [len(x) // 2] and not model.schedule.should_inspect(0)
    model.detector.usual_confidence.fill_(0.3)
    model(x)
    assert model.schedule.should_inspect(0) and len(sizes) == 1


def test_without_a_remedy_few_classes_are_only_reported() -> None:
    model, bare = Guarded(make_tent(trained_network()), on_collapse=None), make_tent(trained_network())
    for number in range(3):
        x, _ = make_images(32, number, classes=[number])
        assert torch.equal(model(x), bare(x))
    assert event_kinds(model) == ["sorted_stream"] and model.health.adapted


@pytest.mark.parametrize("size", [16, 32, 100])
def test_a_shuffled_stream_is_left_alone(size: int) -> None:
    model, bare = Guarded(make_tent(trained_network())), make_tent(trained_network())
    for number in range(20):
        x, _ = make_images(size, number)
        assert torch.equal(model(x), bare(x))
    assert not model.events

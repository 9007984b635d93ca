"""Collapse detection of a guard, and its remedies."""

from itertools import pairwise

import pytest
import torch
from guarded_streams import (
    NUM_CLASSES,
    WRONG_RATE,
    are_equal,
    collapse,
    event_kinds,
    flatten,
    make_batch,
    make_batches,
    make_images,
    make_tent,
    student_weights,
    trained_network,
)
from torch import nn

import ctta
from ctta.guard import CollapseThresholds, EventKind, Guarded
from ctta.guard.detector import CollapseDetector
from ctta.guard.estimate import Weights
from ctta.guard.recovery import MIN_HEALTHY_INSPECTIONS, REMEDIES, Schedule
from ctta.guard.summary import summarize


@pytest.fixture
def source() -> nn.Module:
    return trained_network()


@pytest.mark.parametrize(("size", "num_quiet"), [(16, 7), (50, 2)])
def test_a_few_disagreements_raise_no_alarm(size: int, num_quiet: int) -> None:
    """Half of the elements differ from a confident anchor, twice the limit; a single batch needs more than that."""
    detector = CollapseDetector(CollapseThresholds(margin=0.25, class_loss=1.0))
    anchor = 20 * torch.eye(2)[torch.arange(size) % 2]
    logits = 20 * torch.eye(2)[torch.arange(size) // 2 % 2]
    scores = []
    for _ in range(num_quiet + 1):
        verdict = detector.judge(summarize(logits), summarize(anchor), None)
        detector.remember_(verdict)
        scores.append(verdict.collapse)
    score_of_one_batch = pytest.approx(1.0, abs=0.05) if size >= 32 else 0
    assert scores[:-1] == [score_of_one_batch] * num_quiet
    assert scores[-1] == pytest.approx(2.0, abs=0.1)


def test_a_wrong_learning_rate_is_detected_and_rolled_back(source: nn.Module) -> None:
    model, number = collapse(source)
    assert number <= 8 and event_kinds(model) == ["rollback"]
    assert model.health.answered_by_source and model.collapse_score >= 1
    assert are_equal(student_weights(model.wrapped), student_weights(ctta.Tent(source))), "only the source was good"
    x, y = make_images(64, 5)
    assert (model.predict(x).argmax(1) == y).float().mean() > 0.8
    num_steps = model.wrapped.num_steps
    model(x)
    assert model.wrapped.num_steps == num_steps and not model.health.adapted, "the cooldown"


def test_cooldowns_grow_with_each_relapse(source: nn.Module) -> None:
    model = Guarded(make_tent(source, WRONG_RATE), cooldown=4)
    assert model.accuracy.gain_monitor is not None
    model.accuracy.gain_monitor.weights = Weights()  # or the source would answer before the third alarm
    for x in make_batches(120):
        model(x)
    alarms = [event.step for event in model.events if event.kind == "rollback"]  # a reset is an alarm within a pause
    gaps = [later - sooner for sooner, later in pairwise(alarms)]
    assert len(alarms) >= 3 and gaps == sorted(gaps) and gaps[-1] >= 2 * gaps[0]


def test_every_remedy_can_be_chosen_and_is_a_kind_of_event() -> None:
    assert set(REMEDIES) <= {kind.value for kind in EventKind}


def test_reset_returns_to_the_source(source: nn.Module) -> None:
    model, _ = collapse(source, on_collapse="reset")
    assert event_kinds(model) == ["reset"] and model.wrapped.num_steps == 0
    assert are_equal(student_weights(model.wrapped), student_weights(ctta.Tent(source)))


def test_soft_reset_goes_nine_tenths_of_the_way(source: nn.Module) -> None:
    model, _ = collapse(source, on_collapse="soft_reset")
    assert event_kinds(model) == ["soft_reset"]
    pulled, original = student_weights(model.wrapped), student_weights(ctta.Tent(source))
    assert not are_equal(pulled, original)
    assert model.health.distance_to_source is not None
    left = flatten([ours - theirs for ours, theirs in zip(pulled, original, strict=True)]).norm()
    trained = flatten(list(model.source.get_submodule("1").parameters())).norm()
    assert float(left / trained) == pytest.approx(0.1 * model.health.distance_to_source, rel=1e-3)


def test_soft_reset_replaces_weights_that_are_not_finite(source: nn.Module) -> None:
    model = Guarded(make_tent(source), on_collapse="soft_reset")
    model(make_batch())
    with torch.no_grad():
        model.wrapped.get_parameter("student.1.weight").fill_(torch.nan)
    logits = model(make_batch())
    assert event_kinds(model)[-1] == "soft_reset" and logits.isfinite().all()
    assert all(weight.isfinite().all() for weight in student_weights(model.wrapped))


def test_logits_that_are_not_finite_are_noticed_between_inspections_too(source: nn.Module) -> None:
    model = Guarded(make_tent(source))
    for x in make_batches(20):
        model(x)
    while model.schedule.should_inspect(0):
        model(make_batch())
    with torch.no_grad():
        model.wrapped.get_parameter("student.1.weight").fill_(torch.nan)
    x = make_batch()
    predicted, logits = model.predict(x), model(x)
    assert logits.isfinite().all() and torch.equal(predicted, logits)
    assert event_kinds(model) == ["skipped", "rollback"] and "predictions are not finite" in model.events[-1].cause


def test_freeze_stops_adapting(source: nn.Module) -> None:
    model, _ = collapse(source, on_collapse="freeze")
    assert event_kinds(model) == ["freeze"] and model.frozen
    before, num_steps = student_weights(model.wrapped), model.num_steps
    model(make_batch())
    assert are_equal(student_weights(model.wrapped), before) and model.num_steps == num_steps


def test_none_only_reports_and_predicts_as_the_method_does(source: nn.Module) -> None:
    model, bare = Guarded(make_tent(source, WRONG_RATE), on_collapse=None), make_tent(source, WRONG_RATE)
    for x in make_batches(20):
        assert torch.equal(model(x), bare(x))
    assert event_kinds(model)[0] == "collapse" and not model.health.answered_by_source
    assert len(model.events) < 10, "a lasting collapse is reported once"


def test_rollback_returns_to_the_last_good_snapshot(source: nn.Module) -> None:
    model = Guarded(make_tent(source), inspect_every=1, snapshot_every=5)
    history = []
    for x in make_batches(12):
        history.append(student_weights(model.wrapped))
        model(x)
    model.rollback()
    assert event_kinds(model) == ["rollback"]
    assert any(are_equal(student_weights(model.wrapped), earlier) for earlier in history[1:]), "a healthy state"
    assert not are_equal(student_weights(model.wrapped), history[0])
    assert model.wrapped.num_steps == 12, "counters are not rolled back"


def test_a_snapshot_shares_what_is_never_trained(source: nn.Module) -> None:
    model = Guarded(make_tent(source))
    for name, is_shared in (("student.0.weight", True), ("student.1.weight", False)):
        assert (model.last_good.get_parameter(name) is model.wrapped.get_parameter(name)) == is_shared
    assert model.last_good.source is model.wrapped.source is model.source


def test_class_sorted_batches_are_predicted_by_the_source(source: nn.Module) -> None:
    model, bare = Guarded(make_tent(source)), make_tent(source)
    accuracy = {"guarded": 0.0, "bare": 0.0}
    for number in range(24):
        x, y = make_images(32, number, classes=[number // 3 % NUM_CLASSES])
        predictions = {"guarded": model(x), "bare": bare(x)}
        if number >= 12:
            for name, logits in predictions.items():
                accuracy[name] += float((logits.argmax(1) == y).float().mean()) / 12
    assert "sorted_stream" in event_kinds(model) and model.health.answered_by_source and not model.health.adapted
    assert accuracy["guarded"] > 0.9 and accuracy["bare"] < 0.7
    for x in make_batches(20):
        model(x)
    assert event_kinds(model)[-1] == "recovery" and model.health.adapted


def test_periodic_reset(source: nn.Module) -> None:
    model = Guarded(make_tent(source), reset_every=5)
    for number, x in enumerate(make_batches(11), 1):
        model(x)
        is_reset = are_equal(student_weights(model.wrapped), student_weights(ctta.Tent(source)))
        assert is_reset == (number % 5 == 0)
    assert event_kinds(model) == ["periodic_reset"] * 2


def test_a_periodic_reset_happens_also_with_a_batch_of_bad_rows_only(source: nn.Module) -> None:
    model = Guarded(make_tent(source), reset_every=3, bad_rows="source")
    for x in [*make_batches(2), torch.full((4, 3, 8, 8), torch.nan)]:
        model(x)
    assert event_kinds(model) == ["bad_rows", "periodic_reset"] and model.wrapped.num_steps == 0


def test_health_in_a_pause_does_not_count() -> None:
    """It is that of weights that do not learn, so the first batches after a pause are inspected."""
    schedule = Schedule(adapt_every=1, inspect_every=8, snapshot_every=10, cooldown=20)
    schedule.count_alarm_()
    while schedule.num_cooldown:
        schedule.count_batch_(adapted=False, score=0.0, snapshot=False)
    for _ in range(MIN_HEALTHY_INSPECTIONS):
        assert schedule.should_inspect(0)
        schedule.count_batch_(adapted=True, score=0.0, snapshot=False)
    assert not schedule.should_inspect(0)

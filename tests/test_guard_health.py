"""Health signals of a guard, its settings, shadow mode, and limits on updates."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guarded_streams import (
    are_equal,
    event_kinds,
    flatten,
    make_batch,
    make_batches,
    make_tent,
    student_weights,
    trained_network,
)
from torch import nn

import ctta
from ctta.core import transaction
from ctta.errors import ConfigError
from ctta.evaluation.steps import count_passes
from ctta.guard import CollapseThresholds, Guarded, Health, Monitored
from ctta.guard.diagnostics import source_as_trained
from ctta.views import image_views


@pytest.fixture
def source() -> nn.Module:
    return trained_network()


def test_on_a_healthy_stream_predictions_are_the_methods_own_and_nothing_happens(source: nn.Module) -> None:
    model, bare = Guarded(make_tent(source)), make_tent(source)
    for x in make_batches(40):
        assert torch.equal(model(x), bare(x))
    assert event_kinds(model) == [] and model.collapse_score < 1
    health = model.health
    assert health.adapted and not health.answered_by_source and health.skipped is False
    assert health.confidence is not None and 0.25 < health.confidence <= 1
    assert health.entropy is not None and 0 <= health.entropy < 1.4
    json.dumps(health.as_dict(), allow_nan=False)


def test_signals_have_the_documented_values(source: nn.Module) -> None:
    model = Guarded(ctta.CoTTA(source, views=()), inspect_every=1)
    for x in make_batches(3):
        logits, expected = model(x), source_as_trained(model.source)(x)
    health, mean = model.health, logits.softmax(1).mean(0)
    assert health.confidence == pytest.approx(float(logits.softmax(1).amax(1).mean()), rel=1e-5)
    assert health.mean_prediction_entropy == pytest.approx(float(-(mean * mean.log()).sum()), rel=1e-5)
    assert health.source_disagreement == pytest.approx(float((logits.argmax(1) != expected.argmax(1)).float().mean()))
    adapted, original = student_weights(model.wrapped), [parameter.detach() for parameter in model.source.parameters()]
    moved = flatten([ours - theirs for ours, theirs in zip(adapted, original, strict=True)]).norm()
    assert health.distance_to_source == pytest.approx(float(moved / flatten(original).norm()), rel=1e-4)
    assert health.update_norm is not None and health.update_norm > 0
    assert health.student_disagreement is not None


def test_a_source_pass_that_the_method_needs_too_is_not_repeated(source: nn.Module) -> None:
    """CoTTA's gate asks the source about the batch that the guard inspects; its results stay as they are alone."""
    settings: dict[str, Any] = {"views": image_views(2), "gate": "element"}
    model, bare = Guarded(ctta.CoTTA(source, **settings), inspect_every=1), ctta.CoTTA(source, **settings)
    source_as_trained(model.source)  # a copy, which is not counted
    calls: list[int] = []
    model.source.register_forward_hook(lambda *_: calls.append(1))
    for number, x in enumerate(make_batches(3), 1):
        assert torch.equal(model(x), bare(x))
        assert len(calls) == number
    model.predict(x)
    assert len(calls) == 4
    model.wrapped.predict(x)  # nothing is remembered from the guard's
    assert len(calls) == 5


def test_an_infinite_signal_is_none_in_json() -> None:
    assert Health(step=1, entropy=float("nan")).as_dict()["entropy"] is None


def test_only_guarded_models_are_monitored(source: nn.Module) -> None:
    assert isinstance(Guarded(make_tent(source)), Monitored)
    assert not isinstance(make_tent(source), Monitored)


def test_adapt_every_predicts_the_batches_between(source: nn.Module) -> None:
    model = Guarded(make_tent(source), adapt_every=3)
    adapted = []
    for x in make_batches(7):
        predicted = model.predict(x)
        assert torch.equal(model(x), predicted)
        adapted.append(model.health.adapted)
    assert adapted == [True, False, False] * 2 + [True] and model.wrapped.num_steps == 3


def test_a_batch_between_updates_costs_one_pass_and_no_copy(source: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[ctta.AdaptiveModel] = []
    model, batches = Guarded(make_tent(source), adapt_every=4), make_batches(8)

    class Recorded(transaction._SavedModel):
        def __init__(self, model: ctta.AdaptiveModel) -> None:
            saved.append(model)
            super().__init__(model)

    monkeypatch.setattr(transaction, "_SavedModel", Recorded)
    for number, x in enumerate(batches):
        saved.clear()
        with count_passes(nn.Sequential) as count:
            model(x)
        if number % 4:
            assert (count.forward, count.backward) == (len(x), 0) and saved == [model]
        else:
            assert count.backward == len(x) and saved == [model, model.wrapped]


def test_a_remedy_between_updates_that_fails_is_undone(source: nn.Module, tmp_path: Path) -> None:
    model = Guarded(make_tent(source), adapt_every=4, on_collapse="soft_reset")
    first, second = make_batches(2)
    model(first)
    with torch.no_grad():
        for parameter in model.wrapped.trained_networks[0].parameters():
            parameter.mul_(torch.nan if parameter.requires_grad else 1)
    before = student_weights(model.wrapped)
    model.audit = str(tmp_path)  # a folder, which no event can be written to
    with pytest.raises(OSError):
        model(second)
    for one, other in zip(student_weights(model.wrapped), before, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
    model.audit = None
    assert model(second).isfinite().all() and event_kinds(model) == ["soft_reset"]


def test_an_update_is_limited_before_a_teacher_averages_it(source: nn.Module) -> None:
    limit = 1e-4
    cotta = ctta.CoTTA(source, views=(), restore=0, decay=0.5)
    model = Guarded(cotta, max_update=limit, inspect_every=1)
    before = flatten(student_weights(model.wrapped))
    model(make_batch())
    after = flatten(student_weights(model.wrapped))
    assert model.health.update_norm is not None and model.health.update_norm > limit, "the norm before the limit"
    assert float((after - before).norm() / before.norm()) == pytest.approx(limit, rel=1e-3)
    teacher = flatten([parameter.detach() for parameter in cotta.teacher.parameters()])
    torch.testing.assert_close(teacher, (before + after) / 2)


def test_shadow_mode_answers_with_the_source_and_reports_what_would_differ(source: nn.Module, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    model, bare = Guarded(make_tent(source), shadow=True, audit=audit), make_tent(source)
    num_differing = total = 0
    for x in make_batches(100, size=4):
        shifted = x * 0.5 + 0.3
        expected = source_as_trained(model.source)(shifted)
        would_be = bare(shifted)
        assert torch.equal(model(shifted), expected)
        fraction = float((would_be.argmax(1) != expected.argmax(1)).float().mean())
        assert model.health.source_disagreement == pytest.approx(fraction)
        num_differing, total = num_differing + round(fraction * 4), total + 4
    assert are_equal(student_weights(model.wrapped), student_weights(bare)), "it adapts all the same"
    last = json.loads(audit.read_text().splitlines()[-1])
    assert last["kind"] == "shadow" and last["cause"] == f"{num_differing} of {total} predictions would differ"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bad_rows": "drop"}, "bad_rows"),
        ({"on_collapse": "panic"}, "on_collapse"),
        ({"adapt_every": 0}, "adapt_every"),
        ({"inspect_every": 0}, "inspect_every"),
        ({"reset_every": 0}, "reset_every"),
        ({"max_update": 0}, "max_update"),
        ({"cooldown": -1}, "cooldown"),
    ],
)
def test_wrong_settings_are_refused(source: nn.Module, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Guarded(make_tent(source), **settings)


def test_only_methods_can_be_guarded(source: nn.Module) -> None:
    wrong: list[Any] = [source, Guarded(make_tent(source)), None]
    for model in wrong:
        with pytest.raises(TypeError, match="method to guard"):
            Guarded(model)
    with pytest.raises(ConfigError):
        CollapseThresholds(margin=0)


def test_a_frozen_method_stays_frozen(source: nn.Module) -> None:
    model = Guarded(make_tent(source).freeze())
    assert model.frozen
    model(make_batch())
    assert model.num_steps == 0
    assert not model.unfreeze().frozen
    model(make_batch())
    assert model.wrapped.num_steps == 1


def test_health_for_people_is_five_lines() -> None:
    unknown = Health(step=0)
    assert str(unknown).splitlines()[0] == "healthy since step 0" and len(str(unknown).splitlines()) == 5
    assert "not known before 64 images" in str(unknown)
    known: dict[str, Any] = {
        "estimated_gain_low": 0.04,
        "estimated_gain_high": 0.2,
        "estimated_images": 256,
        "estimated_since": 8,
    }
    health = Health(
        step=20, estimated_gain=0.1, **known, confidence=0.8, source_confidence=0.7, source_disagreement=0.2
    )
    _, gain, answers, *_ = str(health).splitlines()
    assert gain.endswith("+10.0 points (+4 to +20), estimated from 256 images since step 8")
    assert answers == "confidence 0.80, as trained 0.70; 20 % of the answers to this batch differ"
    doubtful = Health(step=20, estimated_gain=0.01, **known | {"estimated_gain_low": -0.1})
    assert "cannot be told" in str(doubtful)
    answered = Health(step=30, answered_by_source=True, collapse_score=1.25, state_since=24)
    first, *_, last = str(answered).splitlines()
    assert first == "not healthy since step 24: the network as trained answers" and last.startswith(
        "collapse score 1.25"
    )
    assert "not healthy since step 24" in answered._repr_html_()


def test_health_says_since_when() -> None:
    model = Guarded(ctta.BNStats(ctta.models.embedded()))
    sample = ctta.data.datasets.sample()
    order = np.argsort(sample.labels[:320], kind="stable")
    x = torch.from_numpy(np.asarray(sample.images[:320])[order]).permute(0, 3, 1, 2).float().div(255)
    states = []
    for images in x.split(32):
        model(images)
        states.append((model.health.is_healthy, model.health.state_since))
    first = [is_healthy for is_healthy, _ in states].index(False)
    assert states[-1] == (False, first)

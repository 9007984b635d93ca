"""A few delayed labels: whether adaptation helps, by the labels of some of the last answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serving import SIZE, make_images, make_tent, serve_in_thread
from torch import nn

import ctta
from ctta.errors import ConfigError, InputError
from ctta.guard import EventKind, GainEstimate
from ctta.guard.answers import AnswerLog
from ctta.guard.estimate import GainMonitor, Weights
from ctta.guard.summary import measure_answers
from ctta.serve import Service


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()


def make_model(**settings: Any) -> ctta.Guarded:
    return ctta.Guarded(ctta.Tent(make_net(), lr=0.05), on_collapse=None, remember_answers=100, **settings)


def draw(seed: int) -> torch.Tensor:
    return torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def run(model: ctta.Guarded, num_batches: int = 4) -> tuple[list[int], list[int], list[int]]:
    """Return the ids, the answers, and those of the network without adaptation."""
    source, ids, answers, plain = ctta.Source(make_net()), [], [], []
    for number in range(num_batches):
        answers += model(draw(number)).argmax(1).tolist()
        plain += source(draw(number)).argmax(1).tolist()
        ids += list(model.last_ids or ())
    return ids, answers, plain


def test_labels_tell_gain_from_harm() -> None:
    model = make_model()
    ids, answers, plain = run(model)
    assert ids == list(range(64)) and answers != plain
    gain = model.feedback(ids, answers)  # adaptation is always right
    differing = sum(a != b for a, b in zip(answers, plain, strict=True)) / 64
    assert gain.num_labels == 64 and gain.accuracy == 1 and gain.gain == pytest.approx(differing)
    assert gain.low is not None and gain.high is not None and gain.low < differing < gain.high + 0.05
    harm = model.feedback(ids, plain)
    assert harm.gain == pytest.approx(-differing) and harm.is_harmful and "adapting: -" in str(harm)
    assert [event.kind for event in model.events] == [EventKind.HARM] and not model.frozen


def test_yes_and_no_leave_the_source_open_only_where_it_differs() -> None:
    log, twin = AnswerLog(100), AnswerLog(100)
    answers, source, labels = (torch.randint(3, (80,), generator=torch.Generator().manual_seed(s)) for s in range(3))
    for each in (log, twin):
        each.add_(answers, source)
    assert log.set_verdicts_(range(81), torch.cat([answers == labels, torch.tensor([True])])) == 1
    twin.set_labels_(range(80), labels)
    found, exact = log.summarize(), twin.summarize()
    is_open = (answers != labels) & (answers != source)
    assert found.num_open == int(is_open.sum()) > 0 and (found.num_labels, found.accuracy) == (80, exact.accuracy)
    assert (
        found.gain is found.source_accuracy is None
        and "open" in str(found)
        and log.list_estimate_errors()[0].numel() == 0
    )
    assert found.low is not None and found.high is not None and exact.low is not None and exact.high is not None
    assert found.low < exact.low < exact.high < found.high and found.evidence < exact.evidence
    log.set_labels_(is_open.nonzero().flatten(), labels[is_open])  # what was open
    assert log.summarize() == exact


def test_feedback_takes_labels_or_verdicts() -> None:
    model = make_model()
    ids, answers, _ = run(model)
    assert model.feedback(ids, right=[True] * 64) == model.feedback(ids, answers)
    with pytest.raises(InputError, match="either"):
        model.feedback(ids, answers, right=[True] * 64)
    with pytest.raises(InputError, match="either"):
        model.feedback(ids)
    with pytest.raises(InputError, match="one label per id"):
        model.feedback(ids, right=[True])


def test_harm_can_veto_adaptation() -> None:
    frozen = make_model(on_harm="freeze")
    ids, _, plain = run(frozen)
    frozen.feedback(ids, plain)
    assert frozen.frozen and frozen.events[-1].kind == EventKind.HARM
    assert frozen.accuracy.answers is not None and frozen.accuracy.answers.summarize().num_labels == 0
    reset = make_model(on_harm="reset")
    ids, _, plain = run(reset)
    reset.feedback(ids, plain)
    assert not reset.frozen and reset.wrapped.num_steps == 0


def test_labels_train_nothing() -> None:
    first, second = make_model(), make_model()
    ids, answers, _ = run(first)
    run(second)
    first.feedback(ids[:10], answers[:10])
    assert torch.equal(first(draw(9)), second(draw(9)))


def test_old_ids_are_ignored_and_mistakes_are_rejected() -> None:
    model = make_model()
    ids, answers, _ = run(model, 8)  # 128 answers, of which 100 are remembered
    assert model.feedback(ids, answers).num_labels == 100
    assert model.feedback([10_000], [1]).num_labels == 100
    with pytest.raises(InputError):
        model.feedback([1, 2], [1])
    with pytest.raises(InputError):
        model.feedback([100], [-1])
    with pytest.raises(ConfigError):
        ctta.Guarded(ctta.Tent(make_net())).feedback([0], [0])


def test_answers_are_saved_and_ids_survive_a_reset(tmp_path: Path) -> None:
    model = make_model()
    ids, answers, _ = run(model)
    model.feedback(ids[:20], answers[:20])
    ctta.save(model, tmp_path / "state.safetensors")
    loaded = ctta.load(tmp_path / "state.safetensors", make_net())
    assert isinstance(loaded, ctta.Guarded)
    assert loaded.feedback(ids[20:], answers[20:]) == model.feedback(ids[20:], answers[20:])
    loaded.reset()
    assert loaded.feedback(ids, answers).num_labels == 0
    loaded(draw(0))
    assert loaded.last_ids == range(64, 80)


def test_rows_that_the_source_answers_have_ids_too() -> None:
    model = make_model(bad_rows="source", input_spec=ctta.guard.InputSpec(low=0, high=1))
    x = draw(0)
    x[3] = float("nan")
    model(x)
    assert model.last_ids == range(16)


def test_the_interval_covers_the_truth() -> None:
    generator, hits = np.random.default_rng(0), 0
    for _ in range(400):
        log = AnswerLog(60)
        kind = generator.choice(4, 60, p=[0.6, 0.15, 0.1, 0.15])  # both right, only adapted, only source, none
        log.add_(
            torch.from_numpy(np.isin(kind, (0, 1)).astype(int)), torch.from_numpy(np.isin(kind, (0, 2)).astype(int))
        )
        log.set_labels_(range(60), [1] * 60)
        found = log.summarize()
        assert found.low is not None and found.high is not None
        hits += found.low <= 0.05 <= found.high
    assert 0.92 <= hits / 400 <= 0.98


def make_monitor(differing: int = 20) -> GainMonitor:
    """Return what is known of 200 images of which some are answered otherwise, by no sign better or worse."""
    monitor = GainMonitor(0, Weights())
    source = torch.arange(100) % 10
    adapted = source.clone()
    adapted[:differing] = (source[:differing] + 1) % 10
    for step in range(2):
        monitor.add_(measure_answers(adapted, source), torch.zeros(0), 100, step, 10)
    return monitor


def test_labels_correct_the_estimate_by_what_they_are_worth() -> None:
    monitor, log = make_monitor(100), AnswerLog(200)
    estimate = monitor.estimate_without_labels()
    assert estimate is not None and estimate.gain == 0.0 and estimate.deviation > 0.2
    # In truth adapted answers are right in four of five cases, the source's in two of five.
    log.add_(torch.tensor([1, 1, 1, 1, 0] * 40), torch.tensor([1, 1, 0, 0, 0] * 40), estimate)
    gains, deviations = [0.0], [estimate.deviation]
    for number in (5, 50, 200):
        log.set_labels_(range(number), [1] * number)
        errors, estimates = log.list_estimate_errors()
        assert float(errors.mean()) == pytest.approx(0.4) and not estimates.any()
        monitor.recalibrate_(errors, estimates)
        found = monitor.estimate()
        assert found is not None
        gains.append(found.gain)
        deviations.append(found.deviation)
    assert gains == sorted(gains) and gains[1] < 0.3 and gains[-1] == pytest.approx(0.4, abs=0.05)
    assert deviations == sorted(deviations, reverse=True) and deviations[-1] < 0.05
    assert monitor.estimate_without_labels() == estimate


def test_estimates_of_the_time_of_the_answer_are_compared() -> None:
    log = AnswerLog(10)
    log.add_(torch.tensor([1]), torch.tensor([1]))  # before there was an estimate
    log.add_(torch.tensor([1]), torch.tensor([0]), GainEstimate(0.3, 0.1))
    log.set_labels_([0], [1])
    assert not log.list_estimate_errors()[0].numel()
    log.set_labels_([1], [1])
    errors, estimates = log.list_estimate_errors()
    assert errors.tolist() == pytest.approx([0.7]) and estimates.tolist() == pytest.approx([0.3])


def test_feedback_corrects_the_estimate_of_a_guard_and_is_saved(tmp_path: Path) -> None:
    model = make_model(inspect_every=1)
    _, answers, _ = run(model, 12)
    before = model.health.estimated_gain
    assert before is not None
    model.feedback(range(100, 190), answers[100:190])  # the method is always right
    model(draw(12))
    after = model.health.estimated_gain
    assert after is not None and after > before + 0.02
    ctta.save(model, tmp_path / "state")
    copy = ctta.load(tmp_path / "state", make_net())
    copy(draw(13))
    model(draw(13))
    assert isinstance(copy, ctta.Guarded) and copy.health.estimated_gain == model.health.estimated_gain


def test_harm_by_labels_does_not_harm_the_method_that_starts_anew() -> None:
    model = make_model(inspect_every=1, on_harm="reset")
    ids, _, plain = run(model, 8)
    model.feedback(ids[-20:], plain[-20:])  # the source is right, and the method often wrong
    assert [event.kind for event in model.events] == [EventKind.HARM]
    assert model.accuracy.estimate() is None
    for seed in range(20, 25):
        model(draw(seed))
    monitor = model.accuracy.gain_monitor
    assert monitor is not None and monitor.estimate() == monitor.estimate_without_labels()


def test_answers_of_the_source_do_not_correct_the_estimate() -> None:
    model = make_model(inspect_every=1, shadow=True)
    ids, answers, _ = run(model, 8)
    model.feedback(ids[-20:], answers[-20:])
    assert model.accuracy.answers is not None and not model.accuracy.answers.list_estimate_errors()[0].numel()


def test_a_correction_ends_with_the_answers_that_it_rests_on() -> None:
    model = make_model(inspect_every=1)
    _, answers, _ = run(model, 12)
    model.feedback(range(100, 190), answers[100:190])
    monitor = model.accuracy.gain_monitor
    assert monitor is not None and float(monitor.offset) > 0.02
    for seed in range(12, 20):  # as many answers as are remembered
        model(draw(seed))
    assert float(monitor.offset) == 0 and float(monitor.width_factor) == 1


def test_labels_count_in_domains_like_theirs_only() -> None:
    log, monitors = AnswerLog(200), [make_monitor(100), make_monitor(100)]
    monitors[1].weights = Weights(constant=-2.0)  # another domain, of which the estimate is far below
    here, elsewhere = (monitor.estimate_without_labels() for monitor in monitors)
    assert here is not None and elsewhere is not None and elsewhere.gain < -0.9
    log.add_(torch.ones(100), torch.zeros(100), here)
    log.set_labels_(range(100), [1] * 100)  # the method is always right, the source never
    for monitor in monitors:
        monitor.recalibrate_(*log.list_estimate_errors())
    same, other = (monitor.estimate() for monitor in monitors)
    assert same is not None and same.gain == pytest.approx(1, abs=0.05) and same.deviation < 0.05
    assert other is not None and other.gain == pytest.approx(elsewhere.gain, abs=0.05)


def test_a_remedy_forgets_labels() -> None:
    model = make_model(reset_every=6)
    ids, answers, _ = run(model, 5)
    assert model.feedback(ids, answers).num_labels == 80
    model(draw(6))
    assert model.feedback([], []).num_labels == 0


def test_answers_move_to_a_log_of_another_size() -> None:
    log = AnswerLog(7)
    log.add_(torch.arange(10), torch.arange(10) + 1)
    log.set_labels_([9], [9])
    for size in (3, 7, 20):
        other = AnswerLog(size)
        other.take_over_(log.state_dict())
        ids = torch.arange(10 - min(size, 7), 10)
        assert other.num_answered == 10 and torch.equal(other.classes[ids % size], ids)
        assert other.summarize() == log.summarize() and other.set_labels_([1], [1]) == 1
    with pytest.raises(ValueError, match="labels has the shape"):
        AnswerLog(7).take_over_(log.state_dict() | {"labels": torch.zeros(2)})


def test_the_service_takes_labels_after_a_restart(tmp_path: Path) -> None:
    def make_service() -> Service:
        return Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=0, num_answers=50)

    with serve_in_thread(make_service()) as client:
        labels = client.infer("camera", make_images(8, 0))["label"].tolist()
        client.json("POST", "/streams/camera/feedback", json={"ids": [0, 1], "labels": labels[:2]})
    with serve_in_thread(make_service()) as client:
        body = {"ids": [2, 3, 8], "labels": [*labels[2:4], 0]}
        found = client.json("POST", "/streams/camera/feedback", json=body)
        assert (found["num_labels"], found["accuracy"], found["unknown"]) == (4, 1.0, 1)
        assert client.infer("camera", make_images(8, 1))["first_id"] == 8


def test_the_service_takes_labels(tmp_path: Path) -> None:
    service = Service(
        make_tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=0, num_answers=50, on_harm="freeze"
    )
    source = ctta.Source(make_tent(tmp_path).source)
    with serve_in_thread(service) as client:
        answers, plain = [], []
        for step in range(3):
            x = make_images(8, step)
            answer = client.infer("camera", x)
            assert answer["first_id"] == 8 * step
            answers += answer["label"].tolist()
            plain += source.predict(x).argmax(1).tolist()
        body = {"ids": list(range(24)), "labels": answers}
        found = client.json("POST", "/streams/camera/feedback", json=body)
        assert (found["num_labels"], found["accuracy"], found["unknown"]) == (24, 1.0, 0)
        expected = 1 - sum(a != b for a, b in zip(answers, plain, strict=True)) / 24
        assert found["source_accuracy"] == pytest.approx(expected)
        assert client.json("GET", "/streams/camera")["feedback"]["num_labels"] == 24
        assert client.json("POST", "/streams/camera/feedback", json={"ids": [99], "labels": [0]})["unknown"] == 1
        verdicts = [answer == label for answer, label in zip(answers, plain, strict=True)]
        found = client.json("POST", "/streams/camera/feedback", json={"ids": body["ids"], "right": verdicts})
        assert found["num_open"] == verdicts.count(False) and found["accuracy"] == pytest.approx(expected)
        for wrong in (
            {"ids": [0]},
            {"ids": [0], "labels": [0], "right": [True]},
            {"ids": [0], "right": [1]},
            {"ids": [0], "labels": []},
            {"ids": [0], "labels": [77]},
            {"ids": [0], "labels": ["cat"]},
        ):
            assert client.call("POST", "/streams/camera/feedback", json=wrong).status_code == 400
        assert client.call("POST", "/streams/nobody/feedback", json=body).status_code == 404
        assert "ctta_harmed_streams 0.0" in client.call("GET", "/metrics").text


def test_the_service_freezes_a_stream_that_labels_show_to_be_harmed(tmp_path: Path) -> None:
    service = Service(
        make_tent(tmp_path, lr=0.3),
        tmp_path / "state",
        image_size=SIZE,
        window_size=0,
        num_answers=80,
        on_harm="freeze",
    )
    source = ctta.Source(make_tent(tmp_path).source)
    with serve_in_thread(service) as client:
        for step in range(10):
            client.infer("camera", make_images(8, step))
        plain = [int(each) for step in range(10) for each in source.predict(make_images(8, step)).argmax(1)]
        found = client.json("POST", "/streams/camera/feedback", json={"ids": list(range(80)), "labels": plain})
        assert found["high"] < 0
        summary = client.json("GET", "/streams/camera")
        assert summary["frozen"] and [event["kind"] for event in summary["events"]][-2:] == ["harm", "freeze"]


def test_a_service_without_memory_says_how_to_get_one(tmp_path: Path) -> None:
    with serve_in_thread(Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=0)) as client:
        answer = client.infer("camera", make_images(4, 0))
        assert "first_id" not in answer
        response = client.call("POST", "/streams/camera/feedback", json={"ids": [0], "labels": [0]})
        assert response.status_code == 409 and "--feedback" in response.json()["error"]

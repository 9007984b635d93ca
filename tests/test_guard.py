"""What the guards do: who is let in, what is noticed, what is done about it, and what is written down."""

import copy
import json
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import ctta
from ctta.guard import CollapseThresholds, Guarded, InputSpec
from ctta.guard.detector import CollapseDetector
from ctta.guard.diagnostics import source_as_trained
from ctta.guard.health import summarize

CLASSES = 4
WRONG_RATE = 30.0


def net() -> nn.Module:
    """A small network that knows four colours, so that its answers mean something."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for number in range(60):
        x, y = coloured(64, number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def coloured(count: int, seed: int, classes: list[int] | None = None, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """Noisy pictures of one of four colours."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=generator)
    if classes is not None:
        y = torch.tensor(classes)[y % len(classes)]
    colours = torch.tensor([[0.8, 0.2, 0.2], [0.2, 0.8, 0.2], [0.2, 0.2, 0.8], [0.7, 0.7, 0.2]])
    return (colours[y][:, :, None, None] + noise * torch.randn(count, 3, 8, 8, generator=generator)).clamp(0, 1), y


def batches(count: int, size: int = 32) -> list[Tensor]:
    return [coloured(size, 1000 + number)[0] for number in range(count)]


@pytest.fixture(scope="module")
def source() -> nn.Module:
    return net()


def tent(source: nn.Module, lr: float = 1e-3) -> ctta.Tent:
    return ctta.Tent(source, optimizer=partial(torch.optim.Adam, lr=lr))


def kinds(model: Guarded) -> list[str]:
    return [event.kind for event in model.events]


def weights(model: ctta.AdaptiveModel) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.student.parameters()]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(one, other, strict=True))


# ---- admission ----


@pytest.mark.parametrize(
    ("declared", "bad", "complaint"),
    [
        ({"shape": (3, 8, 8)}, torch.rand(4, 3, 9, 9), "inputs of 3x8x8, got 3x9x9"),
        ({"shape": (3, None, None)}, torch.rand(4, 1, 8, 8), "inputs of 3xanyxany, got 1x8x8"),
        ({"dtype": "float32"}, torch.rand(4, 3, 8, 8).double(), "takes float32, got float64"),
        ({"high": 1}, torch.rand(4, 3, 8, 8) * 255, "4 of 4 inputs"),
        ({"low": 0}, torch.rand(4, 3, 8, 8) - 2, "outside \\[0, inf\\]"),
        ({"learn": False}, torch.full((4, 3, 8, 8), torch.nan), "NaN"),
    ],
)
def test_what_is_declared_is_checked_from_the_first_batch_on(source, declared, bad, complaint) -> None:
    model = Guarded(tent(source), input_spec=InputSpec(**declared))
    before = weights(model.wrapped)
    for call in (model, model.predict):
        with pytest.raises((ValueError, TypeError), match=complaint):
            call(bad)
    assert kinds(model) == ["refusal", "refusal"] and model.num_steps == 0
    assert same(weights(model.wrapped), before)


@pytest.mark.parametrize(
    "bad",
    [torch.rand(4, 3, 9, 9), torch.rand(4, 1, 8, 8), torch.rand(4, 3, 8, 8).double(), torch.rand(4, 3, 8, 8) * 255],
)
def test_what_is_not_declared_is_learnt_from_the_first_batch(source, bad) -> None:
    model = Guarded(tent(source))
    model(batches(1)[0])
    with pytest.raises((ValueError, TypeError)):
        model(bad)
    free = Guarded(ctta.BNStats(source), input_spec=InputSpec(learn=False))
    free(batches(1)[0])
    free(torch.rand(4, 3, 9, 9) * 255)


def test_any_size_learns_the_channels_only(source) -> None:
    model = Guarded(tent(source), input_spec=InputSpec(any_size=True))
    model(batches(1)[0])
    assert model(torch.rand(4, 3, 12, 10)).shape == (4, CLASSES)
    with pytest.raises(ValueError, match="3xanyxany"):
        model(torch.rand(4, 4, 8, 8))


def test_a_range_of_normalised_inputs_is_learnt_with_room(source) -> None:
    model = Guarded(tent(source))
    model(torch.randn(64, 3, 8, 8))
    model(1.5 * torch.randn(64, 3, 8, 8))
    with pytest.raises(ValueError, match="outside"):
        model(50 * torch.randn(64, 3, 8, 8))


@pytest.mark.parametrize("wrong", [{"dtype": "int8"}, {"shape": ()}, {"low": 1, "high": 0}])
def test_an_admission_that_makes_no_sense_is_refused(wrong) -> None:
    with pytest.raises(ValueError):
        InputSpec(**wrong)


def test_bad_rows_are_answered_by_the_source_and_leave_no_trace(source) -> None:
    """The others are answered, and learnt from, exactly as if they had come alone."""
    spoilt, clean = (Guarded(tent(source, 1e-2), bad_rows="source") for _ in range(2))
    for number, x in enumerate(batches(6)):
        mixed = x.clone()
        mixed[3], mixed[7, 0, 0, 0] = torch.nan, 300.0  # 300 is out of the range learnt from the first batch
        good = torch.ones(len(x), dtype=torch.bool)
        good[[3, 7] if number else [3]] = False
        if number == 0:
            mixed[7] = x[7]
        predicted = spoilt.predict(mixed)
        logits = spoilt(mixed)
        assert torch.equal(logits.nan_to_num(), predicted.nan_to_num())
        assert torch.equal(logits[good], clean(x[good]))
        assert torch.equal(logits[~good].nan_to_num(), source(mixed)[~good].nan_to_num()), "with its own statistics"
    assert same(weights(spoilt.wrapped), weights(clean.wrapped))
    assert kinds(spoilt) == ["bad_rows"] * 6


def test_a_batch_of_bad_rows_only_is_answered_and_not_learnt_from(source) -> None:
    model = Guarded(tent(source), bad_rows="source", input_spec=InputSpec(high=1))
    before = weights(model.wrapped)
    x = batches(1)[0] + 5
    assert torch.equal(model(x), source(x))
    assert same(weights(model.wrapped), before) and model.num_steps == 1 and model.wrapped.num_steps == 0
    assert model.last_step is None


def test_an_empty_batch_and_a_single_image(source) -> None:
    model = Guarded(tent(source))
    empty = torch.empty(0, 3, 8, 8)
    assert model(empty) is empty and model.num_steps == 0
    assert model(batches(1)[0][:1]).shape == (1, CLASSES)
    assert model.health.confidence is not None and model.health.class_sorting is None


# ---- health ----


def test_nothing_fires_on_a_healthy_stream_and_answers_are_the_methods_own(source) -> None:
    model, bare = Guarded(tent(source)), tent(source)
    for x in batches(40):
        assert torch.equal(model(x), bare(x))
    assert kinds(model) == [] and model.collapse_score < 1
    health = model.health
    assert health.adapted and not health.answered_by_source and health.skipped is False
    assert 0.25 < health.confidence <= 1 and 0 <= health.entropy < 1.4
    json.dumps(health.as_dict(), allow_nan=False)


def test_health_is_what_it_says(source) -> None:
    model = Guarded(ctta.CoTTA(source, views=()), inspect_every=1)
    for x in batches(3):
        logits, anchor = model(x), source_as_trained(model.source)(x)
    health, mean = model.health, logits.softmax(1).mean(0)
    assert health.confidence == pytest.approx(float(logits.softmax(1).amax(1).mean()), rel=1e-5)
    assert health.mean_prediction_entropy == pytest.approx(float(-(mean * mean.log()).sum()), rel=1e-5)
    assert health.source_disagreement == pytest.approx(float((logits.argmax(1) != anchor.argmax(1)).float().mean()))
    adapted, original = weights(model.wrapped), [parameter.detach() for parameter in model.source.parameters()]
    moved = flat([ours - theirs for ours, theirs in zip(adapted, original, strict=True)]).norm()
    assert health.distance_to_source == pytest.approx(float(moved / flat(original).norm()), rel=1e-4)
    assert health.update_norm > 0 and health.student_disagreement is not None


def test_an_infinite_signal_is_none_in_json() -> None:
    assert ctta.guard.Health(step=1, entropy=float("nan")).as_dict()["entropy"] is None


# ---- collapse and remedies ----


def collapsed(source: nn.Module, **settings) -> tuple[Guarded, int]:
    """A guarded method with a learning rate that is wrong from the first step on, and the batches until the alarm."""
    model = Guarded(tent(source, WRONG_RATE), **settings)
    for number, x in enumerate(batches(30)):
        model(x)
        if model.events:
            return model, number
    raise AssertionError("no alarm")


@pytest.mark.parametrize(("size", "quiet"), [(16, 7), (50, 2)])
def test_a_few_elements_that_stray_raise_no_alarm(size: int, quiet: int) -> None:
    """Half of them differ from a sure anchor, twice what the limits allow; a single batch needs more than that."""
    detector = CollapseDetector(CollapseThresholds(margin=0.25, class_loss=1.0))
    anchor = 20 * torch.eye(2)[torch.arange(size) % 2]
    answers = 20 * torch.eye(2)[torch.arange(size) // 2 % 2]
    scores = []
    for _ in range(quiet + 1):
        verdict = detector.judge(summarize(answers), summarize(anchor), None)
        detector.remember_(verdict)
        scores.append(verdict.collapse)
    at_once = pytest.approx(1.0, abs=0.05) if size >= 32 else 0
    assert scores[:-1] == [at_once] * quiet
    assert scores[-1] == pytest.approx(2.0, abs=0.1)


def test_a_learning_rate_wrong_from_the_first_step_is_noticed_and_undone(source) -> None:
    model, number = collapsed(source)
    assert number <= 8 and kinds(model) == ["rollback"]
    assert model.health.answered_by_source and model.collapse_score >= 1
    assert same(weights(model.wrapped), weights(ctta.Tent(source))), "no state was ever good but the source"
    x, y = coloured(64, 5)
    assert (model.predict(x).argmax(1) == y).float().mean() > 0.8
    steps = model.wrapped.num_steps
    model(x)
    assert model.wrapped.num_steps == steps and not model.health.adapted, "it rests"


def test_relapses_rest_longer_each_time(source) -> None:
    model = Guarded(tent(source, WRONG_RATE), cooldown=4)
    at = []
    for x in batches(120):
        before = len(model.events)
        model(x)
        at += [model.num_steps] if len(model.events) > before else []
    gaps = [later - sooner for sooner, later in pairwise(at)]
    assert len(at) >= 3 and gaps == sorted(gaps) and gaps[-1] >= 2 * gaps[0]


def test_reset_goes_back_to_the_source(source) -> None:
    model, _ = collapsed(source, on_collapse="reset")
    assert kinds(model) == ["reset"] and model.wrapped.num_steps == 0
    assert same(weights(model.wrapped), weights(ctta.Tent(source)))


def test_soft_reset_goes_most_of_the_way(source) -> None:
    model, _ = collapsed(source, on_collapse="soft_reset")
    assert kinds(model) == ["soft_reset"]
    pulled, original = weights(model.wrapped), weights(ctta.Tent(source))
    assert not same(pulled, original)
    reported = model.health.distance_to_source
    left = flat([ours - theirs for ours, theirs in zip(pulled, original, strict=True)]).norm()
    trained = flat(list(model.source[1].parameters())).norm()
    assert float(left / trained) == pytest.approx(0.1 * reported, rel=1e-3)


def test_a_soft_reset_heals_weights_that_are_not_finite(source) -> None:
    model = Guarded(tent(source), on_collapse="soft_reset")
    model(batches(1)[0])
    with torch.no_grad():
        model.wrapped.student[1].weight.fill_(torch.nan)
    answers = model(batches(1)[0])
    assert kinds(model)[-1] == "soft_reset" and answers.isfinite().all()
    assert all(parameter.isfinite().all() for parameter in model.wrapped.student.parameters())


def test_answers_that_are_not_finite_are_noticed_also_between_looks(source) -> None:
    model = Guarded(tent(source))
    for x in batches(20):
        model(x)
    while model.schedule.should_inspect():
        model(batches(1)[0])
    with torch.no_grad():
        model.wrapped.student[1].weight.fill_(torch.nan)
    x = batches(1)[0]
    foreseen, answers = model.predict(x), model(x)
    assert answers.isfinite().all() and torch.equal(foreseen, answers)
    assert kinds(model) == ["skipped", "rollback"] and "predictions are not finite" in model.events[-1].cause


def test_freeze_learns_no_more(source) -> None:
    model, _ = collapsed(source, on_collapse="freeze")
    assert kinds(model) == ["freeze"] and model.frozen
    before, steps = weights(model.wrapped), model.num_steps
    model(batches(1)[0])
    assert same(weights(model.wrapped), before) and model.num_steps == steps


def test_none_only_reports_and_answers_as_the_method_does(source) -> None:
    model, bare = Guarded(tent(source, WRONG_RATE), on_collapse=None), tent(source, WRONG_RATE)
    for x in batches(20):
        assert torch.equal(model(x), bare(x))
    assert kinds(model)[0] == "collapse" and not model.health.answered_by_source
    assert len(model.events) < 10, "an alarm that stands is told once"


def test_rollback_goes_to_the_last_good_snapshot(source) -> None:
    model = Guarded(tent(source), inspect_every=1, snapshot_every=5)
    seen = []
    for x in batches(12):
        seen.append(weights(model.wrapped))
        model(x)
    model.rollback()
    assert kinds(model) == ["rollback"]
    assert any(same(weights(model.wrapped), earlier) for earlier in seen[1:]), "some state that answered well"
    assert not same(weights(model.wrapped), seen[0]) and model.wrapped.num_steps == 12, "time does not go back"


def test_a_snapshot_shares_what_is_never_trained(source) -> None:
    model = Guarded(tent(source))
    assert model.good.student[0].weight is model.wrapped.student[0].weight
    assert model.good.student[1].weight is not model.wrapped.student[1].weight
    assert model.good.source is model.wrapped.source is model.source


def test_batches_that_come_class_by_class_are_answered_by_the_source(source) -> None:
    model = Guarded(tent(source))
    right = {"guarded": 0.0, "bare": 0.0}
    bare = tent(source)
    for number in range(24):
        x, y = coloured(32, number, classes=[number // 3 % CLASSES])
        answers = {"guarded": model(x), "bare": bare(x)}
        if number >= 12:
            for name, logits in answers.items():
                right[name] += float((logits.argmax(1) == y).float().mean()) / 12
    assert "sorted_stream" in kinds(model) and model.health.answered_by_source and not model.health.adapted
    assert right["guarded"] > 0.9 and right["bare"] < 0.7
    for x in batches(20):
        model(x)
    assert kinds(model)[-1] == "recovery" and model.health.adapted


def test_periodic_reset(source) -> None:
    model = Guarded(tent(source), reset_every=5)
    for number, x in enumerate(batches(11), 1):
        model(x)
        assert same(weights(model.wrapped), weights(ctta.Tent(source))) == (number % 5 == 0)
    assert kinds(model) == ["periodic_reset"] * 2


def test_a_periodic_reset_comes_also_with_a_batch_of_bad_rows_only(source) -> None:
    model = Guarded(tent(source), reset_every=3, bad_rows="source")
    for x in [*batches(2), torch.full((4, 3, 8, 8), torch.nan)]:
        model(x)
    assert kinds(model) == ["bad_rows", "periodic_reset"] and model.wrapped.num_steps == 0


def test_pace_learns_from_every_kth_batch(source) -> None:
    model = Guarded(tent(source), adapt_every=3)
    learnt = []
    for x in batches(7):
        predicted = model.predict(x)
        assert torch.equal(model(x), predicted)
        learnt.append(model.health.adapted)
    assert learnt == [True, False, False] * 2 + [True] and model.wrapped.num_steps == 3


def test_an_update_is_cut_down_before_a_teacher_learns_of_it(source) -> None:
    cap = 1e-4
    model = Guarded(ctta.CoTTA(source, views=(), restore=0, decay=0.5), max_update=cap, inspect_every=1)
    before = flat(weights(model.wrapped))
    model(batches(1)[0])
    after = flat(weights(model.wrapped))
    assert model.health.update_norm > cap, "as long as it would have been"
    assert float((after - before).norm() / before.norm()) == pytest.approx(cap, rel=1e-3)
    teacher = flat(list(model.wrapped.teacher.parameters()))
    torch.testing.assert_close(teacher, (before + after) / 2)


def test_shadow_answers_with_the_source_and_tells_what_would_differ(source, tmp_path) -> None:
    audit = tmp_path / "audit.jsonl"
    model, bare = Guarded(tent(source), shadow=True, audit=audit), tent(source)
    differing = total = 0
    for x in batches(100, size=4):
        shifted = x * 0.5 + 0.3
        plain = source_as_trained(model.source)(shifted)
        would = bare(shifted)
        assert torch.equal(model(shifted), plain)
        share = float((would.argmax(1) != plain.argmax(1)).float().mean())
        assert model.health.source_disagreement == pytest.approx(share)
        differing, total = differing + round(share * 4), total + 4
    assert same(weights(model.wrapped), weights(bare)), "it learns all the same"
    last = json.loads(audit.read_text().splitlines()[-1])
    assert last["kind"] == "shadow" and last["cause"] == f"{differing} of {total} predictions would differ"


# ---- the record ----


def test_every_event_is_a_line_of_the_audit_log(source, tmp_path) -> None:
    audit = tmp_path / "audit.jsonl"
    model, _ = collapsed(source, audit=audit)
    model.freeze().unfreeze().rollback()
    with pytest.raises(ValueError):
        model(torch.rand(2, 3, 9, 9))
    ctta.save(model, tmp_path / "s.safetensors")
    model = ctta.load(tmp_path / "s.safetensors", source, audit=audit)
    model.reset()
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    told = ["rollback", "freeze", "unfreeze", "rollback", "refusal", "load", "reset"]
    assert [line["kind"] for line in lines] == told
    assert set(lines[0]) == {"time", "step", "kind", "cause", "signals"}
    assert "collapse score" in lines[0]["cause"] and lines[0]["signals"]["collapse_score"] >= 1
    assert ctta.load(tmp_path / "s.safetensors", source).audit is None, "a file does not say where to write"
    assert model.fork().audit is None


def test_the_list_of_events_is_bounded(source) -> None:
    model = Guarded(tent(source))
    for _ in range(150):
        model.rollback()
    assert len(model.events) == 100


# ---- saving ----


def test_a_stream_goes_on_bit_identically_after_a_rollback(source, tmp_path) -> None:
    settings = {"inspect_every": 2, "snapshot_every": 3, "cooldown": 3, "thresholds": CollapseThresholds(margin=0.02)}
    model = Guarded(tent(source, WRONG_RATE), input_spec=InputSpec(shape=(3, None, None)), **settings)
    stream = batches(40)
    for x in stream[:20]:
        model(x)
    assert "rollback" in kinds(model)
    path = tmp_path / "s.safetensors"
    ctta.save(model, path)
    again = ctta.load(path, source)
    assert again.hyperparameters == model.hyperparameters and type(again.wrapped) is ctta.Tent
    twin = copy.deepcopy(model)
    for number, x in enumerate(stream[20:]):
        if number == 10:
            for each in (model, again, twin):
                each.rollback()
        expected = model(x)
        assert torch.equal(again(x), expected) and torch.equal(twin(x), expected)
        assert again.collapse_score == model.collapse_score
    assert kinds(again)[1:] == kinds(model)[-len(kinds(again)) + 1 :]


def test_what_a_file_cannot_hold_is_given_to_the_method_inside(source, tmp_path) -> None:
    model = Guarded(ctta.Tent(source, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01)))
    model(batches(1)[0])
    ctta.save(model, tmp_path / "s")
    with pytest.raises(ctta.CheckpointError, match=r"optimizer=\.\.\."):
        ctta.load(tmp_path / "s", source)
    again = ctta.load(tmp_path / "s", source, optimizer=partial(torch.optim.SGD, lr=0.01), shadow=True)
    assert again.shadow and same(weights(again.wrapped), weights(model.wrapped))
    with pytest.raises(TypeError, match="no hyperparameter"):
        ctta.load(tmp_path / "s", source, optimizer=partial(torch.optim.SGD, lr=0.01), colour=1)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda header: header.pop("inside"),
        lambda header: header["inside"].pop("good"),
        lambda header: header["inside"]["wrapped"].update(method="guarded"),
        lambda header: header["inside"]["wrapped"].update(method="os.system"),
        lambda header: header["inside"]["wrapped"].update(counters={"frozen": 1}),
        lambda header: header["inside"]["good"].update(optimizer={"groups": [], "numbers": {}}),
        lambda header: header["hyperparameters"].update(audit="/tmp/elsewhere"),
        lambda header: header["hyperparameters"].update(thresholds={"guard": "open", "arguments": {}}),
    ],
)
def test_a_file_that_was_tampered_with_is_refused(source, tmp_path, break_it) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = tmp_path / "s"
    model = Guarded(tent(source))
    model(batches(1)[0])
    ctta.save(model, path)
    with safe_open(path, framework="pt") as file:
        tensors, header = {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["ctta"])  # noqa: SIM118
    break_it(header)
    save_file(tensors, path, metadata={"ctta": json.dumps(header)})
    with pytest.raises(ctta.CheckpointError):
        ctta.load(path, source)


def test_a_file_cannot_write_to_the_source(source, tmp_path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = tmp_path / "s"
    ctta.save(Guarded(tent(source)), path)
    with safe_open(path, framework="pt") as file:
        tensors, header = {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["ctta"])  # noqa: SIM118
    for name in ("source.1.weight", "wrapped.source.1.weight", "good.source.1.weight"):
        spoilt = {**tensors, name: torch.zeros(8)}
        save_file(spoilt, path, metadata={"ctta": json.dumps({**header, "tensors": sorted(spoilt)})})
        with pytest.raises(ctta.CheckpointError, match="not part of the model's state"):
            ctta.load(path, source)


def test_an_evaluation_of_a_guarded_method_can_be_gone_on_with(tmp_path) -> None:
    """Also where a file cannot hold all that the method inside was made with."""

    def model() -> Guarded:
        embedded = ctta.models.embedded()
        return Guarded(ctta.Tent(embedded, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01)))

    class StopError(Exception):
        pass

    def stop(record) -> None:
        raise StopError

    stream = ctta.streams.continual(ctta.datasets.sample(), names=("fog",), limit=20, batch_size=10)
    expected = ctta.evaluate(model(), stream)
    with pytest.raises(StopError):
        ctta.evaluate(model(), stream, folder=tmp_path, on_batch=stop)
    resumed = ctta.evaluate(model(), stream, folder=tmp_path)
    assert resumed.errors == expected.errors
    about = json.loads((tmp_path / "about.json").read_text())
    assert about["settings"]["model"].startswith("Tent(") and about["settings"]["cooldown"] == "10"


@pytest.mark.parametrize(
    ("settings", "complaint"),
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
def test_wrong_settings_are_refused(source, settings, complaint) -> None:
    with pytest.raises(ValueError, match=complaint):
        Guarded(tent(source), **settings)


def test_only_methods_are_guarded(source) -> None:
    for thing in (source, Guarded(tent(source)), None):
        with pytest.raises(TypeError, match="expected a method to guard"):
            Guarded(thing)
    with pytest.raises(ValueError, match="margin"):
        CollapseThresholds(margin=0)


def test_a_frozen_method_stays_frozen(source) -> None:
    model = Guarded(tent(source).freeze())
    assert model.frozen
    model(batches(1)[0])
    assert model.num_steps == 0 and model.unfreeze().frozen is False
    model(batches(1)[0])
    assert model.wrapped.num_steps == 1

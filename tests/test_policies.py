"""Policies agree with plain loops over twenty steps, keep the contract with any method, and combine."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from naive import NaiveAdam, add_up, cross, elements, naive_copy, probabilities, step_generator
from naive_entropy import NaiveKalman, norm_parameters
from test_mathematics import CLOSE, EPS, assert_same_weights, classifier, stream
from torch import Tensor, nn

import ctta
from ctta.benchmark.report.runs import group_by_method
from ctta.benchmark.report.score_tables import build_summary_table
from ctta.core.transaction import restore_on_error
from ctta.functional import bernoulli_positions
from ctta.policies import POLICIES, Policy
from ctta.testing import CHECKS, NETWORKS, ContractCase

LR = 0.05
#: Called after every step with the weights, those of the source, the gradients, the logits and the step.
After = Callable[[Sequence[nn.Parameter], Sequence[Tensor], Sequence[Tensor], Tensor, int], bool]


def naive_tent(after: After, change: Callable[[list[Tensor]], list[Tensor]] | None = None) -> tuple[Any, Any]:
    """Run TENT, and ``after`` each step; a new optimizer if it returns True."""
    student = naive_copy(classifier(), 1.0)
    trained = norm_parameters(student)
    source = [p.detach().clone() for p in trained]
    descent, predictions = NaiveAdam(trained, lr=LR, eps=EPS), []
    for step, x in enumerate(stream()):
        logits = student(x)
        entropies = [cross(probabilities(vector), probabilities(vector)) for vector in elements(logits)]
        gradients = list(torch.autograd.grad(add_up(entropies) / len(entropies), trained))
        descent.step(gradients if change is None else change(gradients))
        with torch.no_grad():
            if after(trained, source, gradients, logits.detach(), step):
                descent = NaiveAdam(trained, lr=LR, eps=EPS)
        predictions.append(logits.detach())
    return predictions, student


def assert_same_run(policy: ctta.policies.Policy, after: After) -> ctta.Tent:
    optimizer = partial(torch.optim.Adam, lr=LR, eps=EPS)
    model = ctta.Tent(classifier(), optimizer=optimizer, policies=[policy], batch_stats=1.0)
    expected, student = naive_tent(after)
    CLOSE([model(x) for x in stream()], expected)
    assert_same_weights(model.student, student)
    return model


def restore_all(trained: Sequence[nn.Parameter], source: Sequence[Tensor]) -> None:
    for p, original in zip(trained, source, strict=True):
        p.copy_(original)


def test_restore() -> None:
    def after(trained: Any, source: Any, gradients: Any, logits: Tensor, step: int) -> bool:
        flat, count = [], sum(p.numel() for p in trained)
        chosen = set(bernoulli_positions(count, 0.2, step_generator(0, step, "restore")).tolist())
        for p, original in zip(trained, source, strict=True):
            flat += [(p, original, i) for i in range(p.numel())]
        for position in chosen:
            p, original, i = flat[position]
            p[i] = original[i]
        return False

    assert_same_run(ctta.policies.restore(0.2), after)


def test_restore_as_a_policy_is_cottas_own() -> None:
    settings: dict[str, Any] = {"views": (), "seed": 4, "batch_stats": 1.0}
    own = ctta.CoTTA(classifier(), restore=0.1, **settings)
    by_policy = ctta.CoTTA(classifier(), restore=0.0, policies=[ctta.policies.restore(0.1)], **settings)
    for x in stream():
        assert torch.equal(own(x), by_policy(x))
    assert all(map(torch.equal, own.student.parameters(), by_policy.student.parameters()))


def test_restore_by_fisher() -> None:
    def after(trained: Any, source: Any, gradients: Any, logits: Tensor, step: int) -> bool:
        ordered = sorted(float(value) ** 2 for gradient in gradients for value in gradient.flatten())
        position = 0.3 * (len(ordered) - 1)
        low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
        limit = low + (position - math.floor(position)) * (high - low)
        for p, original, gradient in zip(trained, source, gradients, strict=True):
            for i in range(len(p)):
                if float(gradient[i]) ** 2 < limit:
                    p[i] = original[i]
        return False

    assert_same_run(ctta.policies.restore_by_fisher(0.3), after)


def test_weights_without_a_gradient_do_not_shift_the_quantile() -> None:
    class WithUnused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.unused = classifier(), nn.Linear(20, 20).double()

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.net(x)
            return logits

    settings: dict[str, Any] = {"views": (), "restore": 0.0, "batch_stats": 1.0, "lr": LR}
    plain, wrapped = (
        ctta.CoTTA(net, policies=[ctta.policies.restore_by_fisher(0.3)], **settings)
        for net in (classifier(), WithUnused())
    )
    for x in stream():
        plain(x), wrapped(x)
    assert_same_weights(wrapped.student.get_submodule("net"), plain.student)


def test_average_with_source() -> None:
    def after(trained: Any, source: Any, gradients: Any, logits: Tensor, step: int) -> bool:
        for p, original in zip(trained, source, strict=True):
            p.copy_(0.9 * p + 0.1 * original)
        return False

    assert_same_run(ctta.policies.average_with_source(0.9), after)


@pytest.mark.parametrize("noise", [0.005, 20.0, 300.0])  # a gain of 0, one in between, and the largest
def test_kalman(noise: float) -> None:
    num_trained = sum(p.numel() for p in norm_parameters(naive_copy(classifier(), 1.0)))
    naive = NaiveKalman(num_trained, q=noise)

    def after(trained: Any, source: Any, gradients: Any, logits: Tensor, step: int) -> bool:
        naive.step(trained, source)
        return False

    assert_same_run(ctta.policies.kalman(noise=noise), after)


def test_kalman_stays_finite_in_large_networks() -> None:
    model = ctta.Tent(classifier(), policies=[ctta.policies.kalman(noise=1e6)])
    for x in stream():
        assert model(x).isfinite().all()


def test_reset_every() -> None:
    def after(trained: Any, source: Any, gradients: Any, logits: Tensor, step: int) -> bool:
        if (step + 1) % 6 == 0:
            restore_all(trained, source)
        return (step + 1) % 6 == 0

    model = assert_same_run(ctta.policies.reset_every(6), after)
    assert model.num_steps == 20
    assert_same_run(ctta.policies.reset_every(30, "images"), after)  # six batches of five


def test_reset_on_low_entropy() -> None:
    averages: list[float] = []
    resets: list[int] = []

    def after(trained: Any, source: Any, gradients: Any, logits: Tensor, step: int) -> bool:
        value = float(ctta.functional.entropy(logits).mean())
        averages.append(0.9 * averages[-1] + 0.1 * value if averages else value)
        if averages[-1] < 0.9 * math.log(4):
            restore_all(trained, source)
            averages.clear()
            resets.append(step)
            return True
        return False

    assert_same_run(ctta.policies.reset_on_low_entropy(0.9, "share"), after)
    assert 1 <= len(resets) < 20, resets


@pytest.mark.parametrize("share", [0.8, 0.95])
def test_adaptive_reset(share: float) -> None:
    """ASR from its formulas, with steps and a pull that are strong enough to show."""
    source_net, pull, start, lr = naive_copy(classifier(), 1.0), 50.0, math.log(share * 4), 0.5
    drifts: list[list[float]] = [[]]  # between resets
    thresholds: list[float] = []
    student = naive_copy(classifier(), 1.0)
    trained = norm_parameters(student)
    source = [p.detach().clone() for p in trained]
    descent, predictions = NaiveAdam(trained, lr=lr, eps=EPS), []
    resets: list[tuple[int, int]] = []
    sums: list[tuple[list[Tensor], list[Tensor]]] = []
    mean: tuple[list[Tensor], list[Tensor]] | None = None
    threshold, last_drift = start, 0.0
    for step, x in enumerate(stream()):
        logits = student(x)
        entropies = [cross(probabilities(vector), probabilities(vector)) for vector in elements(logits)]
        gradients = list(torch.autograd.grad(add_up(entropies) / len(entropies), trained))
        sums.append(([g**2 for g in gradients], [p.detach().clone() for p in trained]))
        differs = [int(one.argmax() != other.argmax()) for one, other in zip(logits, source_net(x), strict=True)]
        drift = sum(differs) / len(differs)
        drifts[-1].append(drift)
        if mean is not None:
            squares, weights = mean
            terms = zip(gradients, squares, weights, trained, strict=True)
            # The authors' code weighs the pull by the drift of the batch before.
            gradients = [g + 2 * pull * last_drift**2 * f * (p.detach() - w) for g, f, w, p in terms]
        descent.step(gradients)
        last_drift = drift
        average = probabilities(torch.stack(list(logits.detach())).mean(0))
        concentration = float(cross(average, average))
        if concentration < threshold:
            scope = max(0.5 - 20 * (threshold - concentration), 0)
            keep = sum(number < scope * len(trained) for number in range(len(trained)))
            with torch.no_grad():
                restore_all(trained[keep:], source[keep:])
            descent, resets = NaiveAdam(trained, lr=lr, eps=EPS), [*resets, (step, keep)]
            parts = zip(*sums, strict=True)  # squares and weights, each a list per step
            latest = tuple([add_up(column) / len(sums) for column in zip(*part, strict=True)] for part in parts)
            old = mean or latest
            pairs = [[0.9 * o + 0.1 * n for o, n in zip(*both, strict=True)] for both in zip(old, latest, strict=True)]
            mean, sums, threshold = (pairs[0], pairs[1]), [], start
            drifts.append([])
        else:
            momentum = 0.15 * drift + 0.85
            threshold = momentum * threshold + (1 - momentum) * concentration
        predictions.append(logits.detach())
        thresholds.append(threshold)
    assert len(resets) > 1 and any(keep for _, keep in resets), resets
    assert any(map(any, drifts[2:])), "the averages over two resets do not matter"
    policy = ctta.policies.adaptive_reset(share=share, pull=pull)
    optimizer = partial(torch.optim.Adam, lr=lr, eps=EPS)
    model = ctta.Tent(classifier(), optimizer=optimizer, policies=[policy], batch_stats=1.0)
    for x, expected, limit in zip(stream(), predictions, thresholds, strict=True):
        CLOSE(model(x), expected)
        CLOSE(model.get_buffer("policy_states.adaptive_reset.threshold"), torch.tensor(limit, dtype=torch.float64))
    assert_same_weights(model.student, student)


def test_an_adaptive_reset_forgets_the_averages_of_the_method() -> None:
    for share, is_reset in ((5.0, True), (0.01, False)):  # a threshold above and below every entropy
        policy = ctta.policies.adaptive_reset(share=share)
        model = ctta.ETA(classifier(), margin=1.0, redundancy=1.1, policies=[policy], batch_stats=1.0)
        model(stream()[0])
        assert model.last_step is not None and model.last_step.updated
        assert bool(model.average.any()) is not is_reset


def test_frozen_teacher() -> None:
    policies = [ctta.policies.frozen_teacher()]
    optimizer = partial(torch.optim.Adam, lr=LR, eps=EPS)
    settings: dict[str, Any] = {"views": (), "batch_stats": 1.0, "restore": 0.0, "optimizer": optimizer}
    model = ctta.CoTTA(classifier(), decay=0.5, policies=policies, **settings)
    student, source = naive_copy(classifier(), 1.0), naive_copy(classifier(), 1.0)
    descent = NaiveAdam(list(student.parameters()), lr=LR, eps=EPS)
    for x in stream():
        logits = student(x)
        losses = [cross(probabilities(t.detach()), probabilities(s)) for t, s in zip(source(x), logits, strict=True)]
        descent.step(torch.autograd.grad(add_up(losses) / len(losses), list(student.parameters())))
        CLOSE(model.predict(x), logits.detach())
        CLOSE(model(x), logits.detach())  # the student predicts, and the source teaches
    assert_same_weights(model.teacher, classifier())
    assert_same_weights(model.student, student)
    CLOSE(model.deploy()(x).detach(), model.predict(x))


def test_frozen_teacher_needs_a_teacher_of_its_own() -> None:
    policies = [ctta.policies.frozen_teacher()]
    with pytest.raises(ctta.ConfigError):
        ctta.Tent(classifier(), policies=policies)
    with pytest.raises(ctta.ConfigError):
        ctta.TRIBE(classifier(), policies=policies)


def test_policies_judge_predictions_before_their_correction() -> None:
    """As in ASR's code for ROID, whose corrected logits have another entropy."""
    policy = ctta.policies.adaptive_reset(share=0.01)  # never resets, so that the threshold follows the entropy
    views = (lambda model, x: model(x.flip(-1)),)
    corrected, plain = (
        ctta.ROID(classifier(), prior=prior, views=views, policies=[policy], batch_stats=1.0)
        for prior in ("official", None)
    )
    x = stream()[0]
    assert not torch.equal(corrected(x), plain(x))
    name = "policy_states.adaptive_reset.threshold"
    assert torch.equal(corrected.get_buffer(name), plain.get_buffer(name))


def test_a_restart_leaves_nothing_to_the_policies_after_it() -> None:
    policies = [ctta.policies.reset_every(3), ctta.policies.reset_on_low_entropy(0.0), ctta.policies.kalman()]
    model = ctta.Tent(classifier(), policies=policies, lr=LR, batch_stats=1.0)
    new = {name: value.clone() for name, value in model.state_dict().items()}
    for x in stream()[:3]:
        model(x)
    assert all(torch.equal(value, new[name]) for name, value in model.state_dict().items())


def naive_skipping(
    batches: list[Tensor], every: int, rise: float | None, change: float | None
) -> tuple[list[Tensor], nn.Module, list[int]]:
    """Run TENT on some of the batches; return the predictions, the student, and which batches it learned from."""
    student = naive_copy(classifier(), 1.0)
    trained = norm_parameters(student)
    descent, average, usual = NaiveAdam(trained, lr=LR, eps=EPS), math.inf, 0.5
    predictions, learned = list[Tensor](), list[int]()
    for step, x in enumerate(batches):
        logits = student(x)
        entropies = [cross(probabilities(vector), probabilities(vector)) for vector in elements(logits)]
        loss = add_up(entropies) / len(entropies)
        is_due = not learned or step - learned[-1] >= every
        surest = [float(max(probabilities(vector))) for vector in elements(logits.detach())]
        sureness = sum(surest) / len(surest)
        is_usual = change is None or max(sureness / usual, usual / sureness) <= change
        usual = 0.99 * usual + 0.01 * sureness
        if is_usual and (is_due or (rise is not None and float(loss.detach()) > rise * average)):
            descent.step(list(torch.autograd.grad(loss, trained)))
            learned.append(step)
        average = float(loss.detach()) if average == math.inf else 0.99 * average + 0.01 * float(loss.detach())
        predictions.append(logits.detach())
    return predictions, student, learned


@pytest.mark.parametrize(
    ("every", "rise", "change"), [(1, None, None), (3, None, None), (50, None, None), (7, 0.96, None), (2, 0.98, 1.15)]
)
def test_update_when(every: int, rise: float | None, change: float | None) -> None:
    policy = ctta.policies.update_when(every, rise=rise, max_change=change)
    optimizer = partial(torch.optim.Adam, lr=LR, eps=EPS)
    model = ctta.Tent(classifier(), optimizer=optimizer, policies=[policy], batch_stats=1.0)
    expected, student, learned = naive_skipping(stream(), every, rise, change)
    predictions, found = [], []
    for step, x in enumerate(stream()):
        predictions.append(model(x))
        assert model.is_skipping == (model.last_step is None)
        found += [] if model.is_skipping else [step]
    CLOSE(predictions, expected)
    assert_same_weights(model.student, student)
    assert found == learned and model.num_steps == len(stream())
    if change is not None:
        due = [
            step for step in range(1, len(stream())) if step - max([s for s in learned if s < step], default=-9) >= 2
        ]
        assert set(due) - set(learned) and len(learned) > 2, "some updates are due, and not taken"
    elif rise is not None:
        assert {step % every for step in learned} != {0}, "some updates are not due"
        assert len(learned) < len(stream())


@pytest.mark.parametrize("method", [ctta.ROID, ctta.CMF])
def test_a_rise_compares_predictions_as_they_are_returned(method: type[ctta.ROID]) -> None:
    """The corrected ones have another entropy than those that the methods learn from."""
    model = method(classifier(), policies=[ctta.policies.update_when(4, rise=1.0)], batch_stats=1.0, views=())
    average, since, learned = math.inf, 3, list[bool]()
    for x in stream():
        value = float(ctta.functional.entropy(model.predict(x)).mean())
        learned.append(since == 3 or value > average)
        model(x)
        assert model.is_skipping != learned[-1]
        since = 0 if learned[-1] else since + 1
        average = value if average == math.inf else 0.99 * average + 0.01 * value
    assert len(learned) / 4 < sum(learned) < len(learned), "some updates are not due, and some batches are skipped"


def test_an_update_is_due_until_something_was_learned() -> None:
    policies = [ctta.policies.update_when(3)]
    model = ctta.ETA(classifier(), policies=policies, margin=1.0, redundancy=1.0, batch_stats=1.0)
    found = []
    for step, x in enumerate(stream()[:9]):
        model.margin = 0.0 if step in (3, 4) else 1.0  # nothing is reliable enough
        model(x)
        step_taken = model.last_step
        found.append("skip" if step_taken is None else "empty" if step_taken.is_empty else "learn")
    assert found == ["learn", "skip", "skip", "empty", "empty", "learn", "skip", "skip", "learn"]


def test_a_guard_tells_that_an_update_was_skipped() -> None:
    model = ctta.Guarded(ctta.Tent(classifier(), policies=[ctta.policies.update_when(2)], batch_stats=1.0))
    found = []
    for x in stream()[:4]:
        model(x)
        found.append(model.is_skipping)
    assert found == [False, True, False, True]


def test_a_batch_without_an_update_costs_a_forward_pass() -> None:
    model = ctta.Tent(classifier(), policies=[ctta.policies.update_when(4)], lr=LR, batch_stats=1.0)
    calls: list[bool] = []
    model.student.register_forward_hook(lambda *_: calls.append(model.is_skipping))
    assert model.optimizer is not None
    steps: list[int] = []
    model.optimizer.register_step_post_hook(lambda *_: steps.append(model.num_steps))
    for x in stream()[:8]:
        model(x)
    assert calls == [False, True, True, True] * 2 and steps == [0, 4]


def test_updates_are_skipped_for_a_method_without_a_prediction_of_its_own() -> None:
    """Its default prediction runs a step of a copy, which must not ask the policy again."""

    class Own(ctta.Tent):
        predict_step = ctta.AdaptiveModel.predict_step

    policies = [ctta.policies.update_when(3, rise=1.01)]
    own, tent = (cls(classifier(), policies=policies, lr=LR, batch_stats=1.0) for cls in (Own, ctta.Tent))
    for x in stream()[:6]:
        assert torch.equal(own.predict(x), tent.predict(x))
        assert torch.equal(own(x), tent(x)) and own.is_skipping == tent.is_skipping


def test_the_share_of_updates_stands_beside_the_error() -> None:
    data = [(x.float(), torch.zeros(len(x), dtype=torch.long)) for x in stream()[:8]]
    net = classifier().float()
    policies = [ctta.policies.update_when(4)]
    results = {
        "some": ctta.evaluate(ctta.Tent(net, policies=policies), data),
        "all": ctta.evaluate(ctta.Tent(net), data),
        "none": ctta.evaluate(ctta.Source(net), data),
    }
    assert {name: result.update_share for name, result in results.items()} == {"some": 0.25, "all": 1.0, "none": 0.0}
    assert "learned from 25% of the batches" in repr(results["some"])
    assert "learned from" not in repr(results["all"]) + repr(results["none"])
    table = build_summary_table(group_by_method([replace(results["some"], labels={"row": "some"})]))
    learned = [column.key for column in table.columns].index("learned")
    assert table.rows[0].cells[learned].value == 25


@pytest.mark.parametrize("settings", [{"every": 0}, {"rise": 0.0}, {"decay": 1.5}, {"max_change": 1.0}])
def test_settings_of_skipping_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ctta.ConfigError):
        ctta.policies.update_when(**settings)


def make_policy(name: str) -> ctta.policies.Policy:
    """Return a policy that acts within the few steps of a check."""
    settings: dict[str, dict[str, Any]] = {
        "restore": {"probability": 0.3},
        "reset_every": {"num": 2},
        "reset_on_low_entropy": {"below": 0.99, "unit": "share"},
        "adaptive_reset": {"share": 0.99},
        "update_when": {"every": 2, "rise": 1.05},
    }
    policy: Policy = POLICIES[name](**settings.get(name, {}))
    return policy


@pytest.mark.parametrize("name", POLICIES)
def test_policies_keep_the_contract(name: str) -> None:
    method = ctta.CoTTA if name == "frozen_teacher" else ctta.Tent
    settings: dict[str, Any] = {"policies": [make_policy(name)], "lr": 0.01}
    settings |= {"views": ctta.views.image_views(2)} if method is ctta.CoTTA else {}
    checks = ["reset_equals_new", "resume_is_bit_identical", "forks_share_only_the_source", "copies_are_independent"]
    checks += ["predict_equals_next_adapt", "moves_mid_stream"]
    checks += ["non_finite_step_is_skipped"] if name != "reset_every" else []  # which counts every batch
    case = ContractCase(method, NETWORKS["batch_norm"], settings)
    for check in checks:
        CHECKS[f"check_{check}"](case)


def test_all_policies_together_keep_the_contract() -> None:
    policies = [make_policy(name) for name in POLICIES if name != "frozen_teacher"]
    settings = {"policies": policies, "lr": 0.01}
    for check in ("check_resume_is_bit_identical", "check_reset_equals_new", "check_memory_is_bounded"):
        CHECKS[check](ContractCase(ctta.Tent, NETWORKS["vit"], settings))


#: One method of each family, the policies that it has or cannot have, and settings with which it learns in few steps.
FAMILIES: dict[str, tuple[set[str], dict[str, Any]]] = {
    "sar": ({"frozen_teacher", "reset_on_low_entropy"}, {"margin": 1.0}),
    "roid": ({"frozen_teacher", "average_with_source"}, {}),
    "rotta": (set(), {"memory_size": 8, "update_every": 6}),
    "cotta": ({"restore"}, {"views": ctta.views.image_views(1)}),
    "santa": ({"frozen_teacher"}, {}),
    "delta": ({"frozen_teacher"}, {}),
    "palm": ({"frozen_teacher"}, {}),
}


@pytest.mark.parametrize("method", FAMILIES)
def test_all_policies_combine_with_every_family(method: str) -> None:
    excluded, settings = FAMILIES[method]
    policies = [make_policy(name) for name in reversed(POLICIES) if name not in excluded]
    case = ContractCase(ctta.METHODS[method], NETWORKS["batch_norm"], settings | {"policies": policies})
    for check in ("check_resume_is_bit_identical", "check_reset_equals_new", "check_predict_equals_next_adapt"):
        CHECKS[check](case)


def test_a_guarded_step_with_a_policy_is_undone() -> None:
    net = NETWORKS["batch_norm"]()
    model = ctta.Tent(net, policies=[ctta.policies.reset_every(2)], lr=0.01)
    model(torch.rand(16, 3, 16, 16))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(OSError), restore_on_error(model):
        model(torch.rand(16, 3, 16, 16))  # resets
        raise OSError
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.optimizer is not None and len(model.optimizer.state) > 0


def test_policies_are_shown_checked_and_unique() -> None:
    net = classifier()
    model = ctta.adapt(net, "tent", policies=[ctta.policies.reset_every(1000), ctta.policies.restore()])
    assert "policies=(reset_every(num=1000, unit='batches'), restore(probability=0.01))" in repr(model)
    with pytest.raises(ctta.ConfigError):
        ctta.Tent(net, policies=[ctta.policies.restore(), ctta.policies.restore(0.5)])
    with pytest.raises(ctta.ConfigError, match="restore=0"):
        ctta.CoTTA(net, policies=[ctta.policies.restore(0.5)])
    with pytest.raises(TypeError, match=r"ctta\.policies"):
        bad: Any = ["reset_every"]
        ctta.Tent(net, policies=bad)
    with pytest.raises(ctta.ConfigError):
        ctta.policies.reset_every(0)

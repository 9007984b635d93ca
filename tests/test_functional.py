"""The equations agree with plain loops, and stay finite where these would not."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from naive import add_up, cross, probabilities
from torch import Tensor, nn

from ctta import functional as F
from ctta.optim import Outcome, sharpness_aware_step_, step_if_finite_

CLOSE = partial(torch.testing.assert_close, rtol=0, atol=1e-10)
SHAPES = [(7, 4), (1, 4), (5, 2), (2, 3, 2, 2)]


def make_logits(shape: tuple[int, ...], scale: float = 3.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rows_of(logits: Tensor) -> Tensor:
    """Return the logits of every element, in the order of ``flatten()`` of the results."""
    return logits.movedim(1, -1).reshape(-1, logits.shape[1])


def naive_come(z: Tensor) -> Tensor:
    count = len(z)
    total = add_up(v.exp() for v in z) + count
    opinion = [v.exp() / total for v in z] + [count / total]
    return -add_up(mass * (mass + 1e-7).log() for mass in opinion)


def naive_slr(z: Tensor) -> Tensor:
    clipped = [p.clamp(max=0.99) for p in probabilities(z)]
    return -add_up(q * (q / (1 - q) + 1e-5).log() for q in clipped)


def naive_gce(z: Tensor) -> Tensor:
    return (1 - max(probabilities(z)) ** 0.8) / 0.8


ELEMENTWISE: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (partial(F.entropy, kind="come"), naive_come),
    (F.soft_likelihood_ratio, naive_slr),
    (lambda z: F.generalized_cross_entropy(z, z), naive_gce),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("equation", "naive"), ELEMENTWISE, ids=["come", "slr", "gce"])
def test_losses_of_elements(
    equation: Callable[[Tensor], Tensor], naive: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    logits = make_logits(shape).requires_grad_()
    found = equation(logits)
    assert found.shape == (shape[0], *shape[2:])
    CLOSE(found.flatten(), torch.stack([naive(z) for z in rows_of(logits)]))


def test_comes_gradient_leaves_the_norm_of_the_logits_alone() -> None:
    logits = make_logits((6, 5)).requires_grad_()
    (gradient,) = torch.autograd.grad(F.entropy(logits, "come").sum(), logits)
    CLOSE((gradient * logits).sum(1), torch.zeros(6, dtype=torch.float64))
    norm = logits.norm(dim=1, keepdim=True)
    naive = torch.stack([naive_come(z) for z in logits / norm * norm.detach()])
    CLOSE(gradient, torch.autograd.grad(naive.sum(), logits)[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_information_maximization(shape: tuple[int, ...]) -> None:
    logits = make_logits(shape)
    predicted = [probabilities(z) for z in rows_of(logits)]
    mean = [add_up(column) / len(predicted) for column in zip(*predicted, strict=True)]
    expected = add_up(cross(p, p) for p in predicted) / len(predicted) + add_up(m * (m + 1e-5).log() for m in mean)
    CLOSE(F.information_maximization(logits), expected)
    CLOSE(F.mean_probabilities(logits), torch.stack(mean))


def test_contrastive_loss() -> None:
    features = make_logits((4, 3, 6))
    units = [[v / v.norm() for v in sample] for sample in features]
    anchors, total, count = [(i, j) for i in range(4) for j in range(3)], torch.zeros((), dtype=torch.float64), 0
    for i, j in anchors:
        others = [(k, m) for k, m in anchors if (k, m) != (i, j)]
        denominator = add_up((units[i][j] @ units[k][m] / 0.1).exp() for k, m in others)
        for k, m in others:
            if k == i:
                total = total - ((units[i][j] @ units[k][m] / 0.1).exp() / denominator).log()
                count += 1
    CLOSE(F.contrastive_loss(features), total / count)
    assert F.contrastive_loss(features[:1]).isfinite()


@pytest.mark.parametrize("shape", SHAPES)
def test_roid_weights(shape: tuple[int, ...]) -> None:
    logits = make_logits(shape)
    average = torch.rand(shape[1], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    average = average / average.sum()
    predicted = [torch.stack(probabilities(z)) for z in rows_of(logits)]
    diversity = [1 - float(average @ p / (average.norm() * p.norm())) for p in predicted]
    certainty = [-float(cross(list(p), list(p))) for p in predicted]

    def scale(values: list[float]) -> list[float]:
        low, high = min(values), max(values)
        return [(value - low) / (high - low) if high > low else 0.0 for value in values]

    diversity, certainty = scale(diversity), scale(certainty)
    mean = sum(diversity) / len(diversity)
    expected = [math.exp(3 * d * c) if d >= mean else 0.0 for d, c in zip(diversity, certainty, strict=True)]
    CLOSE(F.roid_weights(logits, average).flatten(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("shape", SHAPES)
def test_prior_correction(shape: tuple[int, ...]) -> None:
    logits = make_logits(shape)
    rows = rows_of(logits)
    prior = torch.stack([torch.stack(probabilities(z)) for z in rows]).sum(0) / len(rows)
    smoothing = max(1 / len(rows), 1 / shape[1]) / float(prior.max())
    prior = (prior + smoothing) / (1 + smoothing * shape[1])
    CLOSE(rows_of(F.correct_prior(logits)), rows * prior)
    log_probabilities = torch.stack([torch.stack(probabilities(z)).log() for z in rows])
    CLOSE(rows_of(F.correct_prior(logits, "bayes")), log_probabilities + prior.log())


def test_masked_mean_and_its_gradient() -> None:
    values = make_logits((6,)).requires_grad_()
    mask = torch.tensor([True, False, True, True, False, False])
    CLOSE(F.masked_mean(values, mask), values[mask].mean())
    (gradient,) = torch.autograd.grad(F.masked_mean(values, mask), values)
    CLOSE(gradient, mask.double() / 3)
    (gradient,) = torch.autograd.grad(F.masked_mean(values, mask & False), values)
    assert not gradient.any()
    with_nan = values.detach().clone()
    with_nan[1] = torch.nan
    assert F.masked_mean(with_nan, mask).isnan(), "its gradient would be NaN in spite of the mask"


def test_averages_start_with_the_first_selection() -> None:
    average, logits = torch.zeros(4), make_logits((6, 4)).float()
    assert not F.cosine_to_average(logits, average).any()
    F.update_average_(average, F.mean_probabilities(logits, torch.zeros(6, dtype=torch.bool)))
    assert not average.any()
    F.update_average_(average, F.mean_probabilities(logits, torch.arange(6) < 2))
    torch.testing.assert_close(average, logits[:2].softmax(1).mean(0))
    F.update_average_(average, torch.tensor([1.0, 0, 0, 0]))
    torch.testing.assert_close(average, 0.9 * logits[:2].softmax(1).mean(0) + torch.tensor([0.1, 0, 0, 0]))


#: Everything that gives a scalar from logits, for the extremes below.
SCALARS: dict[str, Callable[[Tensor], Tensor]] = {
    "entropy": lambda z: F.entropy(z).mean(),
    "come": lambda z: F.entropy(z, "come").mean(),
    "slr": lambda z: F.soft_likelihood_ratio(z).mean(),
    "gce": lambda z: F.generalized_cross_entropy(z, z).mean(),
    "symmetric": lambda z: F.symmetric_cross_entropy(z, -z).mean(),
    "information": F.information_maximization,
    "masked": lambda z: F.masked_mean(F.entropy(z), F.entropy(z) < -1),
    "reliability": lambda z: F.masked_mean(
        F.reliability_weights(F.entropy(z), 0.4 * math.log(z.shape[1])) * F.entropy(z), F.entropy(z) < 0.1
    ),
    "roid": lambda z: (F.roid_weights(z, torch.full((z.shape[1],), 1 / z.shape[1])) * F.entropy(z)).mean(),
    "prior": lambda z: F.correct_prior(z).mean() + F.entropy(z).mean(),
    "bayes": lambda z: F.correct_prior(z, "bayes").mean() + F.entropy(z).mean(),
    "contrast": lambda z: F.contrastive_loss(torch.stack([z, -z], 1)),
}
EXTREMES = {
    "large": 1e4 * torch.tensor([[1.0, -1], [-1, 1], [1, 1]]),
    "one": torch.tensor([[2.0, -3, 1]]),
    "equal": torch.ones(4, 3),
    "zero": torch.zeros(2, 2),
    "half": torch.tensor([[300.0, 100, 3], [1, 2, 3]], dtype=torch.float16),
}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("name", SCALARS)
def test_extremes_are_finite(name: str, extreme: str) -> None:
    logits = EXTREMES[extreme].clone().requires_grad_()
    value = SCALARS[name](logits)
    value.backward()
    assert value.isfinite()
    assert logits.grad is not None and logits.grad.isfinite().all()


def run_sharpness_aware(seconds: list[float | None]) -> tuple[nn.Parameter, list[bool]]:
    """Return the weights after steps whose second losses are scaled, and whether each step was taken."""
    weights = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9)
    taken = []
    for scale in seconds:

        def second(scale: float | None = scale) -> tuple[Tensor, Tensor | None]:
            nothing = torch.zeros(()) if scale is None else None
            return (1.0 if scale is None else scale) * weights.pow(4).sum(), nothing

        taken.append(bool(sharpness_aware_step_(optimizer, weights.pow(4).sum(), second, 0.05)))
        assert weights.grad is None
    return weights, taken


def test_sharpness_aware_steps() -> None:
    weights, taken = run_sharpness_aware([0.01] * 20)
    expected, velocity = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for _ in range(20):
        gradient = 4 * expected**3
        nearby = expected + 0.05 * gradient / (gradient.norm() + 1e-12)
        velocity = 0.9 * velocity + 0.01 * 4 * nearby**3
        expected = expected - 0.1 * velocity
    CLOSE(weights.detach(), expected)
    assert all(taken)


@pytest.mark.parametrize("second", [None, math.nan, math.inf])
def test_a_sharpness_aware_step_that_is_not_taken_changes_nothing(second: float | None) -> None:
    once, _ = run_sharpness_aware([0.01])
    weights, taken = run_sharpness_aware([0.01, second])
    assert taken == [True, False]
    assert torch.equal(weights, once), "the perturbation stayed"


def test_an_error_in_the_second_pass_restores_the_weights() -> None:
    weights = nn.Parameter(torch.ones(2))

    def fail() -> tuple[Tensor, None]:
        raise RuntimeError("second pass")

    with pytest.raises(RuntimeError, match="second pass"):
        sharpness_aware_step_(torch.optim.SGD([weights], lr=0.1), weights.square().sum(), fail, 0.5)
    assert torch.equal(weights, torch.ones(2)) and weights.grad is None


@pytest.mark.parametrize("sharpness_aware", [False, True])
@pytest.mark.parametrize(("value", "taken"), [(1.0, True), (math.nan, False), (math.inf, False)])
def test_gradients_that_are_not_finite_after_the_policies_take_no_step(
    sharpness_aware: bool, value: float, taken: bool
) -> None:
    weights = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weights], lr=0.1)

    def change_gradient() -> None:
        assert weights.grad is not None
        weights.grad.fill_(value)

    if sharpness_aware:
        first = weights.square().sum()
        outcome = sharpness_aware_step_(optimizer, first, lambda: (weights.square().sum(), None), 0.5, change_gradient)
    else:
        outcome = step_if_finite_(optimizer, weights.square().sum(), change_gradient)
    assert outcome is (Outcome.TAKEN if taken else Outcome.SKIPPED)
    CLOSE(weights.detach(), torch.full((2,), 0.9 if taken else 1.0))
    assert weights.grad is None

"""Twenty steps of PETAL, PALM and TEA agree with naive implementations to 1e-10, and their edge cases."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from naive import step_generator
from naive_teachers import naive_palm, naive_petal, naive_tea
from test_mathematics import CLOSE, EPS, VIEWS, assert_same_run, assert_same_weights, classifier, stream
from test_methods_entropy import NAIVE_OPTIMIZER, OPTIMIZER, decided_classifier
from torch import Tensor, nn

import ctta
from ctta.errors import ConfigError, InputError
from ctta.methods.petal import weight_posterior


def make_snapshots(net: nn.Sequential) -> list[nn.Sequential]:
    """Return networks near one."""
    generator, found = torch.Generator().manual_seed(8), [copy.deepcopy(net) for _ in range(4)]
    for parameter in (p for each in found for p in each.parameters()):
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return found


@pytest.mark.parametrize("has_prior", [False, True])
def test_petal(has_prior: bool) -> None:
    net, threshold = classifier(), 0.408  # open for some batches
    snapshots = [list(each.parameters()) for each in make_snapshots(net)]
    stacked = [torch.stack(list(weights)).detach() for weights in zip(*snapshots, strict=True)]
    mean, variance = [each.mean(0) for each in stacked], [each.var(0, correction=0) for each in stacked]
    expected, student, teacher = naive_petal(
        net,
        stream(),
        optimizer=NAIVE_OPTIMIZER,
        draw=lambda step: VIEWS,
        threshold=threshold,
        decay=0.9,
        quantile=0.3,
        mean=mean if has_prior else None,
        variance=variance if has_prior else None,
        prior_weight=1e-3,
    )
    model = ctta.PETAL(
        net,
        posterior=weight_posterior(net, make_snapshots(net)) if has_prior else None,
        optimizer=OPTIMIZER,
        prior_weight=1e-3,
        decay=0.9,
        restore_quantile=0.3,
        threshold=threshold,
        views=VIEWS,
        batch_stats=1.0,
    )
    assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)
    assert_same_weights(model.teacher, teacher)
    restored = sum(int((p == q).sum()) for p, q in zip(model.student.parameters(), net.parameters(), strict=True))
    assert 0 < restored < sum(p.numel() for p in net.parameters())


def test_a_posterior_is_of_one_network_and_survives_files(tmp_path: Path) -> None:
    net, path = classifier(), tmp_path / "posterior.safetensors"
    posterior = weight_posterior(net, [each.state_dict() for each in make_snapshots(net)])
    posterior.save(path)
    settings = ctta.core.registry.resolve_method("petal").parse([f"posterior={path}", "prior_weight=0.1", "views=0"])
    model, x = ctta.PETAL(net, **settings), stream(16)[0]
    model(x)
    ctta.save(model, tmp_path / "stream.safetensors")
    assert torch.equal(ctta.load(tmp_path / "stream.safetensors", net)(x), model(x))
    other = decided_classifier()
    with pytest.raises(ConfigError):
        ctta.PETAL(other, posterior=ctta.SourceStats.load(path))
    with pytest.raises(ConfigError):
        ctta.PETAL(net, posterior=ctta.source_stats(net, [x]))
    with pytest.raises(InputError):
        weight_posterior(net, [])
    with pytest.raises(InputError):
        weight_posterior(net, [nn.Linear(2, 2)])


@pytest.mark.parametrize(("keep_rates", "fraction"), [(True, 0.5), (False, 1.0)])
def test_palm(keep_rates: bool, fraction: float) -> None:
    net, view = decided_classifier(3.0), VIEWS[1]
    # At 0.4 nats and an L1 norm of 1 of these nearly linear networks, some predictions and some tensors count.
    settings: dict[str, Any] = {
        "temperature": 5.0,
        "max_gradient": 0.3,
        "momentum": 0.3,
        "max_entropy": 0.4,
        "consistency": 0.02,
        "keep_rates": keep_rates,
    }
    expected, student, num_kept = naive_palm(
        net, stream(), lr=5e-3, augment=lambda step, x: x * 0.7, fraction=fraction, **settings
    )
    assert bool(num_kept) is keep_rates
    model = ctta.PALM(net, lr=5e-3, views=(view,), batch_stats=fraction, **settings)
    assert_same_run(model, stream(), expected)
    if fraction < 1:  # a bias that batch statistics undo has no gradient but rounding, of which the sign is arbitrary
        assert_same_weights(model.student, student)
    zero = [not bool(buffer.any()) for buffer in model.sensitivity.averages]
    assert not all(zero) and (keep_rates or any(zero))
    assert model.optimizer is not None and not model.optimizer.state


def test_palm_with_a_persistent_optimizer_keeps_momenta() -> None:
    net, batches = decided_classifier(3.0), stream()
    signs, adam = (ctta.PALM(net, views=VIEWS[1:2], persistent_optimizer=persistent) for persistent in (False, True))
    CLOSE(signs(batches[0]), adam(batches[0]))
    assert_same_weights(signs.student, adam.student)  # the first step is the same
    signs(batches[1]), adam(batches[1])
    assert adam.optimizer is not None and len(adam.optimizer.state) == 8  # two convolutions with biases
    assert any(
        not torch.equal(p, q) for p, q in zip(signs.student.parameters(), adam.student.parameters(), strict=True)
    )


@pytest.mark.parametrize("views", [(), VIEWS[1:2]])
def test_palm_without_sure_predictions_learns_from_views_alone(views: tuple[ctta.views.View, ...]) -> None:
    net = classifier()
    model = ctta.PALM(net, views=views, max_entropy=0.0)
    for x in stream(16)[:3]:
        model(x)
    changed = [not torch.equal(p, q) for p, q in zip(model.student.parameters(), net.parameters(), strict=True)]
    assert any(changed) == bool(views) and model.num_skipped == 0


def test_tea() -> None:
    net, capacity, size, renew = classifier(), 12, 5, 0.3
    buffer = torch.empty(0)
    num_new = 0

    def uniform(count: int, generator: torch.Generator) -> Tensor:
        return 2 * torch.rand(count, 3, 4, 4, generator=generator, dtype=torch.float64) - 1

    def start(step: int, count: int) -> tuple[Tensor, list[int]]:
        nonlocal buffer, num_new
        generator = step_generator(7, step, "buffer")
        if step == 0:
            buffer = uniform(capacity, generator)
        places = torch.randint(capacity, (count,), generator=generator).tolist()
        coins = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
        fresh = uniform(count, generator)
        num_new += sum(coin < renew for coin in coins)
        return torch.stack([fresh[i] if coins[i] < renew else buffer[places[i]] for i in range(count)]), places

    def write_back(places: list[int], samples: Tensor) -> None:
        for place, sample in zip(places, samples, strict=True):
            buffer[place] = sample

    def noise(step: int, k: int, samples: Tensor) -> Tensor:
        generator = step_generator(7, step, "noise")
        draws = [torch.randn(samples.shape, generator=generator, dtype=samples.dtype) for _ in range(k + 1)]
        return draws[k]

    expected, student = naive_tea(
        net, stream(size), optimizer=NAIVE_OPTIMIZER, start=start, write_back=write_back, noise=noise, num_steps=3
    )
    model = ctta.TEA(
        net,
        optimizer=partial(torch.optim.Adam, lr=0.02, eps=EPS),
        num_steps_langevin=3,
        buffer_size=capacity,
        renew=renew,
        batch_stats=1.0,
        seed=7,
    )
    assert_same_run(model, stream(size), expected)
    assert_same_weights(model.student, student)
    CLOSE(model.replay.images, buffer)
    assert 0 < num_new < 20 * size


def test_tea_keeps_the_size_of_its_images() -> None:
    model = ctta.TEA(classifier(), num_steps_langevin=1, buffer_size=4)
    model(stream()[0])
    with pytest.raises(InputError):
        model(torch.rand(2, 3, 5, 4, dtype=torch.float64))

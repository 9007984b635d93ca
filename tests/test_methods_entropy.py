"""Twenty steps of the entropy family agree with the naive implementation to 1e-10."""

from functools import partial
from typing import Any, Literal

import pytest
import torch
from naive import NaiveAdam, step_generator
from naive_entropy import (
    NaiveKalman,
    NaiveSGD,
    Run,
    come,
    naive_delta,
    naive_deyo,
    naive_eata,
    naive_fisher,
    naive_roid,
    naive_rpl,
    naive_sar,
    naive_shot_im,
    naive_slr,
    naive_zerosiam,
    norm_parameters,
    shannon,
)
from test_mathematics import CLOSE, EPS, STEPS, assert_same_run, assert_same_weights, classifier, stream
from torch import Tensor, nn

import ctta
from ctta.methods.deyo import DESTRUCTIONS, destroy_shape

OPTIMIZER, NAIVE_OPTIMIZER = partial(torch.optim.Adam, lr=0.02, eps=EPS), partial(NaiveAdam, lr=0.02, eps=EPS)


def selected_fractions(model: ctta.AdaptiveModel) -> list[float]:
    found = []
    for x in stream():
        model(x)
        assert model.last_step is not None and model.last_step.selected is not None
        found.append(float(model.last_step.selected))
    return found


#: A margin at which some of these nearly uniform predictions are selected, and a redundancy that drops some of them.
SELECTIVE: dict[str, Any] = {"margin": 0.95, "redundancy": 0.9}


@pytest.mark.parametrize("kind", ["softmax", "come"])
def test_eta(kind: Literal["softmax", "come"]) -> None:
    settings = SELECTIVE if kind == "softmax" else SELECTIVE | {"margin": 1.02}
    model = ctta.ETA(classifier(), optimizer=OPTIMIZER, entropy=kind, batch_stats=1.0, **settings)
    expected, student = naive_eata(
        classifier(), stream(), optimizer=NAIVE_OPTIMIZER, entropy=shannon if kind == "softmax" else come, **settings
    )
    assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)
    assert any(0 < fraction < 1 for fraction in selected_fractions(model.reset()))


def test_eata() -> None:
    net = classifier()
    stats = ctta.source_stats(net, stream()[:4])
    model = ctta.EATA(net, source_stats=stats, fisher_weight=50.0, optimizer=OPTIMIZER, batch_stats=1.0, **SELECTIVE)
    fisher = naive_fisher(net, stream()[:4])
    expected, student = naive_eata(
        net, stream(), optimizer=NAIVE_OPTIMIZER, fisher=fisher, fisher_weight=50.0, **SELECTIVE
    )
    assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)


def test_nothing_selected_is_no_step() -> None:
    model = ctta.ETA(classifier(), margin=0.0)
    before = [p.detach().clone() for p in model.student.parameters()]
    assert set(selected_fractions(model)) == {0.0}
    assert all(map(torch.equal, before, model.student.parameters()))
    assert model.num_skipped == 0 and model.optimizer is not None and not model.optimizer.state


def decided_classifier(scale: float = 8.0) -> nn.Sequential:
    """Return a network whose predictions differ in class and in confidence."""
    net = classifier()
    head = net[-1]
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.weight.mul_(scale)
        head.bias.sub_(head.weight @ net[:-1](torch.cat(stream())).mean(0))
    return net


def assert_same(model: ctta.AdaptiveModel, expected: Run) -> None:
    assert_same_run(model, stream(), expected[0])
    student = model.student
    assert isinstance(student, nn.Module)
    assert_same_weights(student, expected[1])


def parameter(net: nn.Module, name: str) -> Tensor:
    return net.get_parameter(name).detach()


@pytest.mark.parametrize("q", [0.8, 0.5])
def test_rpl(q: float) -> None:
    net = decided_classifier()
    assert_same(
        ctta.RPL(net, q=q, optimizer=OPTIMIZER, batch_stats=1.0),
        naive_rpl(net, stream(), optimizer=NAIVE_OPTIMIZER, q=q),
    )


@pytest.mark.parametrize(("weight", "momentum", "clip"), [(0.025, 0.9, 0.99), (1.0, 0.5, 0.6), (1.0, 0.5, None)])
def test_slr(weight: float, momentum: float, clip: float | None) -> None:
    net = decided_classifier()
    settings: dict[str, Any] = {"weight": weight, "momentum": momentum, "clip": clip}
    expected = naive_slr(net, stream(), optimizer=NAIVE_OPTIMIZER, **settings)
    assert_same(ctta.SLR(net, optimizer=OPTIMIZER, batch_stats=1.0, **settings), expected)


def test_the_likelihood_ratio_without_a_clip_has_a_gradient_for_sure_predictions() -> None:
    logits = torch.tensor([[300.0, 0.0, 0.0], [1e4, -1e4, 0.0]], requires_grad=True)
    loss = ctta.functional.soft_likelihood_ratio(logits, clip=None)
    loss.sum().backward()
    assert loss.isfinite().all() and logits.grad is not None and (logits.grad[:, 0] < -0.9).all()


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_shot_im(weight: float) -> None:
    net = decided_classifier(2.0)
    settings: dict[str, Any] = {"pseudo_label_weight": weight, "min_confidence": 0.6}
    expected = naive_shot_im(net, stream(), optimizer=NAIVE_OPTIMIZER, **settings)
    model = ctta.SHOTIM(net, optimizer=OPTIMIZER, batch_stats=1.0, **settings)
    assert_same(model, expected)
    assert torch.equal(parameter(model.student, "6.weight"), parameter(net, "6.weight"))


@pytest.mark.parametrize("destroy", DESTRUCTIONS)
def test_deyo(destroy: Any) -> None:
    net = decided_classifier()
    settings: dict[str, Any] = {"select_below": 0.9, "weight_below": 0.7}

    def shuffle(step: int, x: Tensor) -> Tensor:
        return destroy_shape(x, destroy, step_generator(0, step, "shuffle"))

    selected = []
    model = ctta.DeYO(
        net, destroy=destroy, min_drop=0.02, skip_top=False, optimizer=OPTIMIZER, batch_stats=1.0, **settings
    )
    expected = naive_deyo(
        net,
        stream(),
        parameters=norm_parameters,
        optimizer=NAIVE_OPTIMIZER,
        shuffle=shuffle,
        min_difference=0.02,
        **settings,
    )
    for x, logits in zip(stream(), expected[0], strict=True):
        torch.testing.assert_close(model(x), logits, rtol=0, atol=1e-10)
        assert model.last_step is not None and model.last_step.selected is not None
        selected.append(float(model.last_step.selected))
    assert_same_weights(model.student, expected[1])
    assert 0.1 < sum(selected) / STEPS < 0.9


def test_deyo_leaves_the_top_layers_alone() -> None:
    net = decided_classifier()
    model = ctta.DeYO(net, min_drop=0.0, select_below=1.0)
    for x in stream(16):
        model(x)
    assert not torch.equal(parameter(model.student, "1.weight"), parameter(net, "1.weight"))
    assert torch.equal(parameter(model.student, "4.weight"), parameter(net, "4.weight"))
    assert "skipped_layers" in repr(model)


def test_shuffled_patches_are_the_patches_of_the_same_image_in_another_order() -> None:
    x = torch.arange(2 * 16 * 16.0).reshape(2, 1, 16, 16)
    shuffled = destroy_shape(x, "patches", torch.Generator().manual_seed(0))

    def patches(image: Tensor) -> list[list[float]]:
        return sorted(
            image[0, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4].flatten().tolist() for r in range(4) for c in range(4)
        )

    assert [patches(image) for image in shuffled] == [patches(image) for image in x]
    assert not torch.equal(shuffled, x)


def test_sides_that_the_grid_does_not_divide_are_kept() -> None:
    x = torch.rand(2, 3, 9, 10)
    assert destroy_shape(x, "patches", torch.Generator().manual_seed(0)).shape == x.shape


@pytest.mark.parametrize("kind", ["entropy", "weighted_entropy", "pseudo_label"])
def test_delta(kind: Any) -> None:
    net = decided_classifier(3.0)
    settings: dict[str, Any] = {"norm_momentum": 0.8, "class_momentum": 0.7}
    model = ctta.DELTA(net, optimizer=OPTIMIZER, loss=kind, **settings)
    assert_same(model, naive_delta(net, stream(), optimizer=NAIVE_OPTIMIZER, kind=kind, **settings))
    selected = selected_fractions(model.reset())
    assert any(0 < fraction < 1 for fraction in selected) or kind == "entropy"


def test_delta_deploys_its_averages() -> None:
    """The deployed network normalizes by the averages of the stream, and so predicts what the next step would."""
    model = ctta.DELTA(decided_classifier())
    for x in stream():
        model(x)
    plain = model.deploy()
    torch.testing.assert_close(plain(stream()[0]).detach(), model.predict(stream()[0]), rtol=0, atol=1e-10)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in plain.modules())


def test_delta_survives_classes_that_are_never_predicted() -> None:
    model = ctta.DELTA(decided_classifier())
    model.average.zero_()  # what an average underflows to
    assert model(stream()[0]).isfinite().all() and model.num_skipped == 0


@pytest.mark.parametrize(("kind", "recover_below"), [("softmax", 0.0), ("softmax", 0.75), ("come", 0.0)])
def test_sar(kind: Literal["softmax", "come"], recover_below: float) -> None:
    net = decided_classifier(2.0)
    settings: dict[str, Any] = {"margin": 0.8 if kind == "softmax" else 1.0, "radius": 0.2}
    settings["recover_below"] = recover_below
    logits, student, num_recoveries = naive_sar(
        net,
        stream(),
        parameters=norm_parameters,
        optimizer=partial(NaiveSGD, lr=0.5),
        entropy=shannon if kind == "softmax" else come,
        **settings,
    )
    model = ctta.SAR(net, lr=0.5, entropy=kind, skip_top=False, batch_stats=1.0, **settings)
    assert_same(model, (logits, student))
    assert any(0 < fraction < 1 for fraction in selected_fractions(model.reset()))
    assert 0 < num_recoveries < STEPS if recover_below else num_recoveries == 0


def test_rdumb() -> None:
    model = ctta.RDumb(classifier(), period=7, optimizer=OPTIMIZER, batch_stats=1.0, **SELECTIVE)
    expected = naive_eata(classifier(), stream(), optimizer=NAIVE_OPTIMIZER, reset_every=7, **SELECTIVE)
    assert_same(model, expected)


def flip(step: int, x: Tensor) -> Tensor:
    return x.flip(-1) * 0.9


FLIPPED_VIEWS = (lambda model, x: model(x.flip(-1) * 0.9),)


@pytest.mark.parametrize("prior", ["official", "bayes", None])
def test_roid(prior: Literal["official", "bayes"] | None) -> None:
    net = decided_classifier(2.0)
    expected = naive_roid(
        net, stream(), optimizer=NAIVE_OPTIMIZER, augment=flip, source_fraction=0.1, correct_prior=prior
    )
    model = ctta.ROID(net, optimizer=OPTIMIZER, views=FLIPPED_VIEWS, keep=0.9, prior=prior, batch_stats=1.0)
    assert_same(model, expected)
    assert any(0 < fraction < 1 for fraction in selected_fractions(model.reset()))


@pytest.mark.parametrize("pull_to", ["filtered", "predicted"])
def test_cmf(pull_to: Any) -> None:
    net = decided_classifier(2.0)
    num_trained = sum(parameter.numel() for layer in (net[1], net[4]) for parameter in layer.parameters())
    kalman = NaiveKalman(num_trained, alpha=0.9, gamma=0.8, q=100.0, pull_to=pull_to)
    expected = naive_roid(net, stream(), optimizer=NAIVE_OPTIMIZER, augment=flip, kalman=kalman)
    settings: dict[str, Any] = {"alpha": 0.9, "gamma": 0.8, "noise": 100.0, "pull_to": pull_to}
    model = ctta.CMF(net, optimizer=OPTIMIZER, views=FLIPPED_VIEWS, batch_stats=1.0, **settings)
    assert_same(model, expected)


def test_averages_have_the_precision_of_the_network() -> None:
    for method in (ctta.ROID, ctta.CMF, ctta.SLR):
        assert method(classifier().float()).get_buffer("average").dtype == torch.float32  # no device lacks it


def test_roid_divides_by_the_configured_batch_size() -> None:
    net, x = decided_classifier(2.0), stream()[0]
    models = [
        ctta.ROID(net, optimizer=partial(torch.optim.SGD, lr=0.1), views=FLIPPED_VIEWS, keep=1.0, batch_size=size)
        for size in (None, 10)
    ]
    moved = []
    for model in models:
        model(x)
        moved.append(parameter(model.student, "1.weight") - parameter(net, "1.weight"))
    torch.testing.assert_close(moved[0], 2 * moved[1])


@pytest.mark.parametrize("map_rate", [10.0, 1.0])
def test_zerosiam(map_rate: float) -> None:
    net = decided_classifier()
    expected, mapping = naive_zerosiam(net, stream(), lr=0.01, map_rate=map_rate)
    model = ctta.ZeroSiam(net, lr=0.01, map_rate=map_rate, batch_stats=1.0)
    assert_same(model, expected)
    CLOSE(model.map.weight, mapping)
    assert (mapping - torch.eye(len(mapping))).abs().max() > 1e-3, "the map learns"

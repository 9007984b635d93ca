"""Twenty steps of every method and every setting of CoTTA agree with the naive implementation to 1e-10."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from naive import (
    NaiveAdam,
    NaiveBatchNorm,
    NaiveNesterov,
    naive_copy,
    naive_cotta,
    naive_self_training,
    naive_test_aug,
    step_generator,
)
from torch import Tensor, nn

import ctta
from ctta.views import Average, ImageViews

STEPS = 20
#: A student that equals its teacher has a gradient of zero up to rounding. With its default eps Adam amplifies that
#: noise, differently in the two implementations; with a large one they stay together.
EPS = 0.1
CLOSE = partial(torch.testing.assert_close, rtol=0, atol=1e-10)


def classifier() -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 2, stride=2),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Linear(12, 4),
    )
    return with_statistics(net)


def pixel_classifier() -> nn.Sequential:
    torch.manual_seed(4)
    return with_statistics(
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))
    )


def with_statistics(net: nn.Sequential) -> nn.Sequential:
    """Give the BatchNorms of a network statistics and parameters that differ from the initial ones."""
    for layer in net:
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None and layer.running_var is not None
            layer.running_mean.normal_(0.1, 0.3)
            layer.running_var.uniform_(0.5, 2)
            nn.init.normal_(layer.weight, 1, 0.2)
            nn.init.normal_(layer.bias, 0, 0.2)
    return net.double().eval()


def stream(size: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(size, 3, 4, 4, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def norm_parameters(net: nn.Sequential) -> list[nn.Parameter]:
    return [p for layer in net if isinstance(layer, NaiveBatchNorm) for p in (layer.weight, layer.bias)]


VIEWS = (
    lambda model, x: model(x.flip(-1)),
    lambda model, x: model(x * 0.7),
    lambda model, x: model((x + 0.2).clamp(0, 1)),
)
DENSE_VIEWS = (lambda model, x: model(x.flip(-1)).flip(-1), lambda model, x: model(x * 0.7))


def assert_same_run(model: ctta.AdaptiveModel, batches: list[Tensor], expected: list[Tensor]) -> None:
    CLOSE([model(x) for x in batches], expected)  # the message of a failure names the step


def assert_same_weights(actual: nn.Module, expected: nn.Module) -> None:
    CLOSE([p.detach() for p in actual.parameters()], [p.detach() for p in expected.parameters()])


def test_source() -> None:
    net = classifier()
    assert_same_run(ctta.Source(net), stream(), [naive_copy(net, 0.0)(x).detach() for x in stream()])


@pytest.mark.parametrize("fraction", [1.0, 0.3, 0.0])
def test_bn_stats(fraction: float) -> None:
    net = classifier()
    expected = [naive_copy(net, fraction)(x).detach() for x in stream()]
    assert_same_run(ctta.BNStats(net, batch_stats=fraction), stream(), expected)


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_test_aug(average: Average) -> None:
    net = classifier()
    expected = naive_test_aug(net, stream(), draw=lambda step: VIEWS, average=average)
    assert_same_run(ctta.TestAug(net, views=VIEWS, average=average, batch_stats=1.0), stream(), expected)


@pytest.mark.parametrize("fraction", [1.0, 0.3])
@pytest.mark.parametrize("build", [classifier, pixel_classifier])
@pytest.mark.parametrize(("method", "loss"), [(ctta.Tent, "entropy"), (ctta.PseudoLabel, "argmax")])
def test_self_training(
    method: type[ctta.Tent | ctta.PseudoLabel], loss: str, build: Callable[[], nn.Sequential], fraction: float
) -> None:
    net, batches = build(), stream(2 if build is pixel_classifier else 5)
    model = method(net, optimizer=partial(torch.optim.Adam, lr=0.01, eps=EPS), batch_stats=fraction)
    naive_optimizer = partial(NaiveAdam, lr=0.01, eps=EPS)
    expected, student = naive_self_training(
        net, batches, parameters=norm_parameters, loss=loss, optimizer=naive_optimizer, fraction=fraction
    )
    assert_same_run(model, batches, expected)
    assert_same_weights(model.student, student)


DEFAULTS: dict[str, Any] = {
    "gate": "batch",
    "average": "logits",
    "predict_with": "refined",
    "loss": "cross_entropy",
    "threshold": 0.408,
    "decay": 0.9,
    "restore": 0.1,
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"gate": "element"},
    {"average": "probabilities"},
    {"predict_with": "teacher"},
    {"loss": "symmetric"},
    {"loss": "hard"},
    {"threshold": -1.0},
    {"threshold": 0.0},
    {"threshold": 1.5},
    {"decay": 0.0},
    {"decay": 1.0},
    {"restore": 0.0},
    {"restore": 1.0},
    {"batch_stats": 0.3},
    {"batch_stats": 0.0},
    {"views": ()},
    {"views": (), "restore": 0.0},
    {"gate": "element", "average": "probabilities", "predict_with": "teacher"},
    {"gate": "element", "average": "probabilities", "loss": "symmetric"},
    {"gate": "element", "predict_with": "teacher", "batch_stats": 0.0},
    {"gate": "element", "average": "probabilities", "loss": "hard", "batch_stats": 0.0},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: ",".join(f"{k}={v}" for k, v in change.items()))
@pytest.mark.parametrize("build", [classifier, pixel_classifier])
def test_cotta(build: Callable[[], nn.Sequential], change: dict[str, Any]) -> None:
    net, settings = build(), DEFAULTS | change
    is_dense = build is pixel_classifier
    batches = stream(2 if is_dense else 5)
    views = settings.pop("views", DENSE_VIEWS if is_dense else VIEWS)
    fraction = settings.pop("batch_stats", 1.0)
    optimizer = partial(torch.optim.Adam, lr=0.02, eps=EPS)
    model = ctta.CoTTA(net, optimizer=optimizer, views=views, batch_stats=fraction, seed=7, **settings)
    naive_optimizer = partial(NaiveAdam, lr=0.02, eps=EPS)
    expected, student, teacher = naive_cotta(
        net, batches, draw=lambda step: views, optimizer=naive_optimizer, fraction=fraction, seed=7, **settings
    )
    assert_same_run(model, batches, expected)
    assert_same_weights(model.student, student)
    assert_same_weights(model.teacher, teacher)


def augmented_fractions(model: ctta.AdaptiveModel) -> list[float]:
    fractions = []
    for x in stream():
        model(x)
        assert model.last_step is not None and model.last_step.augmented is not None
        fractions.append(float(model.last_step.augmented))
    return fractions


def test_the_gate_opens_and_closes_on_these_streams() -> None:
    """Otherwise the settings of the gate would not be distinguished above."""
    build = partial(ctta.CoTTA, views=VIEWS, batch_stats=1.0)
    per_element = build(classifier(), **DEFAULTS | {"gate": "element"})
    assert any(0 < fraction < 1 for fraction in augmented_fractions(per_element))
    assert set(augmented_fractions(build(classifier(), **DEFAULTS))) == {0.0, 1.0}


def test_cotta_with_drawn_views_and_nesterov() -> None:
    net = classifier()
    views = ctta.views.image_views(3)
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
    model = ctta.CoTTA(net, optimizer=optimizer, views=views, batch_stats=1.0, seed=2, **DEFAULTS)
    expected, student, teacher = naive_cotta(
        net,
        stream(),
        draw=lambda step: views.draw(step_generator(2, step, "views")),
        optimizer=partial(NaiveNesterov, lr=0.05, momentum=0.9),
        seed=2,
        **DEFAULTS,
    )
    assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)
    assert_same_weights(model.teacher, teacher)


def test_defaults_are_the_official_settings_for_cifar10c() -> None:
    official = ctta.CoTTA.official(classifier())
    assert repr(ctta.CoTTA(classifier(), batch_stats=1.0)) == repr(official)
    assert ctta.CoTTA(classifier()).batch_stats == "auto"
    settings = official.hyperparameters
    optimizer = settings.pop("optimizer")
    assert (optimizer.func, optimizer.keywords) == (torch.optim.Adam, {"lr": 1e-3})
    assert settings == {
        "decay": 0.999,
        "restore": 0.01,
        "threshold": 0.92,
        "views": ctta.views.image_views(32),
        "gate": "batch",
        "gate_with": "source",
        "average": "logits",
        "view_weights": "equal",
        "predict_with": "refined",
        "loss": "cross_entropy",
        "views_at_once": 1,
        "views_for": "all",
        "policies": (),
        "batch_stats": 1.0,
        "seed": 0,
        "output": None,
    }


def test_the_official_settings_for_segmentation() -> None:
    settings = ctta.CoTTA.official_segmentation(pixel_classifier()).hyperparameters
    optimizer = settings.pop("optimizer")
    assert optimizer.func is torch.optim.Adam and optimizer.keywords == {"lr": pytest.approx(6e-5 / 8)}
    scales = {(scale, flip) for scale in (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0) for flip in (False, True)}
    views = settings.pop("views")
    assert len(views) == 14 and {(view.scale, view.flip) for view in views} == scales
    assert settings == {
        "decay": 0.999,
        "restore": 0.01,
        "threshold": 0.69,
        "gate": "element",
        "gate_with": "source",
        "average": "probabilities",
        "view_weights": "equal",
        "predict_with": "refined",
        "loss": "hard",
        "views_at_once": 1,
        "views_for": "all",
        "policies": (),
        "batch_stats": 0.0,
        "seed": 0,
        "output": None,
    }


def test_two_settings_make_the_official_segmentation_preset_the_paper() -> None:
    changes: dict[str, Any] = {"loss": "cross_entropy", "predict_with": "teacher"}
    model = ctta.CoTTA.official_segmentation(pixel_classifier(), **changes)
    names = ("optimizer", "views", "threshold", "batch_stats")
    task = {name: model.hyperparameters[name] for name in names}
    assert repr(model) == repr(ctta.CoTTA.paper(pixel_classifier(), **task))


def test_the_paper_preset_and_its_overrides() -> None:
    model = ctta.CoTTA.paper(classifier(), restore=0.001)
    assert (model.gate, model.average, model.predict_with) == ("element", "probabilities", "teacher")
    assert (model.loss, model.decay, model.restore) == ("cross_entropy", 0.999, 0.001)


def test_the_fast_preset_differs_from_the_defaults_only_in_its_views() -> None:
    fast, default = ctta.CoTTA.fast(classifier()), ctta.CoTTA(classifier())
    differing = {name for name, value in fast.hyperparameters.items() if value != default.hyperparameters[name]}
    assert differing == {"views"}
    assert isinstance(fast.views, ImageViews) and fast.views == ctta.views.fast_image_views()
    assert fast.views.num_views == 8
    assert fast.views.balanced
    assert ctta.CoTTA.fast(classifier(), views=(), decay=0.5).hyperparameters["views"] == ()

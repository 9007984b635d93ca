"""Twenty steps of the methods that use features agree with naive implementations to 1e-10, and their edge cases."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from naive import naive_copy
from naive_features import (
    NaiveUnmixed,
    naive_adacontrast,
    naive_dota,
    naive_lame,
    naive_memo,
    naive_neo,
    naive_rmt,
    naive_santa,
    naive_t3a,
    naive_tda,
)
from test_mathematics import CLOSE, assert_same_run, assert_same_weights, pixel_classifier, stream
from test_methods_entropy import NAIVE_OPTIMIZER, OPTIMIZER, decided_classifier
from torch import Tensor, nn

import ctta
from ctta.methods.parts.contrast import Projector, Ring, nearest_prototypes
from ctta.views import SplitView


@pytest.mark.parametrize("max_iterations", [1, 100])
def test_lame(max_iterations: int) -> None:
    net = decided_classifier(2.0)
    expected = naive_lame(net, stream(9), max_iterations=max_iterations)
    assert_same_run(ctta.LAME(net, max_iterations=max_iterations), stream(9), expected)


@pytest.mark.parametrize("first_iterations", [1, 2, 50])
def test_lame_stops_at_the_same_iteration_however_often_energies_are_read(
    first_iterations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = ctta.LAME(decided_classifier(2.0)), stream(9)[0]
    expected = model(x)
    monkeypatch.setattr("ctta.methods.lame.FIRST_ITERATIONS", first_iterations)
    assert torch.equal(model(x), expected)


def test_lame_of_fewer_images_than_neighbors_and_of_equal_images_is_finite() -> None:
    model = ctta.LAME(decided_classifier())
    x = stream(1)[0]
    for batch in (x, x.expand(6, -1, -1, -1)):
        logits = model(batch)
        assert logits.isfinite().all()
        CLOSE(logits.exp().sum(1), torch.ones(len(batch), dtype=torch.float64))


def test_lame_gives_neighbors_the_same_label() -> None:
    model = ctta.LAME(decided_classifier(), affinity="knn", num_neighbors=1)
    x = stream(4)[0]
    logits = model(torch.cat([x, x + 1e-9]))
    assert torch.equal(logits[:4].argmax(1), logits[4:].argmax(1))


@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("to_source", [False, True])
def test_neo(decay: float | None, to_source: bool) -> None:
    net = decided_classifier()
    stats = ctta.source_stats(net, [stream()[0]], batch_stats=0.0) if to_source else None
    target = None if stats is None else stats["feature_mean"]
    model = ctta.NEO(net, decay=decay, source_stats=stats)
    assert_same_run(model, stream(), naive_neo(net, stream(), decay=decay, target=target))
    if decay is None:
        assert int(model.num_seen) == sum(map(len, stream()))


def test_neo_deploys_its_shift_as_a_bias() -> None:
    """Also into a head without one, and a head that is a convolution."""
    net = decided_classifier()
    model = ctta.NEO(net, decay=0.5)
    *batches, last = stream()
    for x in batches:
        model(x)
    body, head = net[:-1], net[-1]
    expected = head(body(last) - model.center)
    plain = model.deploy()
    CLOSE(plain(last), expected)
    assert not any(module._forward_pre_hooks for module in plain.modules())
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in net.named_parameters()]
    without_bias = nn.Sequential(*list(net)[:-1], nn.Linear(12, 4, bias=False).double()).eval()
    moved = ctta.NEO(without_bias)
    moved(last)
    CLOSE(moved.deploy()(last), without_bias[-1](without_bias[:-1](last) - moved.center))


def test_neo_predicts_the_first_image_by_the_bias() -> None:
    net = decided_classifier()
    head = net[-1]
    assert isinstance(head, nn.Linear)
    CLOSE(ctta.NEO(net)(stream()[0][:1]), head.bias.detach().unsqueeze(0))


def test_neo_keeps_its_center_if_a_batch_overflows() -> None:
    net = decided_classifier()
    for name, buffer in net.named_buffers():
        if name.endswith("running_var"):
            buffer.fill_(1e-5)  # so that features overflow
    model = ctta.NEO(net)
    model(stream()[0])
    before, seen = model.center.clone(), model.num_seen.clone()
    model(torch.full_like(stream()[0], 1e308))
    assert torch.equal(model.center, before) and torch.equal(model.num_seen, seen)


@pytest.mark.parametrize(("num_components", "momentum"), [(16, 0.1), (1, 0.3)])
def test_unmix_tns(num_components: int, momentum: float) -> None:
    net = decided_classifier()
    generator = ctta.UnMixTNS(net).generator("components")
    naive = naive_copy(net, 0.0)
    for number, layer in enumerate(net):
        if isinstance(layer, nn.BatchNorm2d):
            noise = torch.randn(num_components, layer.num_features, generator=generator, dtype=torch.float64)
            naive[number] = NaiveUnmixed(layer, num_components, noise, momentum, 8)
    model = ctta.UnMixTNS(net, num_components=num_components, momentum=momentum, max_batch_size=8)
    assert_same_run(model, stream(), [naive(x).detach() for x in stream()])


def test_unmix_tns_deploys_its_components() -> None:
    model = ctta.UnMixTNS(decided_classifier())
    *batches, last = stream()
    for x in batches:
        model(x)
    plain, expected = model.deploy(), model.predict(last)
    CLOSE(plain(last), expected)
    CLOSE(torch.cat([plain(image.unsqueeze(0)) for image in last]), expected)
    model(last)
    CLOSE(plain(last), expected)
    estimated = model.deploy([last])
    assert not any(module._forward_pre_hooks for module in estimated.modules())


@pytest.mark.parametrize("num_supports", [1, 3, 100])
def test_t3a(num_supports: int) -> None:
    net = decided_classifier()
    expected = naive_t3a(net, stream(), num_supports=num_supports)
    model = ctta.T3A(net, num_supports=num_supports)
    assert_same_run(model, stream(), expected)
    assert model.features.shape == (4, num_supports, 12)


@pytest.mark.parametrize(("weight", "num_negative"), [(2.0, 2), (4.0, 0)])
def test_tda(weight: float, num_negative: int) -> None:
    net = decided_classifier(40.0)
    expected = naive_tda(net, stream(), weight=weight, num_negative=num_negative)
    model = ctta.TDA(net, positive_weight=weight, num_negative=num_negative)
    assert_same_run(model, stream(), expected)
    assert model.positive_entropies.isfinite().all(1).any(), "a cache is full"


@pytest.mark.parametrize(("rate", "most"), [(0.02, 0.1), (0.001, 1.0)])
def test_dota(rate: float, most: float) -> None:
    net = decided_classifier()
    expected = naive_dota(net, stream(), rate=rate, most=most)
    assert_same_run(ctta.DOTA(net, weight_rate=rate, max_weight=most), stream(), expected)


def labeled_stats(net: nn.Sequential) -> ctta.SourceStats:
    """Return statistics of labeled images, of which the last class has none."""
    labels = torch.arange(sum(map(len, stream()))) % 3
    return ctta.source_stats(net, stream(), labels)


def prototypes(net: nn.Sequential) -> Tensor:
    """Return the mean feature of every class that has images."""
    features = torch.cat([naive_copy(net, 1.0)[:-1](x) for x in stream()]).detach()
    return torch.stack([torch.stack(list(features[label::3])).mean(0) for label in range(3)])


def shift_colors(step: int, x: Tensor) -> Tensor:
    return (x * 0.6 + 0.3).flip(-1)


CONTRAST: dict[str, Any] = {
    "views": [lambda model, x: model(shift_colors(0, x))],
    "temperature": 0.3,
    "contrast_weight": 0.7,
    "projection": 6,
    "optimizer": OPTIMIZER,
    "batch_stats": 1.0,
}
NAIVE_CONTRAST: dict[str, Any] = {
    "augment": shift_colors,
    "temperature": 0.3,
    "contrast_weight": 0.7,
    "optimizer": NAIVE_OPTIMIZER,
}


def naive_projector(projector: Projector) -> nn.Module:
    return copy.deepcopy(nn.Sequential(projector.hidden, nn.ReLU(), projector.outputs))


def test_santa() -> None:
    net = decided_classifier(2.0)
    model = ctta.SANTA(net, source_stats=labeled_stats(net), **CONTRAST)
    projector = naive_projector(model.projector)
    expected, student = naive_santa(net, stream(), projector=projector, prototypes=prototypes(net), **NAIVE_CONTRAST)
    assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)
    assert not torch.equal(model.projector.hidden.weight, projector.get_parameter("0.weight"))


def test_rmt() -> None:
    net = decided_classifier(2.0)
    model = ctta.RMT(net, source_stats=labeled_stats(net), decay=0.9, **CONTRAST)
    projector = naive_projector(model.projector)
    expected, student, teacher = naive_rmt(
        net, stream(), projector=projector, prototypes=prototypes(net), decay=0.9, **NAIVE_CONTRAST
    )
    assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)
    assert_same_weights(model.teacher, teacher)


def test_a_class_without_source_images_is_never_the_nearest() -> None:
    net = decided_classifier()
    stats = labeled_stats(net)
    assert stats["class_counts"].tolist()[3] == 0
    features = -stats["class_means"][:3].sum(0, keepdim=True)  # a negative cosine to most classes, 0 to the last
    assert any(torch.equal(nearest_prototypes(features, stats)[0], mean) for mean in stats["class_means"][:3])


def test_projectors_depend_on_the_seed_alone() -> None:
    one, same, other = Projector(5, 4, 0), Projector(5, 4, 0), Projector(5, 4, 1)
    assert torch.equal(one.hidden.weight, same.hidden.weight)
    assert not torch.equal(one.hidden.weight, other.hidden.weight)
    assert one.hidden.weight.abs().max() < 5**-0.5 and one.outputs.bias.abs().max() < 0.5


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"contrast_weight": -1.0}, {"projection": 0}])
def test_settings_of_the_contrast_are_checked(settings: dict[str, Any]) -> None:
    net = decided_classifier()
    with pytest.raises(ctta.ConfigError, match=next(iter(settings))):
        ctta.SANTA(net, source_stats=labeled_stats(net), **settings)
    with pytest.raises(ctta.ConfigError):
        ctta.RMT(net)


def test_methods_of_images_refuse_pixels() -> None:
    net = pixel_classifier()
    stats = ctta.source_stats(net, stream(2))
    with pytest.raises(ctta.ConfigError):
        ctta.SANTA(net, source_stats=stats)(stream()[0])


class Darker(SplitView):
    """Scale the values of all images."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def augment(self, x: Tensor) -> Tensor:
        return x * self.factor

    def align(self, logits: Tensor, x: Tensor) -> Tensor:
        return logits


FACTORS = (1.0, 0.3, 0.6)


def darken(step: int, x: Tensor) -> Tensor:
    factors = torch.tensor(FACTORS, dtype=x.dtype).repeat(len(x) // len(FACTORS))
    return x * factors.view(-1, 1, 1, 1)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9)])
def test_memo(optimizer: Any) -> None:
    net = decided_classifier(2.0)
    model = ctta.MEMO(net, views=[Darker(factor) for factor in FACTORS], optimizer=optimizer, lr=0.5)
    expected = naive_memo(net, stream(), lr=0.5, make_views=darken, num_views=3)
    assert_same_run(model, stream(), expected)
    CLOSE(model(torch.cat(stream())), torch.cat(expected))  # batches do not matter
    unadapted = ctta.BNStats(net, batch_stats=1 / 17)
    assert (unadapted(stream(1)[0]) - expected[0][:1]).abs().max() > 0.01
    assert_same_weights(model.adapted, net)
    assert model.optimizer is not None and not model.optimizer.state


def test_memo_draws_the_views_of_each_image_anew() -> None:
    net, x = decided_classifier(2.0), stream(1)[0].expand(2, -1, -1, -1)
    logits = ctta.MEMO(net, lr=0.5, views=ctta.views.image_views(2))(x)
    assert not torch.equal(logits[0], logits[1])


def test_memo_needs_views_that_it_can_stack() -> None:
    with pytest.raises(TypeError, match="augment"):
        ctta.MEMO(decided_classifier(), views=[lambda model, x: model(x)])
    with pytest.raises(ctta.ConfigError):
        ctta.MEMO(decided_classifier(), views=())


def test_an_image_without_a_finite_loss_is_predicted_by_the_source() -> None:
    net = decided_classifier()
    model = ctta.MEMO(net, views=[Darker(1.0), Darker(float("nan"))])
    CLOSE(model(stream(1)[0]), ctta.BNStats(net, batch_stats=1 / 17)(stream(1)[0]))
    assert model.num_skipped == 1 and model.last_step is not None and model.last_step.skipped


@pytest.mark.parametrize("labels_first", [True, False])
def test_adacontrast(labels_first: bool) -> None:
    """The bank and the queue wrap around, and neighbors vote from the third batch on."""
    net = decided_classifier(2.0)
    settings: dict[str, Any] = {
        "num_neighbors": 3,
        "start_after": 10,
        "bank_size": 23,
        "temperature": 0.3,
        "decay": 0.9,
        "momentum": 0.2,
        "labels_first": labels_first,
    }
    model = ctta.AdaContrast(
        net,
        weak=[lambda model, x: model(x.flip(-1))],
        strong=[lambda model, x: model(x * 0.7), lambda model, x: model((x + 0.2).clamp(0, 1))],
        queue_size=13,
        optimizer=OPTIMIZER,
        **settings,
    )
    queue = model.past.queue
    features, labels = queue["features"].clone(), queue["labels"].tolist()
    expected, student, averaged = naive_adacontrast(
        net,
        stream(),
        optimizer=NAIVE_OPTIMIZER,
        weak=lambda step, x: x.flip(-1),
        query=lambda step, x: x * 0.7,
        key=lambda step, x: (x + 0.2).clamp(0, 1),
        queue=list(zip(features, labels, strict=True)),
        **settings,
    )
    assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)
    for adapted, s, a in zip(model.averaged.parameters(), student.parameters(), averaged.parameters(), strict=True):
        CLOSE(adapted.detach(), (0.9 * a + 0.1 * s).detach())  # here the average already has the last step


def test_a_ring_keeps_the_latest_rows() -> None:
    ring = Ring({"features": torch.zeros(3, 1)})
    for rows in ([[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0], [7.0], [8.0]]):
        ring.add_({"features": torch.tensor(rows)})
    assert sorted(ring["features"].flatten().tolist()) == [6.0, 7.0, 8.0] and ring.num_added == 8
    ring.add_({"features": torch.tensor([[9.0]])})
    assert sorted(ring["features"].flatten().tolist()) == [7.0, 8.0, 9.0]


def test_adacontrast_needs_one_weak_and_two_strong_views() -> None:
    with pytest.raises(ctta.ConfigError):
        ctta.AdaContrast(decided_classifier(), strong=ctta.views.image_views(1))(stream()[0])

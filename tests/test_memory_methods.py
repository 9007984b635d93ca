"""Twenty steps of the methods with a memory agree with naive implementations to 1e-10, and their edge cases."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from naive import NaiveAdam
from naive_memory import (
    NaiveBalancedReservoir,
    NaiveLatest,
    NaiveTimelyMemory,
    naive_bn_alpha,
    naive_bn_ema,
    naive_note,
    naive_note_iid,
    naive_petta,
    naive_rotta,
)
from naive_teachers import NaiveUniformMemory, naive_sotta
from naive_tribe import naive_tribe
from test_mathematics import CLOSE, EPS, assert_same_run, assert_same_weights, classifier, pixel_classifier, stream
from torch import Tensor, nn

import ctta
from ctta.methods.parts.memory import MemoryModel
from ctta.nn.running import running_statistics
from ctta.testing import CHECKS, NETWORKS, ContractCase

ADAM = partial(torch.optim.Adam, lr=0.01, eps=EPS)
NAIVE_ADAM = partial(NaiveAdam, lr=0.01, eps=EPS)
VIEWS = (lambda model, x: model(x.flip(-1) * 0.9),)


def decided_classifier(scale: float = 8.0) -> nn.Sequential:
    """Return a network whose predictions differ in class and in confidence."""
    net = classifier()
    head = net[-1]
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.weight.mul_(scale)
        head.bias.sub_(head.weight @ net[:-1](torch.cat(stream())).mean(0))
    return net


def augment(number: int, x: Tensor) -> Tensor:
    return x.flip(-1) * 0.9


def assert_same_statistics(actual: nn.Module, expected: nn.Module) -> None:
    naive = [layer for layer in expected.modules() if hasattr(layer, "variance")]
    values = [torch.as_tensor(value) for layer in naive for value in (layer.mean, layer.variance)]
    CLOSE(running_statistics(actual), [torch.stack(list(value)) for value in values])


def random_draws(seed: int) -> tuple[Callable[[int], int], Callable[[], float]]:
    generator = torch.Generator().manual_seed(seed)
    return (
        lambda bound: int(torch.randint(bound, (), generator=generator)),
        lambda: float(torch.rand((), generator=generator, dtype=torch.float64)),
    )


# Seven images per update cross the batches of five, and a memory of six has to evict.
@pytest.mark.parametrize(("memory_size", "update_every"), [(6, 7), (4, 2)])
def test_rotta(memory_size: int, update_every: int) -> None:
    net = decided_classifier()
    settings: dict[str, Any] = {"update_every": update_every, "decay": 0.9}
    with mock.patch.object(NaiveTimelyMemory, "evict", autospec=True, side_effect=NaiveTimelyMemory.evict) as evict:
        expected, student, teacher = naive_rotta(
            net, stream(), optimizer=NAIVE_ADAM, augment=augment, capacity=memory_size, alpha=0.05, **settings
        )
    assert 10 < evict.call_count < 100
    model = ctta.RoTTA(net, optimizer=ADAM, memory_size=memory_size, views=VIEWS, **settings)
    assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)
    assert_same_weights(model.teacher, teacher)
    assert_same_statistics(model.student, student)
    assert_same_statistics(model.teacher, teacher)
    assert len(set(torch.cat(expected).argmax(1).tolist())) == 4
    assert int(model.memory.num_seen) == 100


@pytest.mark.parametrize("loss", ["symmetric", "cross_entropy"])
@pytest.mark.parametrize("divergence", ["official", "paper"])
def test_petta(loss: Any, divergence: Any) -> None:
    net = decided_classifier()
    x = torch.cat(stream(19))[100:]  # other images than the stream's
    stats = ctta.source_stats(net, [x], batch_stats=0.0)
    features, labels = nn.Sequential(*list(net)[:-1])(x).detach(), net(x).argmax(1)
    own = [features[labels == c] for c in range(4)]
    assert min(map(len, own)) > 1
    settings: dict[str, Any] = {"teacher_rate": 0.1, "regularization": 5.0, "loss": loss, "divergence": divergence}
    expected, student, teacher, divergences = naive_petta(
        net,
        stream(),
        optimizer=NAIVE_ADAM,
        augment=augment,
        means=torch.stack([each.mean(0) for each in own]),
        variances=torch.stack([each.var(0, correction=1) for each in own]),
        capacity=6,
        **settings,
    )
    assert divergences[0] == 0 and 0.01 < max(divergences) < 0.99
    model = ctta.PeTTA(net, source_stats=stats, optimizer=ADAM, memory_size=6, views=VIEWS, **settings)
    assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)
    assert_same_weights(model.teacher, teacher)
    assert_same_statistics(model.student, student)
    assert_same_statistics(model.teacher, teacher)


@pytest.mark.parametrize("num_images", [0, 1])
def test_petta_does_not_measure_classes_without_a_variance_of_source_features(num_images: int) -> None:
    net, x = decided_classifier(), torch.cat(stream())
    labels = net(x).argmax(1)
    own = (labels == 3).nonzero().squeeze(1)
    others = (labels != 3).nonzero().squeeze(1)
    chosen = x[torch.cat([others, own[:num_images]])]
    stats = ctta.source_stats(net, [chosen], batch_stats=0.0)
    assert stats["class_counts"][3] == num_images
    model = ctta.PeTTA(net, source_stats=stats, teacher_rate=0.5, views=VIEWS, lr=0.1)
    model(x[own])  # only of this class; the first step has no divergence yet
    before = model.teacher.get_parameter("1.weight").clone()
    model(x[own])
    assert (model.teacher.get_parameter("1.weight") - before).abs().max() > 0.01, "a divergence of 1 stops the teacher"


@pytest.mark.parametrize("average", ["entries", "images"])
def test_note(average: Any) -> None:
    net = decided_classifier()
    memory = NaiveBalancedReservoir(6, 4, *random_draws(1))
    settings: dict[str, Any] = {"update_every": 7, "momentum": 0.1}
    expected, student = naive_note(
        net,
        stream(),
        optimizer=NAIVE_ADAM,
        memory=memory,
        use_running=False,
        average_over_classes=average == "entries",
        **settings,
    )
    model = ctta.NOTE(net, optimizer=ADAM, memory_size=6, average=average, **settings)
    generator = torch.Generator().manual_seed(1)
    with mock.patch.object(model, "generator", lambda purpose: generator):
        assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)
    assert_same_statistics(model.student, student)
    assert sorted(memory.seen)[-1] > 2 * sorted(memory.seen)[1] and sum(memory.seen) == 100
    CLOSE(model.memory.recall()[0], torch.stack(list(memory.images())))


@pytest.mark.parametrize("iabn", [0.4, None])
def test_note_on_streams_that_are_not_sorted(iabn: float | None) -> None:
    net = decided_classifier()
    settings: dict[str, Any] = {"update_every": 7}
    if iabn is None:  # the statistics of the batch alone, but for its variance, which is then biased
        expected, student = naive_note(
            net, stream(), optimizer=NAIVE_ADAM, memory=NaiveLatest(6), use_running=False, by_batch=True, **settings
        )
    else:
        expected, student = naive_note_iid(net, stream(), optimizer=NAIVE_ADAM, capacity=6, iabn=iabn, **settings)
    model = ctta.NOTE(net, optimizer=ADAM, memory_size=6, iabn=iabn, iid=True, **settings)
    assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)
    for ours, theirs in zip(model.student.buffers(), model.source.buffers(), strict=True):
        assert torch.equal(ours, theirs)  # nothing follows the stream but the weights
    x = stream()[0]
    CLOSE(model.deploy()(x).detach(), model.predict(x))
    assert not torch.allclose(model.deploy()(x), model.deploy([x])(x), atol=1e-6) or iabn is None


def test_the_preset_of_note_for_streams_that_are_not_sorted() -> None:
    model = ctta.adapt(decided_classifier(), "note_iid_stream", iabn=4)
    assert isinstance(model, ctta.NOTE) and model.iid and model.iabn == 4
    assert model.optimizer is not None and model.optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize(
    "check", ["check_resume_is_bit_identical", "check_predict_equals_next_adapt", "check_deploys_plain_network"]
)
def test_note_on_such_streams_keeps_the_contract(check: str) -> None:
    settings = {"iid": True, "iabn": 0.5, "memory_size": 8, "update_every": 6}
    CHECKS[check](ContractCase(ctta.NOTE, NETWORKS["batch_norm"], settings))


def lower_norm(net: nn.Sequential) -> list[nn.Parameter]:
    """Return the parameters of the first of two norm layers; the second one is the top."""
    return [*net[1].parameters()]


@pytest.mark.parametrize("freeze_top", [True, False])
def test_sotta(freeze_top: bool) -> None:
    net = decided_classifier(30.0)
    memory = NaiveUniformMemory(6, 4, random_draws(1)[0])
    settings: dict[str, Any] = {"update_every": 7, "min_confidence": 0.7}
    with mock.patch.object(memory, "add", side_effect=memory.add) as add:
        expected, student = naive_sotta(
            net,
            stream(),
            parameters=lower_norm if freeze_top else lambda net: [*net[1].parameters(), *net[4].parameters()],
            optimizer=NAIVE_ADAM,
            memory=memory,
            **settings,
        )
    assert 20 < add.call_count < 90
    model = ctta.SoTTA(net, optimizer=ADAM, memory_size=6, freeze_top=freeze_top, **settings)
    generator = torch.Generator().manual_seed(1)
    with mock.patch.object(model, "generator", lambda purpose: generator):
        assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)
    assert_same_statistics(model.student, student)
    CLOSE(model.memory.recall()[0], torch.stack([item.image for item in memory.items()]))
    assert ("skipped_layers=(4)" in repr(model)) is freeze_top


def test_sotta_without_a_confident_image_learns_nothing() -> None:
    model = ctta.SoTTA(decided_classifier(), min_confidence=1.0, **SMALL)
    assert model(stream()[0]).isfinite().all()
    assert model.last_step is None and int(model.memory.num_seen) == 5 and not len(model.memory.recall()[0])
    for new, old in zip(model.student.state_dict().values(), model.source.state_dict().values(), strict=True):
        assert torch.equal(new, old)


@pytest.mark.parametrize(
    ("scale", "settings"),
    [
        (15.0, {"momentum": 0.05, "spread": 0.0, "max_entropy": 0.5}),
        (8.0, {"momentum": 0.4, "spread": 0.3, "max_entropy": 0.3, "anchor": 2.0}),
    ],
)
def test_tribe(scale: float, settings: dict[str, Any]) -> None:
    net = decided_classifier(scale)
    expected, student, teacher, learned = naive_tribe(
        net, stream(), optimizer=NAIVE_ADAM, augment=augment, num_classes=4, **settings
    )
    assert 20 < sum(learned) < 80
    model = ctta.TRIBE(net, optimizer=ADAM, views=VIEWS, **settings)
    assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)
    assert_same_weights(model.teacher, teacher)
    assert_same_statistics(model.student, student)
    assert_same_statistics(model.teacher, teacher)


def test_tribe_follows_the_stream_where_it_learns_nothing() -> None:
    model = ctta.TRIBE(decided_classifier(), max_entropy=0.0, momentum=None)
    model(stream()[0])
    assert model.last_step is not None and not model.last_step.updated and model.num_skipped == 0
    CLOSE([*model.student.parameters()], [*model.source.parameters()])
    assert not torch.equal(running_statistics(model.teacher)[0], running_statistics(model.source)[0])


@pytest.mark.parametrize("size", [1, 5])
def test_bn_alpha(size: int) -> None:
    net = classifier()
    assert_same_run(ctta.BNAlpha(net, alpha=0.3), stream(size), naive_bn_alpha(net, stream(size), alpha=0.3))


def test_bn_alpha_with_a_prior_and_a_median() -> None:
    net = classifier()
    expected = naive_bn_alpha(net, stream(), alpha=5 / 21)
    assert_same_run(ctta.BNAlpha(net, prior=16), stream(), expected)
    assert_same_run(ctta.BNAlpha(net, prior=16, alpha=0.0), stream(), expected)  # the prior replaces alpha
    layer = nn.BatchNorm1d(2).double().eval()
    x = torch.tensor([[1.0, 5.0], [2.0, 6.0], [99.0, 7.0]], dtype=torch.float64)
    median = ctta.BNAlpha(layer, alpha=1.0, center="median")
    variance = torch.tensor([(1 + 97**2) / 3, 2 / 3], dtype=torch.float64)
    CLOSE(median(x), (x - torch.tensor([2.0, 6.0])) / (variance + layer.eps).sqrt())


def test_bn_ema() -> None:
    net = classifier()
    assert_same_run(ctta.BNEMA(net, momentum=0.2), stream(), naive_bn_ema(net, stream(), momentum=0.2))


def naive_iabn(layer: nn.BatchNorm2d, x: Tensor, k: float) -> Tensor:
    """Normalize every channel of every image by statistics shrunk toward the running ones."""
    assert layer.running_mean is not None and layer.running_var is not None
    out, size = torch.empty_like(x), x[0, 0].numel()

    def shrink(value: Tensor, bound: Tensor) -> Tensor:
        return value.sign() * max(value.abs() - bound, torch.zeros(()).double())

    for i in range(len(x)):
        for c in range(x.shape[1]):
            mean, variance = layer.running_mean[c], layer.running_var[c]
            own_mean, own_variance = x[i, c].mean(), x[i, c].var(correction=1)
            new_mean = mean + shrink(own_mean - mean, k * ((variance + layer.eps) / size).sqrt())
            bound = k * (variance + layer.eps) * (2 / (size - 1)) ** 0.5
            new_variance = (variance + shrink(own_variance - variance, bound)).clamp_min(0)
            normal = (x[i, c] - new_mean) / (new_variance + layer.eps).sqrt()
            out[i, c] = normal * layer.weight[c] + layer.bias[c]
    return out


def test_note_predicts_with_instance_aware_normalization() -> None:
    net = nn.Sequential(*list(classifier())[:2]).eval()
    layer = net[1]
    assert isinstance(layer, nn.BatchNorm2d)
    x = torch.randn(3, 3, 4, 4, dtype=torch.float64) * torch.tensor([0.2, 1.0, 5.0]).view(3, 1, 1, 1)
    model, expected = ctta.NOTE(net, iabn=0.5), naive_iabn(layer, net[0](x).detach(), 0.5).detach()
    assert not torch.allclose(expected, net(x))
    CLOSE(model.predict(x), expected)
    CLOSE(model.deploy()(x).detach(), expected)
    CLOSE(torch.cat([model(row.unsqueeze(0)) for row in x]), expected)


SMALL: dict[str, Any] = {"memory_size": 6, "update_every": 4}
MEMORY_METHODS: list[Callable[..., MemoryModel]] = [ctta.RoTTA, ctta.NOTE, partial(ctta.SoTTA, min_confidence=0.0)]


@pytest.mark.parametrize("method", MEMORY_METHODS)
@pytest.mark.parametrize("build", [decided_classifier, pixel_classifier])
@pytest.mark.parametrize("size", [1, 3, 9])
def test_any_batch_size(method: Callable[..., MemoryModel], build: Callable[[], nn.Sequential], size: int) -> None:
    model = method(build(), **SMALL)
    batches = torch.cat(stream()).split(size)[: 24 // size + 1]
    for x in batches:
        assert model(x).isfinite().all()
    assert int(model.memory.num_seen) == sum(map(len, batches)) and model.num_skipped == 0
    # All pixels of the untrained network are of one class, which has a third of RoTTA's memory.
    assert len(model.memory.recall()[0]) == (2 if method is ctta.RoTTA and build is pixel_classifier else 6)


@pytest.mark.parametrize("method", MEMORY_METHODS)
@pytest.mark.parametrize(("num_classes", "scale"), [(2, 1.0), (2, 1e4), (4, 1e4)])
def test_extreme_logits(method: Callable[..., MemoryModel], num_classes: int, scale: float) -> None:
    torch.manual_seed(0)
    head = nn.Linear(16, num_classes)
    nn.init.normal_(head.weight, std=scale)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), head)
    model = method(net.double().eval(), **SMALL)
    for x in stream()[:6]:
        assert model(x).isfinite().all()
    assert model.num_skipped == 0 and all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.parametrize("method", MEMORY_METHODS)
def test_an_update_is_due_at_every_so_many_images_whatever_the_batches(method: Callable[..., MemoryModel]) -> None:
    model = method(classifier(), memory_size=8, update_every=10)
    sizes = {3: 0, 4: 0, 2: 0, 5: 1, 26: 3}  # images per batch, and the updates that they make due
    with mock.patch.object(model, "update", return_value=True) as update:
        for size, expected in sizes.items():
            update.reset_mock()
            model(torch.cat(stream())[:size])
            assert [call.args[0] for call in update.call_args_list] == list(range(expected))


@pytest.mark.parametrize("method", MEMORY_METHODS)
def test_a_memory_is_of_one_image_size(method: Callable[..., MemoryModel], tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    model = method(net, **SMALL)
    ctta.save(model, tmp_path / "new.safetensors")
    assert not ctta.load(tmp_path / "new.safetensors", net).num_steps
    x = torch.rand(5, 3, 8, 8)
    logits = model(x)
    for call in (model, model.predict):
        with pytest.raises(ctta.InputError):
            call(torch.rand(5, 3, 9, 9))
    ctta.save(model, tmp_path / "used.safetensors")
    resumed = ctta.load(tmp_path / "used.safetensors", net)
    assert logits.isfinite().all() and torch.equal(resumed(x), model(x))


def test_a_file_with_a_memory_of_another_size_is_refused(tmp_path: Path) -> None:
    net = decided_classifier()
    model = ctta.RoTTA(net, **SMALL)
    model(stream()[0])
    model.memory.images = model.memory.images[:3]
    ctta.save(model, tmp_path / "damaged.safetensors")
    with pytest.raises(ctta.CheckpointError):
        ctta.load(tmp_path / "damaged.safetensors", net)


def test_a_skipped_update_forgets_its_images() -> None:
    model = ctta.RoTTA(decided_classifier(), **SMALL)
    before = [value.clone() for value in model.state_dict().values()]
    x = torch.cat(stream())[:4]
    with mock.patch("ctta.methods.rotta.cross_entropy", lambda logits, target: logits.sum(1) * torch.nan):
        assert model(x).isfinite().all()
    assert model.num_skipped == 1
    for value, old in zip(model.state_dict().values(), before, strict=True):
        assert torch.equal(value, old)


@pytest.mark.parametrize("method", MEMORY_METHODS)
def test_one_image_that_overflows_delays_learning_by_one_update(
    method: Callable[..., MemoryModel], tmp_path: Path
) -> None:
    net = decided_classifier().float()
    settings = {"memory_size": 8, "update_every": 12} | ({"views": ()} if method is ctta.RoTTA else {})
    model = method(net, **settings)
    batches = [x.float() for x in stream(4)[:9]]
    batches[0][1] = 3e38
    for x in batches[:2]:
        model(x)
    ctta.save(model, tmp_path / "before.safetensors")
    resumed = ctta.load(tmp_path / "before.safetensors", net)
    for x in batches[2:]:
        logits = model(x)
        assert torch.equal(logits, resumed(x)) and logits.isfinite().all()
    assert model.num_skipped == 1 and model.last_step is not None and model.last_step.updated

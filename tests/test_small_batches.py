"""``batch_stats="auto"``: batches of few images are blended with the source's statistics and take smaller steps."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from naive import NaiveAdam, naive_copy, naive_cotta, naive_self_training, naive_test_aug
from test_mathematics import (
    DEFAULTS,
    EPS,
    VIEWS,
    assert_same_run,
    assert_same_weights,
    classifier,
    norm_parameters,
    pixel_classifier,
    stream,
)
from torch import Tensor, nn

import ctta
from ctta.nn import FULL_BATCH_SIZE, PRIOR_SIZE, automatic_fraction
from ctta.testing import NETWORKS

FULL = FULL_BATCH_SIZE
METHODS: dict[str, Any] = {
    "bn_stats": ctta.BNStats,
    "pseudo_label": ctta.PseudoLabel,
    "tent": ctta.Tent,
    "test_aug": partial(ctta.TestAug, views=ctta.views.image_views(2)),
    "cotta": partial(ctta.CoTTA, views=ctta.views.image_views(2)),
    "cotta_at_once": partial(ctta.CoTTA, views=ctta.views.image_views(2), views_at_once=2),
}


def make_net(network: str = "batch_norm") -> nn.Module:
    torch.manual_seed(0)
    net = NETWORKS[network]()
    for name, buffer in net.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
    return net.eval()


def make_images(num_images: int, seed: int = 0) -> Tensor:
    return torch.rand(num_images, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def test_the_fraction_grows_with_the_batch_and_is_one_from_a_full_batch_on() -> None:
    fractions = [automatic_fraction(n) for n in range(1, FULL + 5)]
    assert fractions == sorted(fractions) and 0 < fractions[0] < 0.1
    assert all(fraction < 0.5 for fraction in fractions[: FULL - 1]) and set(fractions[FULL - 1 :]) == {1.0}


@pytest.mark.parametrize("name", METHODS)
def test_full_batches_are_as_with_batch_statistics_alone(name: str) -> None:
    batches = [make_images(FULL, 1), make_images(FULL + 3, 2)]
    automatic, pinned = METHODS[name](make_net()), METHODS[name](make_net(), batch_stats=1.0)
    assert automatic.batch_stats == "auto"
    for x in batches:
        assert torch.equal(automatic(x), pinned(x))
    for one, other in zip(automatic.parameters(), pinned.parameters(), strict=True):
        assert torch.equal(one, other)


def test_blend_blends_batches_of_any_size_and_takes_whole_steps_from_a_full_batch_on() -> None:
    x = make_images(FULL + 4)
    blended = ctta.Tent(make_net(), batch_stats="blend")
    fraction = (FULL + 4) / (FULL + 4 + PRIOR_SIZE)
    pinned = ctta.Tent(make_net(), batch_stats=fraction)
    assert torch.equal(blended(x), pinned(x)) and torch.equal(blended.predict(x), pinned.predict(x))
    assert blended.last_step is not None
    assert (blended.last_step.batch_stats, blended.last_step.scale) == (fraction, 1.0)
    assert blended.step_scale == 1.0 and blended.batch_fraction(4) == automatic_fraction(4)


@pytest.mark.parametrize("name", METHODS)
def test_small_batches_are_predicted_with_blended_statistics(name: str) -> None:
    x = make_images(3)
    expected = METHODS[name](make_net(), batch_stats=automatic_fraction(3)).predict(x)
    assert torch.equal(METHODS[name](make_net()).predict(x), expected)
    assert not torch.allclose(METHODS[name](make_net(), batch_stats=1.0).predict(x), expected)


@pytest.mark.parametrize("build", [classifier, pixel_classifier])
@pytest.mark.parametrize(("method", "loss"), [(ctta.Tent, "entropy"), (ctta.PseudoLabel, "argmax")])
def test_self_training_equals_a_naive_implementation(method: Any, loss: str, build: Any) -> None:
    net, batches = build(), stream(5)[:8]
    scale = (5 / FULL) ** 2
    model = method(net, optimizer=partial(torch.optim.Adam, lr=0.01, eps=EPS))
    expected, student = naive_self_training(
        net,
        batches,
        parameters=norm_parameters,
        loss=loss,
        optimizer=partial(NaiveAdam, lr=0.01 * scale, eps=EPS),  # Adam's step is proportional to its learning rate
        fraction=automatic_fraction(5),
    )
    assert_same_run(model, batches, expected)
    assert_same_weights(model.student, student)


def test_cotta_equals_a_naive_implementation() -> None:
    net, batches, scale = classifier(), stream(5), (5 / FULL) ** 2
    model = ctta.CoTTA(net, optimizer=partial(torch.optim.Adam, lr=0.02, eps=EPS), views=VIEWS, seed=7, **DEFAULTS)
    scaled = DEFAULTS | {"decay": DEFAULTS["decay"] ** scale, "restore": DEFAULTS["restore"] * scale}
    expected, student, teacher = naive_cotta(
        net,
        batches,
        draw=lambda step: VIEWS,
        optimizer=partial(NaiveAdam, lr=0.02 * scale, eps=EPS),
        fraction=automatic_fraction(5),
        seed=7,
        **scaled,
    )
    assert_same_run(model, batches, expected)
    assert_same_weights(model.student, student)
    assert_same_weights(model.teacher, teacher)


def test_methods_that_learn_nothing_equal_naive_implementations() -> None:
    net, batches = classifier(), stream(3)[:3]
    blended = naive_copy(net, automatic_fraction(3))
    assert_same_run(ctta.BNStats(net), batches, [blended(x).detach() for x in batches])
    expected = naive_test_aug(net, batches, draw=lambda step: VIEWS, average="logits", fraction=automatic_fraction(3))
    assert_same_run(ctta.TestAug(net, views=VIEWS), batches, expected)


def test_a_step_says_how_it_was_normalized_and_how_far_it_went() -> None:
    model = ctta.Tent(make_net())
    for num_images, fraction, scale in ((4, automatic_fraction(4), (4 / FULL) ** 2), (FULL, 1.0, 1.0)):
        model(make_images(num_images))
        assert model.last_step is not None
        assert (model.last_step.batch_stats, model.last_step.scale) == (fraction, scale)
        assert f"batch_stats={fraction}" in repr(model.last_step) and model.batch_fraction(num_images) == fraction


@pytest.mark.parametrize("fraction", [1.0, 0.3, 0.0])
def test_a_pinned_fraction_changes_nothing_for_small_batches(fraction: float) -> None:
    model = ctta.Tent(make_net(), batch_stats=fraction)
    model(make_images(2))
    assert model.last_step is not None
    assert (model.last_step.batch_stats, model.last_step.scale) == (fraction, 1.0)


def test_a_network_without_batch_norm_is_not_affected() -> None:
    for network in ("group_norm", "vit"):
        automatic, pinned = ctta.Tent(make_net(network)), ctta.Tent(make_net(network), batch_stats=1.0)
        for seed in range(2):
            assert torch.equal(automatic(make_images(2, seed)), pinned(make_images(2, seed)))
        assert automatic.last_step is not None
        assert (automatic.last_step.batch_stats, automatic.last_step.scale) == (0.0, 1.0)


def test_a_network_without_running_statistics_uses_the_batch() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        second = nn.BatchNorm2d(4, track_running_stats=False)
        return nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), second, nn.Flatten(), nn.Linear(784, 5)).eval()

    automatic, pinned = ctta.Tent(build()), ctta.Tent(build(), batch_stats=1.0)
    for seed in range(2):
        assert torch.equal(automatic(make_images(2, seed)), pinned(make_images(2, seed)))
    assert automatic.last_step is not None
    assert (automatic.last_step.batch_stats, automatic.last_step.scale) == (1.0, 1.0)


def test_a_deployed_network_blends_by_the_size_of_its_own_batches() -> None:
    model = ctta.Tent(make_net())
    model(make_images(FULL))
    deployed = model.deploy().eval()
    for num_images in (1, 5, FULL):
        x = make_images(num_images, 3)
        assert torch.equal(deployed(x), model.predict(x))


def test_saved_streams_keep_their_mode(tmp_path: Path) -> None:
    for batch_stats in ("auto", 1.0):
        model = ctta.Tent(make_net(), batch_stats=batch_stats)
        model(make_images(2))
        ctta.save(model, tmp_path / "stream.safetensors")
        resumed = ctta.load(tmp_path / "stream.safetensors", make_net())
        assert resumed.batch_stats == batch_stats
        assert torch.equal(resumed(make_images(2, 1)), model(make_images(2, 1)))


def test_a_guard_treats_valid_rows_as_if_they_had_come_alone() -> None:
    x = make_images(20)
    x[3:] = torch.nan
    with_bad = ctta.Guarded(ctta.Tent(make_net()), bad_rows="source", inspect_every=1)
    alone = ctta.Guarded(ctta.Tent(make_net()), inspect_every=1)
    assert torch.equal(with_bad(x)[:3], alone(x[:3]))
    assert with_bad.health.batch_stats == alone.health.batch_stats == automatic_fraction(3)
    assert with_bad.health.anchor_disagreement == alone.health.anchor_disagreement == 0
    assert with_bad.health.update_norm == alone.health.update_norm


def test_forks_with_batches_of_different_sizes_run_in_several_threads() -> None:
    template = ctta.BNStats(make_net())
    small, large = make_images(2), make_images(64)
    failures: list[int] = []

    def run(model: ctta.AdaptiveModel, x: Tensor, expected: Tensor) -> None:
        failures.extend(number for number in range(150) if not torch.equal(model(x), expected))

    threads = [threading.Thread(target=run, args=(template.fork(), x, template.predict(x))) for x in (small, large) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("value", ["none", "0.5", -0.1, 1.5])
def test_other_values_are_rejected(value: Any) -> None:
    with pytest.raises(ctta.ConfigError):
        ctta.Tent(make_net(), batch_stats=value)

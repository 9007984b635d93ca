"""CoTTA with views of uncertain images only: what statistics they have, and which passes are saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ctta
import ctta.core.registry
from ctta.core.parallel import RecordedStatistics, change_call
from ctta.functional import confidence
from ctta.nn.surgery import copy_for_adaptation
from ctta.views import choose_views_at_once, fast_image_views, image_views

TWO_VIEWS: dict[str, Any] = {"views": image_views(2), "restore": 0.0}


def draw_images(number: int = 24) -> Tensor:
    return torch.rand(number, 3, 8, 8, generator=torch.Generator().manual_seed(number))


def between(values: Tensor) -> float:
    """Return a threshold that about half of the values are below."""
    return float(values.median()) + 1e-6


@pytest.mark.parametrize("batch_stats", [1.0, 0.3, 0.0])
@torch.no_grad()
def test_rows_of_a_batch_are_normalized_by_its_recorded_statistics(batch_stats: float) -> None:
    net = copy_for_adaptation(ctta.models.embedded(), batch_stats=batch_stats, output=None)
    x = draw_images()
    expected = net(x)
    recorded: RecordedStatistics = {}
    with change_call(record=recorded):
        torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)
    with change_call(fixed_statistics=recorded, fraction=0.0):
        torch.testing.assert_close(net(x[::3]), expected[::3], rtol=1e-4, atol=1e-4)
    if batch_stats == 1:
        own = net(x[::3])
        with change_call(fixed_statistics=recorded, fraction=1.0):
            assert torch.equal(net(x[::3]), own)
        with change_call(fixed_statistics=recorded, fraction=0.5):
            blended = net(x[::3])
            with change_call(num_parts=2):
                torch.testing.assert_close(net(torch.cat([x[::3]] * 2))[:8], blended, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(blended, own, atol=1e-2) and not torch.allclose(blended, expected[::3], atol=1e-2)
    assert torch.equal(net(x), expected), "nothing is left behind"


def test_only_uncertain_images_go_through_the_views() -> None:
    """Others have the teacher's direct prediction, and the source is not asked."""
    net, x = ctta.models.embedded(), draw_images()
    model = ctta.CoTTA.faster(net, **TWO_VIEWS)
    sizes: dict[str, list[int]] = {"teacher": [], "source": []}
    for name, seen in sizes.items():
        model.get_submodule(name).register_forward_hook(
            lambda _net, inputs, _out, seen=seen: seen.append(len(inputs[0]))
        )
    with torch.no_grad():
        direct = model.teacher(x)
    model.threshold = between(confidence(direct))
    rows = confidence(direct) < model.threshold
    sizes["teacher"].clear()
    predicted = model.predict(x)
    logits = model(x)
    assert torch.equal(predicted, logits)
    num = int(rows.sum())
    assert 0 < num < len(x) and sizes == {"teacher": [24, num, num] * 2, "source": []}
    torch.testing.assert_close(logits[~rows], direct[~rows], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits[rows], direct[rows], atol=1e-2)
    assert model.last_step is not None and model.last_step.augmented == pytest.approx(num / 24)


def test_without_batch_statistics_it_is_exact() -> None:
    net, x = ctta.models.embedded(), draw_images()
    with torch.no_grad():
        threshold = between(confidence(net(x)))
    models = [
        ctta.CoTTA(net, gate="element", threshold=threshold, batch_stats=0.0, views_for=views_for, **TWO_VIEWS)
        for views_for in ("all", "uncertain")
    ]
    for _ in range(2):
        assert torch.equal(models[0](x), models[1](x))


def test_the_teacher_answers_the_same_whoever_gates() -> None:
    net, x = ctta.models.embedded(), draw_images()
    choices: list[dict[str, Any]] = [{}, {"gate": "element", "views_for": "uncertain"}]
    for settings in choices:
        model = ctta.CoTTA(net, predict_with="teacher", gate_with="teacher", **settings, **TWO_VIEWS)
        predicted = model.predict(x)
        assert torch.equal(model(x), predicted)


def test_it_is_saved_and_compiled(tmp_path: Path) -> None:
    net, x = ctta.models.embedded(), draw_images()
    model = ctta.adapt(net, "cotta_faster", **TWO_VIEWS)
    model(x)
    ctta.save(model, tmp_path / "a.safetensors")
    loaded = ctta.load(tmp_path / "a.safetensors", net)
    assert torch.equal(loaded(x), model(x))
    compiled, plain = ctta.CoTTA.faster(net, **TWO_VIEWS).compile(backend="eager"), ctta.CoTTA.faster(net, **TWO_VIEWS)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-4)


def test_settings_are_checked() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
    with pytest.raises(ctta.ConfigError):
        ctta.CoTTA(net, views_for="uncertain")
    with pytest.raises(ctta.ConfigError):
        ctta.CoTTA(net, gate_with="student")  # type: ignore[arg-type]


def test_views_are_stacked_by_themselves_where_that_is_faster() -> None:
    """For single images, and for few if nothing has to be separated; the result differs by rounding only."""
    net, views = ctta.models.embedded(), fast_image_views().draw(torch.Generator().manual_seed(0))
    with_statistics, without = (copy_for_adaptation(net, batch_stats=each, output=None) for each in (1.0, 0.0))
    sizes = {size: torch.rand(size, 3, 32, 32) for size in (1, 4, 8, 50)}
    assert [choose_views_at_once("auto", views, with_statistics, x) for x in sizes.values()] == [8, 1, 1, 1]
    assert [choose_views_at_once("auto", views, without, x) for x in sizes.values()] == [8, 8, 5, 1]
    assert choose_views_at_once("auto", [lambda model, x: model(x)], without, sizes[1]) == 1
    assert choose_views_at_once(3, views, without, sizes[50]) == 3
    for x in (sizes[1], sizes[4]):
        plain, stacked = (ctta.CoTTA.fast(net, threshold=1.1, views_at_once=each) for each in (1, "auto"))
        torch.testing.assert_close(stacked(x), plain(x), rtol=1e-3, atol=1e-3)
    assert ctta.core.registry.parse_settings(ctta.CoTTA, ["views_at_once=auto"]) == {"views_at_once": "auto"}
    with pytest.raises(ctta.ConfigError):
        ctta.core.registry.parse_settings(ctta.CoTTA, ["views_at_once=all"])

"""Streams that do not wait: which batches are learned from, how the others are answered, and the counted ratio."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_data import create_stream
from torch import nn

import ctta
from ctta.benchmark import BenchmarkOptions, build_task, plan
from ctta.benchmark.plan import BenchmarkCell
from ctta.data.streams import single
from ctta.errors import ConfigError
from ctta.evaluation import BatchRecord
from ctta.evaluation.steps import count_passes, count_step_ratio
from ctta.testing.networks import BlockViT
from ctta.views import image_views


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 4))


def make_cotta(**settings: Any) -> ctta.CoTTA:
    return ctta.CoTTA(make_net(), **{"views": image_views(2), "seed": 3, **settings})


def test_the_batches_after_a_step_are_answered_by_one_pass_of_the_teacher() -> None:
    stream, model, expected = create_stream(batch_size=6), make_cotta(), []
    for index, batch in enumerate(stream):
        logits = model(batch.x) if index % 3 == 0 else model.teacher(batch.x).detach()
        expected.append(int((logits.argmax(1) != batch.y).sum()))
    result = ctta.evaluate(make_cotta(), stream, step_ratio=3)
    assert [record.score.num_wrong for record in result.batches] == expected  # type: ignore[union-attr]
    assert [record.loss is not None for record in result.batches] == [index % 3 == 0 for index in range(len(stream))]
    assert result.step_ratio == 3
    plain = ctta.evaluate(make_cotta(), [(batch.x, batch.y) for batch in stream], step_ratio=3)
    assert plain.error == sum(expected) / 48, "also for batches that are read once"


@pytest.mark.parametrize("method", ["source", "bn_stats", "tent", "cotta", "rotta", "note", "bn_alpha", "roid", "memo"])
def test_one_pass_changes_nothing_and_costs_one_pass(method: str) -> None:
    net, x = make_net(), torch.rand(6, 3, 32, 32)
    model = ctta.adapt(net, method)
    model(x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with count_passes(nn.Sequential) as count:
        first = model.predict_once(x)
    assert (count.forward, count.backward) == (6, 0)
    assert torch.equal(model.predict_once(x), first) and model.num_steps == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(first, model.deploy()(x).detach())
    guarded = ctta.Guarded(ctta.adapt(net, method))
    guarded(x)
    torch.testing.assert_close(guarded.predict_once(x), first)


class StopError(Exception):
    pass


def stop_after(count: int) -> Callable[[BatchRecord], None]:
    seen = []

    def listen(record: BatchRecord) -> None:
        seen.append(record)
        if len(seen) == count:
            raise StopError

    return listen


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_resumed_between_two_updates(count: int, tmp_path: Path) -> None:
    def evaluate(**settings: Any) -> list[BatchRecord]:
        result = ctta.evaluate(make_cotta(), create_stream(batch_size=6), step_ratio=3, **settings)
        return [replace(record, seconds=0.0, peak_mib=None) for record in result.batches]

    with pytest.raises(StopError):
        evaluate(folder=tmp_path, on_batch=stop_after(count))
    assert evaluate(folder=tmp_path) == evaluate()


def test_ratio_is_counted_in_passes() -> None:
    stream = create_stream(batch_size=8)
    ratios = {name: count_step_ratio(ctta.adapt(make_net(), name), stream) for name in ("source", "bn_stats", "tent")}
    assert ratios == {"source": 1, "bn_stats": 1, "tent": 3}
    always = make_cotta(views=image_views(4), threshold=1.1)  # averages every batch over the views
    assert count_step_ratio(always, stream) == 4 + 1 + 2, "four views of the teacher, the student, and its gradient"
    assert always.num_steps == 0 and stream.position == 0
    ratio = count_step_ratio(ctta.VANE(make_net(), learn=False), stream)
    # One more in the two of six batches that begin a domain, and not the part that finds outliers.
    assert ratio == 2 + 4 + 2 / 6
    rotta = ctta.adapt(make_net(), "rotta", memory_size=8, update_every=8)
    alone = single(create_stream(batch_size=8))
    assert count_step_ratio(rotta, alone) == count_step_ratio(rotta, stream), "updates every few batches count by share"


def test_parts_of_a_network_of_its_own_class_do_not_count() -> None:
    class Nested(nn.Sequential):
        pass

    net = Nested(Nested(nn.Flatten(), nn.Linear(3072, 8)), nn.BatchNorm1d(8), nn.Linear(8, 4))
    assert count_step_ratio(ctta.Tent(net), create_stream()) == 3


class Wrapped(nn.Module):
    """A network that returns its logits among others, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.net[:-1](x)
        return {"features": features, "logits": self.net[-1](features)}  # a gradient passes both


def test_ratio_does_not_depend_on_how_logits_are_returned() -> None:
    stream = create_stream()
    ratios = [count_step_ratio(ctta.adapt(Wrapped(), name), stream) for name in ("source", "tent")]
    assert ratios == [1, 3]


def test_auto_ratio_is_recorded() -> None:
    result = ctta.evaluate(ctta.Tent(make_net()), create_stream(batch_size=6), step_ratio="auto")
    assert result.step_ratio == 3
    assert [record.loss is not None for record in result.batches] == [
        True,
        False,
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    with pytest.raises(ConfigError):
        ctta.evaluate(ctta.Tent(make_net()), [(torch.rand(4, 3, 32, 32), torch.zeros(4).long())], step_ratio="auto")
    with pytest.raises(ConfigError):
        ctta.evaluate(ctta.Tent(make_net()), create_stream(), step_ratio=0)


@pytest.mark.parametrize(
    ("protocol", "ratio"),
    [("no-wait", 3), ("no-wait,ratio=5", 5), ("no-wait,speed=0.5", 2), ("no-wait,ratio=5,speed=0.1", 1), ("mixed", 1)],
)
def test_the_protocol_decides_the_ratio(
    protocol: str, ratio: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    task = build_task("embedded", BenchmarkOptions())
    task = replace(task, make_network=make_net, make_stream=lambda order: create_stream())
    module = sys.modules[BenchmarkCell.__module__]
    monkeypatch.setattr(module, "build_task", lambda *arguments, **settings: task)
    monkeypatch.setattr(module, "evaluate", lambda model, stream, **settings: given.update(settings))
    options = BenchmarkOptions(protocol=protocol)
    BenchmarkCell("embedded", options, "tent", None, None, 1, str(tmp_path)).run()
    assert given["step_ratio"] == ratio


def test_a_benchmark_does_not_wait(tmp_path: Path) -> None:
    options = BenchmarkOptions(protocol="no-wait,ratio=2", limit=8, batch_size=4, corruptions=("contrast",))
    run = plan(tmp_path, "embedded", options, methods=["tent"], threads=1)
    run.cells[0].run()
    (result,) = run.results()
    assert result.step_ratio == 2 and result.stream.endswith("no_wait")
    assert [record.loss is not None for record in result.batches] == [True, False]


def test_prompts_are_part_of_the_one_pass() -> None:
    net, x = BlockViT().eval(), torch.rand(8, 3, 16, 16)
    stats = ctta.source_stats(net, [torch.rand(32, 3, 16, 16)])
    model = ctta.FOA(net, source_stats=stats, num_prompts=1, population=3)
    model(x)
    with count_passes(BlockViT) as count:
        logits = model.predict_once(x)
    assert count.forward == 8
    torch.testing.assert_close(logits, model.deploy()(x).detach())
    assert not torch.allclose(logits, net(x), atol=1e-3)

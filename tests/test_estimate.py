"""The gain that is estimated without labels: what it says of runs whose labels are kept aside, and what it covers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import output, write_images, write_network
from small_group_norm import MEAN, STD, train_group_norm
from torch import Tensor, nn
from typing_extensions import override

import ctta
from ctta.adapt import adapt_folder
from ctta.cli.adapt import adapt
from ctta.core.model import AdaptiveModel
from ctta.data.corruptions import corrupt
from ctta.guard import EventKind, Guarded
from ctta.guard.diagnostics import source_as_trained
from ctta.guard.estimate import (
    BLOCK_IMAGES,
    NUM_CHANNELS,
    GainEstimate,
    GainMonitor,
    Weights,
    count_inputs,
    measure_inputs,
    record_inputs,
)
from ctta.guard.summary import NUM_BINS, NUM_NEIGHBORS, measure_answers
from ctta.models import Normalized

Make = Callable[[nn.Module], AdaptiveModel]


class Overconfident(nn.Module):
    """The embedded network, three times as sure of the same answers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ctta.models.embedded()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = 3 * self.net(x)
        return logits


def read_images(corruption: str | None, number: int = 256, *, by_class: bool = False) -> tuple[Tensor, Tensor]:
    sample = ctta.data.datasets.sample()
    images, labels = np.asarray(sample.images[:number]), sample.labels[:number]
    if by_class:
        order = np.argsort(labels, kind="stable")
        images, labels = images[order], labels[order]
    pixels = images if corruption is None else corrupt(images, corruption, 5, seed=0)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(255), torch.as_tensor(labels)


def run_beside_source(model: AdaptiveModel, x: Tensor, y: Tensor, size: int) -> tuple[GainMonitor, float]:
    """Run a method; return what was measured without labels, and the gain that the labels show."""
    monitor, lead = GainMonitor(count_inputs(model.source)), 0
    for step, (images, labels) in enumerate(zip(x.split(size), y.split(size), strict=True)):
        with torch.no_grad(), record_inputs() as record:
            source = source_as_trained(model.source)(images).argmax(1)
        adapted = model(images).argmax(1)
        monitor.add_(
            measure_answers(adapted, source),
            measure_inputs(source_as_trained(model.source), record),
            len(images),
            step,
            10,
        )
        lead += int((adapted == labels).sum()) - int((source == labels).sum())
    return monitor, lead / len(x)


@pytest.mark.parametrize("make_net", [ctta.models.embedded, Overconfident])
@pytest.mark.parametrize(
    ("corruption", "by_class", "make"),
    [
        ("gaussian_noise", False, partial(ctta.adapt, method="bn_stats")),
        ("defocus_blur", False, partial(ctta.adapt, method="tent")),
        (None, True, partial(ctta.adapt, method="tent")),
        (None, False, partial(ctta.Tent, optimizer=partial(torch.optim.Adam, lr=0.1))),
    ],
    ids=["noise", "blur", "class runs", "wrong rate"],
)
def test_the_sign_is_right_however_sure_the_network_is(
    corruption: str | None, by_class: bool, make: Make, make_net: Callable[[], nn.Module]
) -> None:
    x, y = read_images(corruption, by_class=by_class)
    monitor, gain = run_beside_source(make(make_net().eval()), x, y, 32)
    estimate = monitor.estimate_all()
    assert abs(gain) > 0.1 and estimate is not None
    assert estimate.is_decided and estimate.gain * gain > 0
    assert any(each.is_harmful for each in monitor.list_estimates()) == (gain < 0)


def test_answers_are_counted_as_a_loop_would() -> None:
    generator = torch.Generator().manual_seed(0)
    adapted, source = (torch.randint(0, 70, (12,), generator=generator) for _ in range(2))
    source[:6] = adapted[:6]
    pairs = [(row, near) for row in range(12) for near in range(12) if near != row and abs(near - row) <= NUM_NEIGHBORS]
    differing = [row for row in range(12) if adapted[row] != source[row]]
    chosen = [pair for pair in pairs if pair[0] in differing]
    counts = [
        len(differing),
        len(pairs),
        sum(source[row] == source[near] for row, near in pairs),
        sum(adapted[row] == adapted[near] for row, near in pairs),
        len(chosen),
        sum(source[row] == source[near] for row, near in chosen),
        sum(adapted[row] == source[near] for row, near in chosen),
    ]
    found = measure_answers(adapted, source)
    assert found[:7].tolist() == [float(each) for each in counts]
    classes = found[7:].view(4, NUM_BINS)
    assert torch.equal(classes[1], torch.bincount(adapted % NUM_BINS, minlength=NUM_BINS).double())
    assert torch.equal(classes[2], torch.bincount(source[differing] % NUM_BINS, minlength=NUM_BINS).double())
    assert not measure_answers(adapted[:1], source[:1])[1:7].any()  # no neighbors


def test_inputs_that_are_normalized_otherwise_are_noticed() -> None:
    net = ctta.models.embedded()
    shifts = {}
    for corruption in (None, "brightness", "gaussian_noise"):
        monitor, _ = run_beside_source(ctta.Source(net), *read_images(corruption, 128), 32)
        shifts[corruption] = monitor.measure_shift([1])
    assert shifts[None] < -0.2 < shifts["brightness"] < shifts["gaussian_noise"] and shifts["gaussian_noise"] > 0.4
    assert count_inputs(nn.Linear(4, 2)) == 0 and count_inputs(nn.BatchNorm1d(100)) == 3 * NUM_CHANNELS


def fill(monitor: GainMonitor, steps: range, adapted: int, size: int = 32) -> None:
    """Let the source answer all classes in turn, and the adapted network the same or one class."""
    source = torch.arange(size) % 10
    answers = source if adapted < 0 else torch.full_like(source, adapted)
    for step in steps:
        monitor.add_(measure_answers(answers, source), torch.zeros(0), size, step, 10)


def test_an_estimate_says_which_images_it_stands_for() -> None:
    monitor = GainMonitor(0)
    fill(monitor, range(1), -1)
    assert monitor.estimate() is None  # too few
    fill(monitor, range(1, 20), -1)
    fill(monitor, range(20, 24), 3)
    now, everything = monitor.estimate(), monitor.estimate_all()
    assert now is not None and everything is not None
    assert now.num_images == 2 * BLOCK_IMAGES and now.since == 16
    assert everything.num_images == 24 * 32 and everything.since == 0
    assert now.gain < everything.gain < 0 and monitor.list_estimates()[1].is_harmful
    fill(monitor, range(24, 25), 3)  # a block of 32 images has no signs of its own
    everything = monitor.estimate_all()
    assert everything is not None and everything.num_images == 25 * 32
    monitor.forget_()
    assert monitor.estimate() is None and monitor.estimate_all() is None


def test_where_nothing_differs_nothing_is_claimed() -> None:
    monitor = GainMonitor(0)
    fill(monitor, range(8), -1)
    found = monitor.estimate()
    assert found is not None and found.gain == 0 and not found.is_decided and found.deviation < 0.01
    assert not GainEstimate(0.01, 0.02).is_decided and GainEstimate(-0.1, 0.02).is_harmful
    likely = GainEstimate(-0.02, 0.03)  # for which the source answers, though nothing is claimed
    assert likely.suggests_harm and not likely.is_harmful and not GainEstimate(-0.01, 0.03).suggests_harm


def test_the_estimate_goes_on_after_loading(tmp_path: Path) -> None:
    model = Guarded(ctta.Tent(ctta.models.embedded()))
    x, _ = read_images("fog", 192)
    for images in x[:128].split(32):
        model(images)
    ctta.save(model, tmp_path / "state.safetensors")
    loaded = ctta.load(tmp_path / "state.safetensors", ctta.models.embedded())
    assert torch.equal(model(x[128:]), loaded(x[128:]))
    assert isinstance(loaded, Guarded) and model.health == loaded.health
    assert model.health.estimated_images == 192 and loaded.fork().health.estimated_gain is None


@pytest.mark.parametrize(
    ("by_class", "size", "make"),
    [(True, 32, ctta.Tent), (False, 4, partial(ctta.Tent, optimizer=partial(torch.optim.Adam, lr=3e-2)))],
    ids=["class runs", "collapse in batches of 4"],
)
def test_a_guard_lets_the_source_answer_where_a_method_harms(by_class: bool, size: int, make: Make) -> None:
    x, y = read_images(None, 512, by_class=by_class)
    models = {"source": ctta.Source(ctta.models.embedded()), "bare": make(ctta.models.embedded())}
    models["guarded"] = Guarded(make(ctta.models.embedded()))
    right = {
        name: sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(size), y.split(size), strict=True))
        for name, model in models.items()
    }
    assert right["bare"] < 0.75 * right["source"] and right["guarded"] > 0.9 * right["source"]
    guarded = models["guarded"]
    assert isinstance(guarded, Guarded) and guarded.health.answered_by_source
    assert {event.kind for event in guarded.events} & {EventKind.HARM, EventKind.SORTED_STREAM}


def test_a_guard_lets_the_source_answer_where_batch_statistics_seem_to_harm() -> None:
    """Clean shuffled images: the estimate leans to harm, which is not certain enough to be claimed."""
    x, y = read_images(None, 640)
    errors = {}
    for name, model in {
        "source": ctta.Source(ctta.models.embedded()),
        "bare": ctta.Tent(ctta.models.embedded()),
        "guarded": Guarded(ctta.Tent(ctta.models.embedded())),
    }.items():
        found = [model(a).argmax(1) != b for a, b in zip(x.split(64), y.split(64), strict=True)]
        errors[name] = float(torch.cat(found).double().mean())
    assert errors["bare"] > errors["source"] + 0.02 >= errors["guarded"]


@pytest.mark.parametrize("make", [ctta.Tent, ctta.SHOTIM])
def test_a_guard_holds_small_batches_back_without_batch_norm(make: Make) -> None:
    x, y = read_images(None, 2000)
    net, x, y = Normalized(train_group_norm(), MEAN, STD), x[1500:], y[1500:]  # images that it was not trained on
    order = torch.argsort(y, stable=True)
    errors = {}
    for name, model in {"source": ctta.Source(net), "bare": make(net), "guarded": Guarded(make(net))}.items():
        found = [model(a).argmax(1) != b for a, b in zip(x[order].split(4), y[order].split(4), strict=True)]
        errors[name] = float(torch.cat(found).double().mean())
    assert errors["bare"] > errors["source"] + 0.02 >= errors["guarded"]


def test_a_full_step_of_a_guard_is_for_64_images_without_batch_norm() -> None:
    scales: dict[tuple[bool, int], float] = {}

    class Recorded(ctta.Tent):
        @override
        def adapt_step(self, x: Tensor) -> Tensor:
            scales[pixels, len(x)] = self.step_scale
            return super().adapt_step(x)

    for pixels in (False, True):
        layers = [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), *([] if pixels else [nn.Flatten(), nn.Linear(144, 3)])]
        model = Guarded(Recorded(nn.Sequential(*layers)))
        for size in (8, 64):
            model(torch.rand(size, 3, 8, 8))
    assert scales == {(False, 8): 1 / 64, (False, 64): 1, (True, 8): 1, (True, 64): 1}
    batch_norm = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 3))
    Guarded(Recorded(batch_norm))(torch.rand(8, 3, 2, 2))
    assert scales[pixels, 8] == 1 / 4  # as the method has it


def test_a_guard_returns_to_a_method_that_gains_again() -> None:
    """Batches of one class each, and then a corruption: what harmed before helps."""
    model = Guarded(ctta.BNStats(ctta.models.embedded()))
    for images in read_images(None, 256, by_class=True)[0].split(32):
        model(images)
    assert model.health.answered_by_source
    for images in read_images("gaussian_noise", 384)[0].split(32):
        model(images)
    assert not model.health.answered_by_source and model.events[-1].kind == EventKind.RECOVERY


@pytest.mark.parametrize("rate", [-0.05, 0.05])
def test_no_snapshot_is_kept_of_a_method_that_seems_to_lose(rate: float) -> None:
    model = Guarded(ctta.Tent(ctta.models.embedded()), snapshot_every=4)
    assert model.accuracy.gain_monitor is not None
    model.accuracy.gain_monitor.weights = Weights(constant=rate)
    for images in read_images("fog", 320)[0].split(32):
        model(images)
    assert not model.events and (model.last_good.num_steps > 2) == (rate > 0)


def test_adapt_says_what_it_can_tell(tmp_path: Path) -> None:
    x, _ = read_images("gaussian_noise", 192)
    write_pngs(tmp_path / "noise", x)
    summary = adapt_folder(ctta.models.embedded(), tmp_path / "noise", tmp_path / "a.csv", method="vane", guard=False)
    assert summary.warning is None and summary.estimated_gain is not None and summary.estimated_gain_low is not None
    assert summary.estimated_gain_low > 0
    x, _ = read_images(None, 192, by_class=True)
    write_pngs(tmp_path / "runs", x)
    options = {"method": "tent", "settings": {"batch_stats": 1.0}, "guard": False, "order": "name"}
    harmful = adapt_folder(ctta.models.embedded(), tmp_path / "runs", tmp_path / "b.csv", **options)  # type: ignore[arg-type]
    assert harmful.warning is not None and "adaptation seems to harm" in harmful.warning


@pytest.mark.parametrize("number", [96, 256, 300])
def test_adapt_estimates_from_all_images(tmp_path: Path, number: int) -> None:
    x, _ = read_images("gaussian_noise", number)
    write_pngs(tmp_path / "noise", x)
    summaries = [
        adapt_folder(ctta.models.embedded(), tmp_path / "noise", tmp_path / f"{compare}.csv", compare=compare)
        for compare in (False, True)
    ]
    for summary in summaries:
        assert summary.method == "vane" and summary.estimated_images == summary.num_images == number
        assert summary.estimated_gain_low is not None and summary.estimated_gain_low > 0
    assert summaries[0].estimated_gain == summaries[1].estimated_gain


def test_the_command_is_silent_where_it_cannot_tell(tmp_path: Path) -> None:
    write_images(tmp_path / "images", range(40))
    common = ("--model", write_network(tmp_path), "--method", "tent", "--images", tmp_path / "images")
    assert "Adapting:" not in output(adapt, *common, "--out", tmp_path / "a.csv")


def write_pngs(folder: Path, x: Tensor) -> None:
    from PIL import Image

    folder.mkdir()
    for number, image in enumerate(x.permute(0, 2, 3, 1).mul(255).round().byte().numpy()):
        Image.fromarray(image).save(folder / f"{number:04}.png")


class WithTrainingHead(nn.Module):
    """A network with a BatchNorm that runs in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.auxiliary = ctta.models.embedded(), nn.BatchNorm2d(24)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits


def test_layers_that_do_not_run_count_for_nothing(tmp_path: Path) -> None:
    x, y = read_images("fog", 128)
    whole, plain = (
        run_beside_source(ctta.Tent(net), x, y, 32)[0] for net in (WithTrainingHead(), ctta.models.embedded())
    )
    assert whole.estimate() == plain.estimate() and whole.measure_shift([1]) == plain.measure_shift([1]) != 0
    model = Guarded(ctta.Tent(WithTrainingHead()), remember_answers=10)
    for images in x.split(32):
        model(images)
    assert model.health.estimated_gain is not None

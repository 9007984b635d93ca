"""Twenty steps of VANE agree with the naive implementation to 1e-10; what its parts do, and their edge cases."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from naive import step_generator
from naive_vane import NaiveChain, NaiveRun, NaiveShiftNorm, naive_look, naive_motion, naive_vane
from test_mathematics import (
    CLOSE,
    EPS,
    STEPS,
    assert_same_run,
    assert_same_weights,
    classifier,
    pixel_classifier,
    stream,
)
from torch import Tensor, nn

import ctta
from ctta.core.parallel import change_call
from ctta.errors import ConfigError, InputError
from ctta.methods.vane.statistics import (
    FollowedBatch,
    ShiftStatistics,
    measure_fraction,
    store_layers_,
    use_shift_statistics_,
)
from ctta.methods.vane.stream import (
    ChainState,
    DomainState,
    MirrorState,
    SampleState,
    StateBuffers,
    measure_appearance,
    update_chain,
    update_domain,
    update_sample,
)
from ctta.models import SlidingWindow
from ctta.views import SplitView, View, geometric_views
from ctta.views.geometric import MovedView

SIZES = (7, 1, 12, 16, 3, 20, 1, 5, 9, 2, 8, 1, 6, 10, 4, 1, 18, 2, 11, 5)
#: Large steps, so that twenty of them leave the source far behind.
OPTIMIZER = partial(torch.optim.Adam, lr=0.02, eps=EPS)
NAIVE_OPTIMIZER: dict[str, Any] = {"lr": 0.02, "eps": EPS}
COLORS = torch.tensor([[0.2, 0.3, 0.9], [0.9, 0.2, 0.3], [0.3, 0.9, 0.2], [0.8, 0.8, 0.7]], dtype=torch.float64)


class Chain:
    """A label chain over a stream.

    Args:
        uninformative: The probability that a prediction says nothing.
    """

    def __init__(self, uninformative: float = 0.0) -> None:
        self.uninformative, self.state = uninformative, ChainState.initial()

    def follow(self, logits: Tensor, *, is_new_domain: bool = False) -> Tensor:
        """Return the logarithms of the posteriors of a batch."""
        self.state, corrected = update_chain(
            self.state, logits, 1000, uninformative=self.uninformative, is_new_domain=is_new_domain
        )
        return corrected


class Domain:
    """The domains of a stream."""

    def __init__(self, max_distance: float = 0.5) -> None:
        self.max_distance, self.state = max_distance, DomainState.initial()

    def follow(self, features: Tensor) -> bool:
        """Return whether a batch begins a domain."""
        self.state, is_new = update_domain(self.state, features, self.max_distance)
        return is_new


def images(labels: Tensor, noise: float = 0.3) -> Tensor:
    """Return images whose color tells the class."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(len(labels), 3, 4, 4, generator=generator, dtype=torch.float64)
    return COLORS[labels][:, :, None, None] + noise * values


def draw_labels(num_images: int, run_length: int, seed: int = 1) -> Tensor:
    """Return labels in runs of this length."""
    runs = torch.randint(4, (num_images // run_length + 1,), generator=torch.Generator().manual_seed(seed))
    return runs.repeat_interleave(run_length)[:num_images]


def color_stream(run_length: int) -> list[Tensor]:
    """Return batches of many sizes under a shift: darker images of less contrast."""
    return list((0.7 * images(draw_labels(sum(SIZES), run_length)) - 0.1).split(SIZES))


def tell_colors(net: nn.Sequential) -> nn.Sequential:
    """Train a network on images of the colors: its statistics, and a head that chooses the nearest mean of features."""
    labels = torch.arange(4).repeat(25)
    for layer in net:
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # one batch decides
    net.train()(images(labels))
    features = net.eval()[:-1](images(labels)).detach()
    means = torch.stack([features[labels == c].mean(0) for c in range(4)])
    variance = (features - means[labels]).square().mean()
    head = net[-1]
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.weight.copy_(means / variance)
        head.bias.copy_(-means.square().sum(1) / variance / 2)
    return net


def batch_norm_classifier() -> nn.Sequential:
    return tell_colors(classifier())


def group_norm_classifier() -> nn.Sequential:
    net = classifier()
    net[1], net[4] = nn.GroupNorm(2, 4).double(), nn.GroupNorm(1, 3).double()
    return tell_colors(net)


def classifier_without_norms() -> nn.Sequential:
    net = classifier()
    net[1], net[4] = nn.Tanh(), nn.Tanh()
    return tell_colors(net)


def vector_classifier() -> nn.Sequential:
    torch.manual_seed(6)
    norm = nn.BatchNorm1d(8)
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.normal_(0.1, 0.3)
    norm.running_var.uniform_(0.5, 2)
    return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 4)).double().eval()


def vectors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [2 + torch.randn(size, 6, generator=generator, dtype=torch.float64) for size in SIZES]


def draw_four(step: int) -> Sequence[View]:
    return geometric_views(4).draw(step_generator(0, step, "views"))


def draw_none(step: int) -> Sequence[View]:
    return ()


def assert_equals_twin(
    net: nn.Sequential, batches: list[Tensor], draw: Callable[[int], Sequence[View]] = draw_four, **settings: Any
) -> NaiveRun:
    """Compare predictions, weights, statistics and chains; return the naive run."""
    naive_settings = {name: value for name, value in settings.items() if name != "views"}
    run = naive_vane(net, batches, draw=draw, **NAIVE_OPTIMIZER, **naive_settings)
    model = ctta.VANE(net, optimizer=OPTIMIZER, **settings)
    assert_same_run(model, batches, run.predictions)
    assert_same_weights(model.student, run.student)
    naive_layers = [layer for layer in run.student if isinstance(layer, NaiveShiftNorm)]
    for layer, naive in zip(model.statistics, naive_layers, strict=True):
        assert isinstance(layer, ShiftStatistics)
        CLOSE([layer.mean.tolist(), layer.variance.tolist()], [naive.mean, naive.variance])
        CLOSE(float(layer.scatter), naive.scatter)
    if naive_layers:
        CLOSE(float(model.sample.state.size), run.sample_size)
    CLOSE(model.chain.state.stickiness, run.stickiness[-1])
    CLOSE(model.source_chain.state.stickiness, run.source_stickiness[-1])
    CLOSE(model.domain_change.state.mean.tolist(), run.domain.mean)
    CLOSE(model.domain_change.state.num_images, sum(run.domain.weights))
    assert f"mirrors={run.mirrors[-1]}" in repr(model) or "views" in settings
    return run


def distance(net: nn.Module, other: nn.Module) -> float:
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max(float((one - two).detach().abs().max()) for one, two in pairs)


def snapshot(model: ctta.AdaptiveModel) -> dict[str, Tensor]:
    """Return all that a step may change."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    if model.optimizer is not None:
        for number, state in model.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{name}": torch.as_tensor(value).clone() for name, value in state.items()}
    return found


def assert_unchanged(model: ctta.AdaptiveModel, before: dict[str, Tensor]) -> None:
    after = snapshot(model)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


# ---- the method and its naive twin ----


@pytest.mark.parametrize("build", [batch_norm_classifier, group_norm_classifier])
def test_runs_of_labels(build: Callable[[], nn.Sequential]) -> None:
    # The look of these images is their class, which would end a domain with every run.
    run = assert_equals_twin(net := build(), color_stream(run_length=8), max_distance=None)
    assert run.stickiness[2] < 0.45 < run.stickiness[-1], "the chain opens on the way"
    assert run.learned[0] and not run.learned[-1] and distance(net, run.student) > 1e-3
    assert build is group_norm_classifier or run.source_stickiness[-1] > run.source_stickiness[0] + 0.1
    assert not any(run.new_domain)


def test_domains() -> None:
    """Statistics and class frequencies begin anew with a domain, which images of every class have in common."""
    x = images(draw_labels(sum(SIZES), run_length=1))
    x[sum(SIZES[:8]) :] = 0.4 * x[sum(SIZES[:8]) :] + 0.5
    run = assert_equals_twin(batch_norm_classifier(), list(x.split(SIZES)))
    assert [step for step, is_new in enumerate(run.new_domain) if is_new] == [8]
    run = assert_equals_twin(batch_norm_classifier(), list(x.split(SIZES)), max_distance=100.0)
    assert not any(run.new_domain)


def test_labels_that_the_student_hides() -> None:
    """Here a view takes away nearly all that the student says of a class: the source's predictions count."""
    labels = draw_labels(400, run_length=60)
    batches = list((0.9 * images(labels, noise=0.3)).split(20))
    views = (lambda model, x: -0.9 * model(x),)
    settings: dict[str, Any] = {"tolerance": 0.0, "horizon": 1.0, "max_distance": None}
    run = assert_equals_twin(batch_norm_classifier(), batches, lambda step: views, views=views, **settings)
    assert not any(run.hidden[:5]) and run.hidden[-1] and not run.learned[-1]
    assert not any(learned and hidden for learned, hidden in zip(run.learned, run.hidden, strict=True))
    wrong = (torch.cat(run.predictions).argmax(1) != labels).double()
    hidden = torch.tensor(run.hidden).repeat_interleave(20)
    assert wrong[hidden].mean() < 0.1 < wrong[~hidden].mean()


def test_one_pass_has_the_statistics_of_its_own_batch() -> None:
    """A stream that does not wait is answered in a new domain, too, and not by the statistics of the one before."""
    model = ctta.VANE(batch_norm_classifier(), views=(), min_stickiness=1.0, learn=False)
    labels = draw_labels(200, run_length=1)
    x = images(labels, noise=0.2)
    for batch in x.split(40):
        model(batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shifted = 0.5 * x
    assert (model.predict_once(shifted).argmax(1) != labels).double().mean() < 0.1
    assert (model.student(shifted).argmax(1) != labels).double().mean() > 0.4  # by those of the one before
    # Without views and the chain there is one pass, in which the batch counts by its own labels, not those before it.
    torch.testing.assert_close(model.predict_once(shifted), model.predict(shifted), rtol=0, atol=0.05)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_source_that_prefers_a_class_in_every_domain_does_not_hide_labels() -> None:
    """Labels come in pairs, as the student sees; the source, by its preferences, sees runs as long as domains."""
    net, labels, domains = batch_norm_classifier(), draw_labels(600, run_length=2), torch.arange(15) % 3
    missing = nn.functional.one_hot(domains, 3).double().repeat_interleave(40, 0)[:, :, None, None]
    batches = list((images(labels, noise=0.2) - missing).split(40))  # each domain lacks one color
    chain = Chain(0.3)
    for x in batches:
        chain.follow(net(x).detach())
    settings: dict[str, Any] = {"views": (), "tolerance": 0.0, "horizon": 1, "learn": False}
    run = assert_equals_twin(net, batches, draw_none, **settings)
    assert chain.state.stickiness > 0.7 and chain.state.stickiness > run.stickiness[-1] + 0.2
    assert not any(run.hidden)


@pytest.mark.parametrize("build", [batch_norm_classifier, group_norm_classifier])
def test_shuffled_labels(build: Callable[[], nn.Sequential]) -> None:
    run = assert_equals_twin(net := build(), color_stream(run_length=1))
    assert max(run.stickiness) < 0.45 and all(run.learned) and distance(net, run.student) > 0.01
    assert len(set(torch.cat(run.predictions).argmax(1).tolist())) == 4


def test_other_settings() -> None:
    settings: dict[str, Any] = {"tolerance": 1.0, "horizon": 16.0, "keep": 0.9, "weight": 0.5}
    run = assert_equals_twin(batch_norm_classifier(), color_stream(run_length=8), min_stickiness=0.3, **settings)
    assert 0 < sum(run.learned) < STEPS


def test_source_statistics_alone() -> None:
    net, batches = batch_norm_classifier(), color_stream(run_length=8)
    run = assert_equals_twin(net, batches, tolerance=None)
    assert 0 < sum(run.learned) < STEPS
    model = ctta.VANE(net, tolerance=None)
    for x in batches:
        model(x)
    assert all(map(torch.equal, model.student.buffers(), model.source.buffers()))


def test_without_views() -> None:
    batches = color_stream(run_length=8)
    settings: dict[str, Any] = {"views": (), "max_distance": None, "min_stickiness": 0.3}
    run = assert_equals_twin(batch_norm_classifier(), batches, draw_none, **settings)
    assert 0 < sum(run.learned) < STEPS


def side_classifier() -> nn.Sequential:
    """Return a network that tells whether the left or the right half of an image is brighter."""
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2)).double().eval()
    conv, head = net[0], net[3]
    assert isinstance(conv, nn.Conv2d) and isinstance(head, nn.Linear)
    right = torch.tensor([-1.0, -1.0, 1.0, 1.0], dtype=torch.float64).repeat(12)
    with torch.no_grad():
        conv.weight.copy_(torch.eye(3)[:, :, None, None])
        conv.bias.zero_()  # type: ignore[union-attr]
        head.weight.copy_(torch.stack([-right, right]))
        head.bias.zero_()
    return net


def side_stream() -> tuple[list[Tensor], Tensor]:
    """Return batches for it, and their labels."""
    labels = draw_labels(sum(SIZES), 1) % 2
    is_right = (torch.arange(4) >= 2) == labels[:, None].bool()
    noise = torch.randn(len(labels), 3, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return list((0.5 * is_right[:, None, None, :] + 0.2 * noise).split(SIZES)), labels


def test_mirrored_images_that_have_another_class_do_not_count() -> None:
    batches, labels = side_stream()
    runs = {flips: assert_equals_twin(side_classifier(), batches, flips=flips) for flips in ("auto", False, True)}
    assert not any(runs["auto"].mirrors[3:])
    first, errors = sum(SIZES[:3]), {}
    for flips, run in runs.items():
        errors[flips] = float((torch.cat(run.predictions).argmax(1) != labels)[first:].double().mean())
    assert errors["auto"] == errors[False] < 0.05 and errors[True] > 0.2


def test_a_single_view_that_flips_is_left_out_too() -> None:
    batches, labels = side_stream()
    model = ctta.VANE.fast(side_classifier())
    answers = torch.cat([model(x) for x in batches])
    assert "mirrors=False" in repr(model) and (answers.argmax(1) != labels)[30:].double().mean() < 0.05


def test_images_that_keep_their_class_are_mirrored() -> None:
    run = assert_equals_twin(batch_norm_classifier(), color_stream(run_length=1), flips="auto")
    assert all(run.mirrors)


@pytest.mark.parametrize("settings", [{"flips": "no"}, {"max_distance": math.inf}, {"max_distance": 0.0}])
def test_settings_that_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ctta.VANE(batch_norm_classifier(), **settings)


@pytest.mark.parametrize("method", ["vane", "vane_fast"])
def test_images_of_any_range(method: str) -> None:
    assert ctta.adapt(batch_norm_classifier(), method)(255 * color_stream(run_length=1)[0]).isfinite().all()


def test_views_of_the_user() -> None:
    views = (lambda model, x: model(x.flip(-1)), lambda model, x: model(0.8 * x))
    assert_equals_twin(batch_norm_classifier(), color_stream(run_length=1), lambda step: views, views=views)


def test_labels_that_repeat_can_be_ignored() -> None:
    run = assert_equals_twin(batch_norm_classifier(), color_stream(run_length=8), min_stickiness=1.0)
    assert all(run.learned) and run.stickiness[-1] > 0.45


def test_without_learning() -> None:
    net = batch_norm_classifier()
    run = assert_equals_twin(net, color_stream(run_length=1), learn=False)
    assert not any(run.learned) and distance(net, run.student) == 0
    assert ctta.VANE(net.bfloat16(), learn=False).optimizer is None  # 16 bits are too few to learn


def test_nothing_is_learned_where_only_a_view_overflows() -> None:
    views = (lambda model, x: model(x) * math.inf,)
    model, x = ctta.VANE(batch_norm_classifier(), views=views, lr=0.02), color_stream(run_length=1)[0]
    before = snapshot(model)
    assert not model(x).isfinite().all()
    assert_unchanged(model, before)
    assert model.num_skipped == 1


def test_state_that_is_counted_keeps_its_precision() -> None:
    model = ctta.VANE(batch_norm_classifier().float()).bfloat16()
    for part in (model.chain, model.source_chain, model.domain_change, model.mirror_check):
        assert {buffer.dtype for buffer in part.buffers()} == {torch.float64}


@pytest.mark.parametrize(
    ("of_source", "of_student", "are_hidden"),
    [(0.8, 0.3, True), (0.8, 0.55, False), (0.44, 0.1, False), (0.9, 0.7, True)],
)
def test_when_labels_count_as_hidden(of_source: float, of_student: float, are_hidden: bool) -> None:
    """Runs of labels are 2.5 times as long for the source, and it sees runs at all."""
    model = ctta.VANE(batch_norm_classifier(), min_stickiness=0.75 if of_student > 0.45 else 0.45)
    for chain, stickiness in ((model.source_chain, of_source), (model.chain, of_student)):
        chain.state.transitions.copy_(torch.tensor([1e9 * stickiness, 1e9]))
    assert ("labels='repeat'" in repr(model)) == are_hidden


def test_a_network_that_segments_needs_no_pass_of_the_source() -> None:
    model, calls = ctta.VANE(pixel_classifier()), []
    model.source.register_forward_hook(lambda *_: calls.append(1))
    model.student.register_forward_hook(lambda module, given, logits: calls.append(2) if logits.requires_grad else None)
    for x in [stream(2)[0]] * 3:
        model(x)
    assert calls == [1]


class OnePrediction(nn.Module):
    """Return dense logits, or those of an image where there is only one position."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 1)).double().eval()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits.flatten(1) if logits.shape[2:] == (1, 1) else logits


def test_a_network_that_segments_large_images_only() -> None:
    model = ctta.VANE(OnePrediction())
    for size, num_axes in ((8, 4), (4, 2), (8, 4)):
        assert model(torch.rand(6, 3, size, size, dtype=torch.float64)).ndim == num_axes


@pytest.mark.parametrize("flips", [True, "auto", False])
def test_flips_of_a_network_that_segments(flips: Any) -> None:
    model, calls = ctta.VANE(pixel_classifier(), flips=flips), []
    model.student.register_forward_hook(lambda *_: calls.append(1))
    for is_first, x in zip((True, False), stream(2)[:2], strict=True):
        calls.clear()
        model(x)
        assert len(calls) == 1 + bool(flips) + is_first  # the first batch is measured before it is predicted


class Failing(torch.optim.SGD):
    """An optimizer that fails."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("no memory")


def test_a_step_that_fails_changes_nothing() -> None:
    batches = color_stream(run_length=1)
    net = batch_norm_classifier()
    for model, x, message in (
        (ctta.VANE(net, optimizer=partial(Failing, lr=0.1)), batches[3], "no memory"),
        (ctta.VANE(net), batches[3][:, :, :2, :2], "shape"),
    ):
        model.predict(batches[2])
        before = snapshot(model)
        with pytest.raises(RuntimeError, match=message):
            model(x)
        assert_unchanged(model, before)


def test_mirrors_are_saved_and_reset(tmp_path: Path) -> None:
    batches, _ = side_stream()
    model = ctta.VANE(side_classifier())
    for x in batches[:5]:
        model(x)
    ctta.save(model, tmp_path / "model.safetensors")
    again = ctta.load(tmp_path / "model.safetensors", side_classifier())
    assert "mirrors=False" in repr(again) and torch.equal(again(batches[5]), model(batches[5]))
    model.reset()
    assert "mirrors=True" in repr(model)


def test_state_is_on_the_cpu_wherever_the_model_is_built() -> None:
    with torch.device("meta"):
        initial = DomainState.initial(), ChainState.initial(), MirrorState.initial()
        parts = StateBuffers(initial[0]), StateBuffers(initial[1]), StateBuffers(initial[2])
    assert {buffer.device.type for part in parts for buffer in part.buffers()} == {"cpu"}


def test_pixels() -> None:
    net, flip = pixel_classifier(), (lambda model, x: model(x.flip(-1)).flip(-1),)
    run = assert_equals_twin(net, stream(2), lambda step: flip)
    assert not any(run.learned) and distance(net, run.student) == 0
    assert run.stickiness[-1] == run.source_stickiness[-1] == 1 / 6  # no chain follows pixels


def test_vectors() -> None:
    run = assert_equals_twin(vector_classifier(), vectors(), draw_none)
    assert all(run.learned) and distance(vector_classifier(), run.student) > 1e-3


def test_a_network_without_norm_layers() -> None:
    net, batches = classifier_without_norms(), color_stream(run_length=8)
    run = assert_equals_twin(net, batches)
    assert run.stickiness[-1] > 0.45 and not any(run.learned)
    model = ctta.VANE(net)
    model(batches[0])
    assert model.optimizer is None and model.last_step is None and distance(model.student, net) == 0


BUILDERS = [batch_norm_classifier, group_norm_classifier, classifier_without_norms, pixel_classifier]


@pytest.mark.parametrize("build", BUILDERS)
def test_predict_equals_adapt_and_changes_nothing(build: Callable[[], nn.Sequential]) -> None:
    model = ctta.VANE(build(), lr=0.02, min_stickiness=0.3)
    for x in color_stream(run_length=8)[:5]:
        before = snapshot(model)
        predicted = model.predict(x)
        assert_unchanged(model, before)
        assert torch.equal(predicted, model(x))


def test_views_depend_on_the_seed() -> None:
    x = color_stream(run_length=1)[0]
    first, same, other = (ctta.VANE(batch_norm_classifier(), seed=seed)(x) for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.allclose(first, other)


def test_the_deployed_network_has_the_latest_statistics() -> None:
    model = ctta.VANE(batch_norm_classifier(), views=(), min_stickiness=1.0, learn=False)
    answers = [model(x) for x in color_stream(run_length=1)]
    CLOSE(model.deploy()(color_stream(run_length=1)[-1]).detach(), answers[-1])
    for plain in (model.deploy(), model.deploy(color_stream(run_length=1))):
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in plain.modules())


@pytest.mark.parametrize("build", [batch_norm_classifier, group_norm_classifier, pixel_classifier])
@pytest.mark.parametrize(("num_before", "run_length"), [(0, 1), (3, 1), (18, 10)])
def test_a_batch_that_overflows_leaves_no_trace(
    build: Callable[[], nn.Sequential], num_before: int, run_length: int
) -> None:
    model, batches = ctta.VANE(build(), lr=0.02, max_distance=None), color_stream(run_length)
    for x in batches[:num_before]:
        model(x)
    assert build is pixel_classifier or (model.chain.state.stickiness > model.min_stickiness) == (run_length > 1)
    before = snapshot(model)
    logits = model(torch.full_like(batches[3], 1e308))
    assert build is not group_norm_classifier or not logits.isfinite().all()  # others are outliers for the source
    assert_unchanged(model, before)
    with pytest.raises(InputError):
        model(torch.full_like(batches[3], math.nan))
    assert_unchanged(model, before)
    assert model(batches[3]).isfinite().all()


# ---- outliers ----


@pytest.mark.parametrize("build", [batch_norm_classifier, pixel_classifier])
@pytest.mark.parametrize("value", [-1e4, 65535.0, 1e18])
def test_an_outlier_is_answered_by_the_source_and_changes_nothing(
    build: Callable[[], nn.Sequential], value: float
) -> None:
    """The others of its batch are predicted and learned from as if it had not come."""
    model, without = ctta.VANE(build(), lr=0.02), ctta.VANE(build(), lr=0.02)
    first, x, last = (color_stream(1)[number] for number in (0, 3, 5))
    for each in (model, without):
        each(first)
    broken = x.clone()
    broken[2, 0, 1, 1] = value
    others = torch.arange(len(x)) != 2
    for call in (model.predict, model):
        assert torch.equal(call(broken)[2].flatten(), ctta.Source(build())(broken)[2].flatten())
    assert without(x[others]).isfinite().all()
    assert_unchanged(model, snapshot(without))
    assert torch.equal(model(last), without(last))


class Folds(nn.Module):
    """Show a network the quarters of each image as images of their own, and beside it a norm that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.net = nn.BatchNorm1d(3), batch_norm_classifier()

    def forward(self, x: Tensor) -> Tensor:
        side = x.shape[-1] // 2
        parts = x.unfold(2, side, side).unfold(3, side, side).flatten(2, 3).transpose(1, 2).flatten(0, 1)
        logits: Tensor = self.net(parts).unflatten(0, (len(x), 4)).mean(1)
        return logits


def test_outliers_of_networks_that_fold_parts_into_the_batch() -> None:
    side = 2 * color_stream(1)[0].shape[-1]
    first, x = (torch.rand(6, 3, side, side, dtype=torch.float64) for _ in range(2))
    model, without = ctta.VANE(Folds().double()), ctta.VANE(Folds().double())
    broken = x.clone()
    broken[4, 0, -1, -1] = 1e9
    for each, last in ((model, broken), (without, x[[0, 1, 2, 3, 5]])):
        each(first), each(last)
    assert_unchanged(model, snapshot(without))


@pytest.mark.parametrize("place", [0, -1])
def test_outliers_in_any_window(place: int) -> None:
    first, x, last = torch.rand(3, 6, 3, 20, 28, dtype=torch.float64)
    model, without = (ctta.VANE(SlidingWindow(pixel_classifier(), window=8, stride=6)) for _ in range(2))
    broken = x.clone()
    broken[4, 0, place, place] = 1e4
    for each, images in ((model, broken), (without, x[[0, 1, 2, 3, 5]])):
        each(first), each(images)
    assert_unchanged(model, snapshot(without))
    assert torch.equal(model(last), without(last))


def test_a_network_whose_batch_norms_are_not_used() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.LayerNorm(4))
    net.unused = nn.BatchNorm1d(3)
    net.forward = lambda x: net[2](net[1](net[0](x)))  # type: ignore[method-assign]
    assert ctta.VANE(net)(torch.rand(6, 3, 2, 2)).shape == (6, 4)


def test_a_batch_of_outliers_changes_nothing() -> None:
    model, (first, x) = ctta.VANE(batch_norm_classifier()), color_stream(1)[:2]
    model(first)
    before = snapshot(model)
    assert torch.equal(model(x - 1e4), ctta.Source(batch_norm_classifier())(x - 1e4))
    assert_unchanged(model, before)


# ---- the chain of labels ----


def noisy_logits(labels: Tensor, signal: float, num_classes: int = 4) -> Tensor:
    """Return logits of a calibrated network that sees the labels through Gaussian noise."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(len(labels), num_classes, generator=generator, dtype=torch.float64)
    return signal * (signal * nn.functional.one_hot(labels, num_classes) + noise)


@pytest.mark.parametrize(("run_length", "doubt"), [(1, 0.0), (5, 0.0), (5, 0.3)])
def test_chain_equals_its_twin(run_length: int, doubt: float) -> None:
    chain, twin = Chain(doubt), NaiveChain(1000, doubt)
    for logits in noisy_logits(draw_labels(60, run_length), 2.0, num_classes=6).split((1, 9, 1, 1, 20, 28)):
        CLOSE(chain.follow(logits).exp(), torch.tensor(twin.follow(logits), dtype=torch.float64))
        CLOSE(chain.state.stickiness, twin.stickiness)
        CLOSE(chain.state.frequencies.tolist(), twin.frequencies)


@pytest.mark.parametrize("batch_size", [1, 20])
def test_independent_labels_do_not_stick_however_biased_the_network_is(batch_size: int) -> None:
    chain, logits = Chain(), noisy_logits(draw_labels(400, 1), 2.0)
    logits[:, 0] += 4.0
    assert (logits.argmax(1) == 0).double().mean() > 0.6
    found = []
    for batch in logits.split(batch_size):
        chain.follow(batch)
        found.append(chain.state.stickiness)
    assert max(found) < 0.45 and found[-1] < 0.3


@pytest.mark.parametrize(("num_classes", "power"), [(2, 0.0), (1000, 0.0), (100, 1.5), (10, 1.5)])
def test_independent_labels_do_not_stick_in_any_label_space(num_classes: int, power: float) -> None:
    """Two classes, a thousand of which most never occur, and long tails."""
    frequencies = torch.arange(1, num_classes + 1, dtype=torch.float64) ** -power
    labels = torch.multinomial(frequencies, 400, replacement=True, generator=torch.Generator().manual_seed(5))
    for batch_size in (1, 20):
        chain, found = Chain(), list[float]()
        for batch in noisy_logits(labels, 3.0, num_classes).split(batch_size):
            assert chain.follow(batch).isfinite().all()
            found.append(chain.state.stickiness)
        assert max(found[len(found) // 4 :]) < 0.45


@pytest.mark.parametrize("num_classes", [2, 1000])
def test_runs_of_labels_stick_in_any_label_space(num_classes: int) -> None:
    labels = torch.randint(num_classes, (20,), generator=torch.Generator().manual_seed(5)).repeat_interleave(20)
    chain = Chain()
    for batch in noisy_logits(labels, 3.0, num_classes).split(20):
        chain.follow(batch)
    assert chain.state.stickiness > 0.45


def test_runs_of_labels_stick_within_a_few_batches_and_correct_predictions() -> None:
    chain, labels = Chain(), draw_labels(400, 10)
    logits, posteriors = noisy_logits(labels, 2.0), []
    for number, batch in enumerate(logits.split(20)):
        posteriors.append(chain.follow(batch))
        assert number < 5 or chain.state.stickiness > 0.45
    before, after = ((each.argmax(1) == labels).double().mean() for each in (logits, torch.cat(posteriors)))
    assert 0.7 < before < 0.85 and after > before + 0.12


def test_posteriors_of_labels_that_never_stay_follow_the_predictions() -> None:
    chain, logits = Chain(0.3), noisy_logits(draw_labels(40, 10), 2.0)

    def doubted(batch: Tensor) -> Tensor:
        return 0.7 * (batch / 2).softmax(1) + 0.3 * chain.state.frequencies

    CLOSE(chain.follow(logits[:1]).exp(), doubted(logits[:1]))  # nothing comes before the first image
    chain.state.transitions.copy_(torch.tensor([0.0, 1e13]))
    CLOSE(chain.follow(logits).exp(), doubted(logits))
    chain.state.transitions.copy_(torch.tensor([1e13, 1.1e13]))
    assert not torch.allclose(chain.follow(logits).exp(), doubted(logits), atol=0.1)


def test_class_frequencies_begin_anew_with_a_domain() -> None:
    """A network that prefers another class from now on looks like labels that repeat, unless the domain is new."""
    logits = noisy_logits(draw_labels(240, 1), 2.0)
    logits[:200, 0] += 4.0
    logits[200:, 1] += 4.0
    found = []
    for is_new in (False, True):
        chain = Chain()
        chain.follow(logits[:200])
        chain.follow(logits[200:], is_new_domain=is_new)
        found.append((chain.state.stickiness, float(chain.state.frequencies[1])))
    assert found[1][0] < found[0][0] and found[1][1] > found[0][1] + 0.1


# ---- domains ----


def look(num_images: int, *, gain: float = 1.0, noise: float = 0.0, seed: int = 0) -> Tensor:
    """Return the features of images that differ in color and contrast, under a shift."""
    generator = torch.Generator().manual_seed(seed)
    colors, contrast = (torch.rand(num_images, 3, 1, 1, generator=generator) for _ in range(2))
    x = colors + (0.1 + 0.3 * contrast) * torch.randn(num_images, 3, 8, 8, generator=generator)
    return measure_appearance(gain * x + noise * torch.randn(num_images, 3, 8, 8, generator=generator))


@pytest.mark.parametrize("batch_size", [1, 10, 50])
def test_a_domain_ends_where_images_look_different(batch_size: int) -> None:
    change = Domain()
    before = [change.follow(batch) for batch in look(200).split(batch_size)]
    assert not any(before) and change.state.num_images == pytest.approx(182, abs=10)
    after = [change.follow(batch) for batch in look(50, noise=1.0, seed=1).split(batch_size)]
    assert sum(after) == 1 and any(after[: math.ceil(20 / batch_size)]) and change.state.num_images <= 50


def test_mixed_domains_are_one() -> None:
    change = Domain()
    mixed = torch.stack([look(200), look(200, noise=1.0), look(200, gain=0.3)], 1).flatten(0, 1)
    assert not any(change.follow(batch) for batch in mixed.split(20))


def test_frames_that_hardly_differ_are_one_domain() -> None:
    """A camera that does not move: brightness and contrast change by little, but by more than they vary."""
    change, frame = Domain(), torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert not any(change.follow(measure_appearance(gain * frame.repeat(8, 1, 1, 1))) for gain in (1.0, 1.0, 1.0, 1.1))
    assert change.follow(measure_appearance(0.3 * frame.repeat(8, 1, 1, 1)))


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 1, 6), (4, 4, 1), (9,)])
def test_appearance_equals_its_twin(shape: tuple[int, ...]) -> None:
    x = torch.randn(6, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0] = 0.5  # without contrast
    CLOSE(measure_appearance(x).tolist(), [naive_look(image) for image in x])


@pytest.mark.parametrize(("gain", "offset"), [(255.0, 0.0), (4.0, -2.0)])
def test_domains_do_not_depend_on_the_range_of_values(gain: float, offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    colors = torch.rand(160, 3, 1, 1, generator=generator) + 0.1 * torch.randn(160, 3, 8, 8, generator=generator)
    brightness = torch.tensor([0.0, 0.15, 0.3, 0.6]).repeat_interleave(40)[:, None, None, None]
    found = []
    for x in (colors + brightness, gain * (colors + brightness) + offset):
        change = Domain(0.2)
        found.append([change.follow(batch) for batch in measure_appearance(x).split(8)])
    assert found[0] == found[1] and 0 < sum(found[0]) < 5


def test_another_number_of_channels_begins_a_domain() -> None:
    net = nn.Sequential(Gray(), batch_norm_classifier())
    model, x = ctta.VANE(net), color_stream(run_length=1)[3]
    for batch in (x, x.mean(1, keepdim=True), x):
        assert model(batch).isfinite().all() and model.domain_change.state.num_images == len(x)


class Gray(nn.Module):
    """Give gray images the channels of colored ones."""

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 3, -1, -1)


def test_images_without_a_look_say_nothing() -> None:
    change = Domain()
    change.follow(look(20))
    before = change.state
    assert not change.follow(torch.full((20, 9), math.nan))
    assert all(map(torch.equal, change.state, before))


# ---- statistics ----


def test_statistics_of_a_new_domain_are_those_of_its_batch() -> None:
    before = update_sample(SampleState.initial(), 40, 0.0, 64.0, is_new_domain=False)[0]
    assert float(before.size) == 40
    (old, share), (new, new_share) = (
        update_sample(before, 40, 0.0, 64.0, is_new_domain=is_new) for is_new in (False, True)
    )
    CLOSE([float(new.size), new_share, share * float(old.size)], [40.0, 1.0, 40.0])
    assert share < 0.7


@pytest.mark.parametrize("prevails", [False, True])
def test_nothing_is_learned_while_the_source_sees_mostly_one_class(prevails: bool) -> None:
    x, *_ = color_stream(run_length=1)
    model = ctta.VANE(batch_norm_classifier(), views=())
    num_classes = model.predict(x).shape[1]
    counts = torch.full((num_classes,), 100.0, dtype=torch.float64)
    counts[0] += 2000 * prevails
    before = model.source_chain.state._replace(message=counts / counts.sum(), class_counts=counts)
    model.source_chain.store_(before)
    model(x)
    assert model.source_chain.state.one_class_prevails == prevails
    assert (model.last_step is None) == prevails


def test_images_of_one_class_are_worth_less() -> None:
    sample, share = update_sample(SampleState.initial(), 19, 0.9, 64.0, is_new_domain=False)
    CLOSE([float(sample.size), share], [1.0, 1.0])


def follow(norm: nn.BatchNorm2d, *batches: Tensor, tolerance: float = 0.025) -> tuple[ShiftStatistics, Tensor, Tensor]:
    """Return the state after batches of independent images, its distance, and the output for the last of them."""
    (statistics,) = use_shift_statistics_(nn.Sequential(norm))
    assert isinstance(statistics, ShiftStatistics)
    sample, fraction = SampleState.initial(), torch.zeros_like(statistics.scatter)
    for x in batches:
        sample, share = update_sample(sample, len(x), 0.0, 64.0, is_new_domain=False)
        for _ in range(2):  # the first time to measure
            batch = FollowedBatch(share, float(sample.size), fraction)
            with change_call(batch_facts=batch):
                output = norm(x)
            fraction = measure_fraction([distance := batch.layers[norm].distance], tolerance)
        store_layers_(norm, nn.ModuleList([statistics]), batch.layers)
    return statistics, distance, output


def norm_and_images(dtype: torch.dtype = torch.float64) -> tuple[nn.BatchNorm2d, Tensor]:
    """Return a layer and images of its source."""
    norm = nn.BatchNorm2d(2).to(dtype).eval()
    norm.running_mean, norm.running_var = torch.tensor([1.0, -2.0], dtype=dtype), torch.tensor([4.0, 0.25], dtype=dtype)
    values = torch.randn(64, 2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return norm, values * torch.tensor([2.0, 0.5], dtype=dtype)[:, None, None] + norm.running_mean[:, None, None]


@pytest.mark.parametrize(
    ("shift", "scale", "low", "high"),
    [(0.0, 1.0, 0.0, 1e-9), (3.0, 1.0, 0.99, 1.0), (0.0, 3.0, 0.99, 1.0), (0.1, 1.0, 0.01, 0.8)],
)
def test_statistics_move_by_the_distance_of_the_stream(shift: float, scale: float, low: float, high: float) -> None:
    norm, x = norm_and_images()
    statistics, *_ = follow(norm, x * scale + shift)
    assert norm.running_var is not None
    fraction = (norm.running_var - statistics.source_var) / (statistics.variance - statistics.source_var)
    CLOSE(fraction[0], fraction[1])  # one for all channels
    assert low <= fraction[0] < high


@pytest.mark.parametrize("num_images", [1, 10, 64])
def test_images_of_the_source_move_nothing_whatever_their_number(num_images: int) -> None:
    """The statistics of few images are far from the source's by chance, and images differ in brightness."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 64, 4, 4, generator=generator, dtype=torch.float64)
    x += torch.randn(4096, 64, 1, 1, generator=generator, dtype=torch.float64)
    norm = nn.BatchNorm2d(64, momentum=None).double()
    norm(x)
    norm.eval()
    found = []
    for start in range(0, 2048, 256):
        layer = copy.deepcopy(norm)
        batches = x[start : start + max(16, 4 * num_images)].split(num_images)
        found.append(follow(layer, *batches)[1])
    assert measure_fraction(found, 0.025) < 0.05, "as if these were the layers of a network"


def test_a_channel_that_is_always_dead_says_nothing() -> None:
    """Its variance in the source is far below eps, so the ratio to the stream's means nothing."""
    norm, x = norm_and_images(torch.float32)
    assert norm.running_var is not None and norm.running_mean is not None
    norm.running_mean[0], norm.running_var[0] = 0.0, 1e-14  # as published networks have them
    x[:, 0] = 0
    statistics, *_ = follow(norm, x)
    assert norm.running_var[1] == statistics.source_var[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stays_constant", [True, False])
def test_a_channel_that_is_constant_in_the_source(dtype: torch.dtype, stays_constant: bool) -> None:
    norm, x = norm_and_images(dtype)
    assert norm.running_var is not None and norm.running_mean is not None
    norm.running_var[0] = 0
    if stays_constant:
        x[:, 0] = norm.running_mean[0]
    statistics, _, output = follow(norm, x, x)
    assert output.isfinite().all() and all(buffer.isfinite().all() for buffer in statistics.buffers())
    if stays_constant:
        CLOSE(output[:, 0], torch.zeros_like(output[:, 0]))
    model = ctta.VANE(nn.Sequential(norm, nn.Flatten(), nn.Linear(128, 4)).to(dtype))
    assert all(model(x).isfinite().all() for _ in range(3)) and model.num_skipped == 0


def test_a_layer_outside_of_a_step_repeats_the_last_one() -> None:
    norm, x = norm_and_images()
    statistics, _, output = follow(norm, x + 1, x + 2)
    before = [buffer.clone() for buffer in statistics.buffers()]
    CLOSE(norm(x + 2), output)
    for is_view in (True, False):
        with change_call(
            batch_facts=(batch := FollowedBatch(0.5, 64.0, torch.full_like(statistics.scatter, 0.5), is_view=is_view))
        ):
            assert not torch.allclose(norm(x + 2), output)
        assert bool(batch.layers) != is_view
        assert all(map(torch.equal, before, statistics.buffers()))  # until the method stores what was collected
        CLOSE(norm(x + 2), output)


# ---- views ----


def draw_moved(num_moved: int, motion: float = 0.5) -> list[MovedView]:
    """Return drawn views but the first, which only flips."""
    _, *views = geometric_views(num_moved + 1, motion=motion).draw(torch.Generator().manual_seed(0))
    return [view for view in views if isinstance(view, MovedView)]


def test_views_of_images_of_any_range_and_number_of_channels() -> None:
    x = 3 * torch.randn(2, 5, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first, *others = geometric_views(3).draw(torch.Generator().manual_seed(0))
    assert torch.equal(first.augment(x), x.flip(-1)) and len(others) == 2
    for view in draw_moved(4, motion=1.0):
        CLOSE(view.augment(x), naive_motion(view, x))


def test_draws_cover_half_of_the_ranges_of_cotta() -> None:
    views = draw_moved(64)
    for name, low, high in (("degrees", -7.5, 7.5), ("translate_x", -1 / 32, 1 / 32), ("scale", 0.95, 1.05)):
        values = sorted(getattr(view, name) for view in views)
        width = high - low
        assert low <= values[0] < low + width / 32 and high - width / 32 < values[-1] <= high
    assert sum(view.flip for view in views) == 32
    assert all(view.scale == 1 and view.degrees == 0 for view in draw_moved(3, motion=0.0))


@pytest.mark.parametrize(
    ("view", "margin", "atol"),
    [
        (geometric_views(1).draw(torch.Generator())[0], 0, 1e-12),
        (MovedView(0.0, 0.0, 0.0, 1.0, flip=True), 0, 1e-12),
        (MovedView(0.0, 1 / 16, -1 / 32, 1.0, flip=True), 2, 1e-12),
        (MovedView(10.0, 1 / 32, 1 / 16, 1.1, flip=True), 5, 0.01),
    ],
)
def test_dense_logits_are_moved_back(view: SplitView, margin: int, atol: float) -> None:
    rows, columns = torch.meshgrid(*[torch.arange(16, dtype=torch.float64)] * 2, indexing="ij")
    x = torch.stack([rows + 3 * columns, rows - columns])[None]
    inner = (..., slice(margin, 16 - margin), slice(margin, 16 - margin))
    torch.testing.assert_close(view(lambda image: image, x)[inner], x[inner], rtol=0, atol=atol)
    assert view.augment(x).sub(x)[inner].abs().max() > 1


def test_logits_of_images_are_not_moved() -> None:
    logits = torch.rand(2, 4)
    for view in geometric_views(3).draw(torch.Generator()):
        assert torch.equal(view(lambda image: logits, torch.rand(2, 3, 4, 4)), logits)


def test_equal_generators_give_equal_views() -> None:
    first, same, other = (geometric_views(4).draw(torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert first == same != other and len(set(first)) == 4


@pytest.mark.parametrize(("num_views", "motion"), [(0, 0.5), (4097, 0.5), (1.5, 0.5), (4, 2), (4, -0.1), (4, math.nan)])
def test_views_that_cannot_be_drawn(num_views: Any, motion: float) -> None:
    with pytest.raises(ConfigError, match="GeometricViews takes 1 to 4096" if motion == 0.5 else "motion"):
        geometric_views(num_views, motion=motion)


# ---- with a guard ----


def test_a_guard_takes_repeated_labels_for_no_collapse() -> None:
    """Answers that follow the chain differ from the source's; the anchor is the method without what it has learned."""
    net, batches = batch_norm_classifier(), color_stream(run_length=10)
    spec = ctta.guard.InputSpec(low=-10.0, high=10.0)
    model, guarded = ctta.VANE(net), ctta.Guarded(ctta.VANE(net), input_spec=spec)
    for x in batches:
        CLOSE(guarded(x), model(x))
    assert model.chain.state.stickiness > model.min_stickiness
    assert not guarded.events


def test_the_anchor_is_the_answer_until_something_is_learned() -> None:
    x, *others = color_stream(run_length=1)
    model = ctta.VANE(batch_norm_classifier(), lr=0.02)
    before = snapshot(model)
    CLOSE(model.anchor_logits(x), model.predict(x))
    assert_unchanged(model, before)
    for batch in others:
        model(batch)
    assert not torch.allclose(model.anchor_logits(x), model.predict(x))

"""Mistakes of callers: each raises an error that helps, and changes nothing."""

import copy
import inspect
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

import ctta
from ctta.optim import step_if_finite_
from ctta.testing.networks import BlockViT


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def make_conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 3))


def build(net: nn.Module, method: str, **settings: Any) -> ctta.AdaptiveModel:
    """Build any method, also one that needs source images or a vision transformer."""
    info = ctta.METHODS[method].info
    if info and info.needs_vit:
        net = BlockViT(patch=2, size=6)
    if info and info.needs_source_data:
        settings["source_stats"] = ctta.source_stats(net, [torch.rand(4, 3, 6, 6)], blocks=info.needs_vit)
    return ctta.adapt(net, method, **settings)


def make_weight_normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3)), nn.LayerNorm(3))


def make_script() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script: nn.Module = torch.jit.trace(make_mlp(), torch.rand(2, 4))
    return nn.Sequential(script)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (make_script, "give the Python network"),
        (make_weight_normed, "parametrizations"),
        (lambda: nn.Sequential(nn.LazyLinear(3), nn.LayerNorm(3)), "call the network on a batch"),
    ],
)
def test_networks_that_cannot_be_adapted(make: Callable[[], nn.Module], remedy: str) -> None:
    with pytest.raises(ctta.ConfigError, match=f"'0'.*{remedy}"):
        ctta.Tent(make())


def test_a_call_from_a_second_thread_is_refused() -> None:
    """Deterministic: the first call waits within the network until the second one has been refused."""
    entered, refused = threading.Event(), threading.Event()

    class Waits(nn.Identity):
        @override
        def forward(self, x: Tensor) -> Tensor:
            entered.set()
            assert refused.wait(30)
            return x

    net = make_mlp()
    model, alone = ctta.Tent(nn.Sequential(Waits(), net)), ctta.Tent(net)
    fork, x = model.fork(), torch.rand(8, 4)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(model, x)
        assert entered.wait(30)
        for call in (model, model.predict):
            with pytest.raises(RuntimeError, match="fork"):
                call(x)
        refused.set()
        assert torch.equal(first.result(), alone(x))
    assert torch.equal(model(x), alone(x))
    assert fork(x).shape == (8, 3)


class TracksInput(ctta.Tent):
    """Extends a method whose check of the values waits, and changes something before."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.register_buffer("average", torch.zeros(4))

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        self.get_buffer("average").lerp_(x.mean(0), 0.1)
        return super().adapt_step(x)


def test_a_step_that_is_extended_gets_checked_batches() -> None:
    model = TracksInput(make_mlp())
    model(torch.rand(8, 4))
    before, last_step = model.get_buffer("average").clone(), model.last_step
    with pytest.raises(ctta.InputError):
        model(torch.full((8, 4), torch.nan))
    assert torch.equal(model.get_buffer("average"), before) and model.last_step is last_step


def test_a_refused_batch_keeps_the_record_of_the_last_step() -> None:
    model = ctta.Tent(make_mlp(), policies=[ctta.policies.reset_every(3)])
    model(torch.rand(8, 4))
    last_step = model.last_step
    with pytest.raises(ctta.InputError):
        model(torch.full((8, 4), torch.nan))
    assert last_step is not None and model.last_step is last_step


class LooksUp(nn.Module):
    """A network that fails on a bad value in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.norm(self.table((x[:, 0] * 4).long()))
        return logits


def test_a_bad_value_on_which_the_network_fails() -> None:
    model = ctta.Tent(LooksUp())
    model(torch.rand(8, 4))
    with pytest.raises(ctta.InputError):
        model(torch.full((8, 4), torch.nan))


class LearnsFromNothing(ctta.Tent):
    """Has a constant in place of a loss where nothing is selected."""

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        self.minimize(torch.zeros(()), selected=torch.zeros(len(x), dtype=torch.bool))
        return logits


def test_a_constant_loss_of_nothing() -> None:
    model = LearnsFromNothing(make_mlp())
    model(torch.rand(8, 4))
    assert model.last_step is not None and model.last_step.is_empty and model.num_skipped == 0


class CountsInChild(nn.Module):
    """Writes to a buffer that a part of it shares, and predicts by it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.part = make_mlp(), nn.Module()
        count = torch.zeros(())
        self.register_buffer("count", count)
        self.part.register_buffer("count", count)

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("count").add_(1)
        logits: Tensor = self.net(x) + self.part.get_buffer("count")
        return logits


@pytest.mark.parametrize("guarded", [False, True])
def test_a_network_that_writes_to_its_buffers(guarded: bool, tmp_path: Path) -> None:
    net = CountsInChild()
    model: ctta.AdaptiveModel = ctta.Tent(net, policies=[ctta.policies.reset_every(2)])
    model = ctta.Guarded(model) if guarded else model
    batches = [torch.rand(8, 4) for _ in range(6)]
    for x in batches[:5]:
        assert torch.equal(model.predict(x), model(x))
    assert model.source.get_buffer("count") == model.unwrapped.source.get_buffer("count") == 0
    ctta.save(model, tmp_path / "stream")
    assert torch.equal(ctta.load(tmp_path / "stream", net)(batches[5]), model(batches[5]))


@pytest.mark.parametrize("method", ctta.METHODS)
def test_one_image_without_a_batch_dimension(method: str) -> None:
    model = build(make_conv_net(), method)
    with pytest.raises(ctta.InputError, match="unsqueeze"):
        model(torch.rand(3, 6, 6))


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.zeros(2, 3, 6, 6, dtype=torch.uint8), TypeError, "/ 255"),
        (torch.zeros(2, 3, 6, 6, dtype=torch.long), TypeError, "int64"),
        (torch.full((2, 3, 6, 6), torch.nan), ctta.InputError, "NaN"),
        (torch.full((2, 3, 6, 6), -torch.inf), ctta.InputError, "infinite"),
        (torch.rand(6), ctta.InputError, "batch"),
        ([[1.0]], TypeError, "tensor"),
    ],
)
def test_bad_batches(x: Any, error: type[Exception], words: str) -> None:
    model = ctta.CoTTA(make_conv_net())
    before = copy.deepcopy(model.state_dict())
    for call in (model, model.adapt, model.predict):
        with pytest.raises(error, match=words):
            call(x)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert (model.num_steps, model.num_skipped, model.last_step) == (0, 0, None)


def test_a_network_that_loses_the_batch_dimension() -> None:
    class Pools(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean((0, 2, 3))

    with pytest.raises(ctta.ConfigError):
        ctta.Source(Pools())(torch.rand(2, 3, 4, 4))


@pytest.mark.parametrize("net", ["resnet50", None, ctta.Source(nn.Linear(2, 2))])
def test_not_a_network(net: Any) -> None:
    with pytest.raises(TypeError, match="expected a network"):
        ctta.CoTTA(net)


def test_nothing_to_train() -> None:
    with pytest.raises(ctta.ConfigError):
        ctta.Tent(nn.Linear(4, 3))
    with pytest.raises(ctta.ConfigError, match="requires_grad_"):
        ctta.CoTTA(make_mlp().requires_grad_(False))


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD(make_mlp().parameters(), lr=0.1), lambda parameters: None, "adam"]
)
def test_an_optimizer_is_a_factory(optimizer: Any) -> None:
    with pytest.raises(TypeError, match="factory"):
        ctta.Tent(make_mlp(), optimizer=optimizer)


@pytest.mark.parametrize(
    "bad",
    [
        {"decay": 1.1},
        {"decay": -0.1},
        {"restore": 2},
        {"restore": float("nan")},
        {"batch_stats": -1},
        {"batch_stats": 1.5},
        {"threshold": float("nan")},
        {"gate": "pixel"},
        {"average": "mean"},
        {"predict_with": "student"},
        {"loss": "mse"},
    ],
)
def test_hyperparameters_out_of_range(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ctta.ConfigError, match=name):
        ctta.CoTTA(make_mlp(), **bad)


@pytest.mark.parametrize("views", [3, [1, 2], "flip", None])
def test_views_of_the_wrong_type(views: Any) -> None:
    for method in (ctta.CoTTA, ctta.TestAug):
        with pytest.raises(TypeError, match="views"):
            method(make_mlp(), views=views)


def test_test_aug_needs_a_view() -> None:
    with pytest.raises(ctta.ConfigError):
        ctta.TestAug(make_mlp(), views=())


def test_unknown_method_and_unknown_hyperparameter() -> None:
    with pytest.raises(ctta.ConfigError, match=r"did you mean 'cotta'.*bn_stats"):
        ctta.adapt(make_mlp(), "cota")
    with pytest.raises(TypeError, match="learning_rate"):
        ctta.adapt(make_mlp(), "tent", learning_rate=1)


def test_an_output_without_logits() -> None:
    class ReturnsTuple(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), x

    x = torch.randn(2, 4)
    with pytest.raises(ctta.ConfigError):
        ctta.Source(ReturnsTuple())(x)
    for missing in (2, "logits"):
        with pytest.raises(ctta.ConfigError, match=f"there is no {missing!r}"):
            ctta.Source(ReturnsTuple(), output=missing)(x)
    by_index = ctta.Source(ReturnsTuple(), output=0)
    assert by_index(x).shape == (2, 3)
    assert ctta.Source(ReturnsTuple(), output=lambda out: out[0])(x).shape == (2, 3)


class InfiniteGradient(nn.Module):
    """A network with finite outputs and an infinite gradient, that of the square root at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.weight.sqrt() + self.norm(x)[:, :3]
        return logits


def test_a_non_finite_gradient_skips_the_whole_step() -> None:
    model = ctta.CoTTA(InfiniteGradient(), views=(lambda m, x: m(2 * x + 1),), threshold=2.0, restore=1.0, decay=0.0)
    with torch.no_grad():
        model.student.get_parameter("norm.weight").fill_(3.0)
    before = copy.deepcopy(model.state_dict())
    assert torch.isfinite(model(torch.randn(5, 4))).all()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert (model.num_steps, model.num_skipped) == (1, 1)
    assert model.last_step is not None and model.last_step.skipped
    assert torch.isfinite(model.last_step.loss)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_error_during_a_step_leaves_no_gradient_behind() -> None:
    class FailingBackward(torch.autograd.Function):
        fails = True

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if FailingBackward.fails:
                raise MemoryError("out of memory")
            return gradient

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            apply: Any = FailingBackward.apply
            logits: Tensor = self.second(apply(self.first(x)))
            return logits

    net, x = Net(), torch.randn(5, 4)
    model = ctta.Tent(net)
    with pytest.raises(MemoryError):
        model(x)
    FailingBackward.fails = False
    untouched = ctta.Tent(net)
    assert torch.equal(model(x), untouched(x))
    for adapted, expected in zip(model.student.parameters(), untouched.student.parameters(), strict=True):
        assert torch.equal(adapted, expected)


class Unchanged(ctta.views.SplitView):
    """A view that takes inputs of any shape."""

    def augment(self, x: Tensor) -> Tensor:
        return x

    def align(self, logits: Tensor, x: Tensor) -> Tensor:
        return logits


@pytest.mark.parametrize("method", ctta.METHODS)
def test_too_many_axes(method: str) -> None:
    takes_views = "views" in inspect.signature(ctta.METHODS[method]).parameters
    settings: dict[str, Any] = {"views": (Unchanged(),)} if takes_views else {}
    with pytest.raises(ctta.InputError):
        build(make_conv_net(), method, **settings)(torch.rand(2, 1, 3, 6, 6))


def test_networks_may_add_the_channel_axis_themselves() -> None:
    class Spectrogram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = make_conv_net()

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.body(x.unsqueeze(1).expand(-1, 3, -1, -1))
            return logits

    for size in (2, 3, 4):
        assert ctta.Tent(Spectrogram())(torch.rand(size, 6, 6)).shape == (size, 3)
    with pytest.raises(ctta.ConfigError):
        ctta.Tent(Spectrogram(), output="logits")(torch.rand(2, 6, 6))


def test_scaled_views_need_images() -> None:
    model = ctta.TestAug(make_mlp(), views=ctta.views.multiscale_flip())
    with pytest.raises(ctta.InputError):
        model(torch.rand(2, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_are_not_trained(dtype: torch.dtype) -> None:
    with pytest.raises(ctta.ConfigError):
        ctta.CoTTA(make_mlp().to(dtype))
    assert ctta.Source(make_mlp().to(dtype))(torch.rand(2, 4, dtype=dtype)).dtype == dtype


def test_a_non_finite_loss_skips_the_step_even_if_its_gradient_is_finite() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1)
    assert not step_if_finite_(optimizer, weight.sum() + torch.inf)
    assert torch.equal(weight.detach(), torch.ones(2))
    assert weight.grad is None
    assert step_if_finite_(optimizer, weight.sum())
    assert torch.equal(weight.detach(), torch.zeros(2))


def test_large_finite_gradients_are_not_skipped() -> None:
    weight = nn.Parameter(torch.zeros(100))
    assert step_if_finite_(torch.optim.SGD([weight], lr=1e-30), (3e38 * weight).sum())


def test_seed_must_be_an_integer() -> None:
    seed: Any = 1.5
    with pytest.raises(TypeError, match="seed"):
        ctta.CoTTA(make_mlp(), seed=seed)


def test_errors_of_the_network_keep_their_type_and_get_one_note() -> None:
    """Only a wrong number of axes is the caller's mistake for sure; it is raised from the network's error."""
    model = ctta.Tent(make_conv_net())
    for call in (model, model.predict, ctta.Guarded(ctta.Tent(make_conv_net()))):
        with pytest.raises(RuntimeError, match="channels") as failure:
            call(torch.rand(2, 5, 6, 6))
        (note,) = failure.value.__notes__
        assert "shape (2, 5, 6, 6): resize" in note
    with pytest.raises(ctta.InputError) as caught:
        model(torch.rand(2, 1, 3, 6, 6))
    assert isinstance(caught.value.__cause__, RuntimeError)

"""What users get wrong: each mistake is an error that helps, and changes nothing."""

import copy

import pytest
import torch
from torch import nn

import ctta
from ctta.optim import step_if_finite_


def layer_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 3))


@pytest.mark.parametrize("method", ctta.METHODS)
def test_one_image_without_a_batch_dimension(method: str) -> None:
    model = ctta.adapt(convolution(), method)
    with pytest.raises(ValueError, match="unsqueeze"):
        model(torch.rand(3, 6, 6))


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.zeros(2, 3, 6, 6, dtype=torch.uint8), TypeError, "/ 255"),
        (torch.zeros(2, 3, 6, 6, dtype=torch.long), TypeError, "int64"),
        (torch.full((2, 3, 6, 6), torch.nan), ValueError, "NaN"),
        (torch.full((2, 3, 6, 6), -torch.inf), ValueError, "infinite"),
        (torch.rand(6), ValueError, "batch"),
        ([[1.0]], TypeError, "tensor"),
    ],
)
def test_bad_batches(x, error: type[Exception], words: str) -> None:
    model = ctta.CoTTA(convolution())
    before = copy.deepcopy(model.state_dict())
    for call in (model, model.adapt, model.predict):
        with pytest.raises(error, match=words):
            call(x)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert (model.num_steps, model.num_skipped, model.last_step) == (0, 0, None)


def test_a_network_that_loses_the_batch_dimension() -> None:
    class Pools(nn.Module):
        def forward(self, x):
            return x.mean((0, 2, 3))

    with pytest.raises(ValueError, match="batch dimension"):
        ctta.Source(Pools())(torch.rand(2, 3, 4, 4))


@pytest.mark.parametrize("net", ["resnet50", None, ctta.Source(nn.Linear(2, 2))])
def test_not_a_network(net) -> None:
    with pytest.raises(TypeError, match="expected a network"):
        ctta.CoTTA(net)


def test_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        ctta.Tent(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="requires_grad_"):
        ctta.CoTTA(layer_normed().requires_grad_(False))


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD(layer_normed().parameters(), lr=0.1), lambda parameters: None, "adam"]
)
def test_an_optimizer_is_a_factory(optimizer) -> None:
    with pytest.raises(TypeError, match="factory"):
        ctta.Tent(layer_normed(), optimizer=optimizer)


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
def test_hyperparameters_outside_their_range(bad: dict) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        ctta.CoTTA(layer_normed(), **bad)


@pytest.mark.parametrize("views", [3, [1, 2], "flip", None])
def test_views_of_the_wrong_kind(views) -> None:
    for method in (ctta.CoTTA, ctta.TestAug):
        with pytest.raises(TypeError, match="views"):
            method(layer_normed(), views=views)


def test_test_aug_needs_a_view() -> None:
    with pytest.raises(ValueError, match="at least one view"):
        ctta.TestAug(layer_normed(), views=())


def test_unknown_method_and_unknown_hyperparameter() -> None:
    with pytest.raises(ValueError, match="'bn_stats'"):
        ctta.adapt(layer_normed(), "cota")
    with pytest.raises(TypeError, match="learning_rate"):
        ctta.adapt(layer_normed(), "tent", learning_rate=1)


def test_output_that_holds_no_logits() -> None:
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x), x

    x = torch.randn(2, 4)
    with pytest.raises(TypeError, match="output="):
        ctta.Source(Two())(x)
    by_index = ctta.Source(Two(), output=0)
    assert by_index(x).shape == (2, 3)
    assert ctta.Source(Two(), output=lambda out: out[0])(x).shape == (2, 3)


class Exploding(nn.Module):
    """Finite outputs whose gradient is infinite: the square root at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sqrt() + self.norm(x)[:, :3]


def test_a_gradient_that_is_not_finite_skips_the_whole_step() -> None:
    model = ctta.CoTTA(Exploding(), views=(lambda m, x: m(2 * x + 1),), threshold=2.0, restore=1.0, decay=0.0)
    with torch.no_grad():
        model.student.norm.weight.fill_(3.0)
    before = copy.deepcopy(model.state_dict())
    answer = model(torch.randn(5, 4))
    assert torch.isfinite(answer).all()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert (model.num_steps, model.num_skipped) == (1, 1)
    assert model.last_step.skipped
    assert torch.isfinite(model.last_step.loss)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_error_in_the_middle_of_a_step_leaves_no_gradient_behind() -> None:
    class Fragile(torch.autograd.Function):
        broken = True

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if Fragile.broken:
                raise MemoryError("out of memory")
            return gradient

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(4), nn.LayerNorm(4)

        def forward(self, x):
            return self.second(Fragile.apply(self.first(x)))

    net, x = Net(), torch.randn(5, 4)
    model = ctta.Tent(net)
    with pytest.raises(MemoryError):
        model(x)
    Fragile.broken = False
    untouched = ctta.Tent(net)
    assert torch.equal(model(x), untouched(x))
    for ours, theirs in zip(model.student.parameters(), untouched.student.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("method", ctta.METHODS)
def test_too_many_axes(method: str) -> None:
    settings = {"views": (lambda m, x: m(x),)} if method in ("cotta", "test_aug") else {}
    with pytest.raises(ValueError, match="4 axes"):
        ctta.adapt(convolution(), method, **settings)(torch.rand(2, 1, 3, 6, 6))


def test_networks_may_add_the_channel_axis_themselves() -> None:
    class Spectrogram(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = convolution()

        def forward(self, x):
            return self.body(x.unsqueeze(1).expand(-1, 3, -1, -1))

    for size in (2, 3, 4):
        assert ctta.Tent(Spectrogram())(torch.rand(size, 6, 6)).shape == (size, 3)


def test_scaled_views_of_something_that_is_no_image() -> None:
    model = ctta.TestAug(layer_normed(), views=ctta.views.multiscale_flip())
    with pytest.raises(ValueError, match="spatial"):
        model(torch.rand(2, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_are_not_trained(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="autocast"):
        ctta.CoTTA(layer_normed().to(dtype))
    assert ctta.Source(layer_normed().to(dtype))(torch.rand(2, 4, dtype=dtype)).dtype == dtype


def test_a_loss_that_is_not_finite_skips_the_step_even_if_its_gradient_is() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1)
    assert not step_if_finite_(optimizer, weight.sum() + torch.inf)
    assert torch.equal(weight.detach(), torch.ones(2))
    assert weight.grad is None
    assert step_if_finite_(optimizer, weight.sum())
    assert torch.equal(weight.detach(), torch.zeros(2))


def test_large_finite_gradients_are_no_reason_to_skip() -> None:
    weight = nn.Parameter(torch.zeros(100))
    assert step_if_finite_(torch.optim.SGD([weight], lr=1e-30), (3e38 * weight).sum())


def test_seed_must_be_a_whole_number() -> None:
    with pytest.raises(TypeError, match="seed"):
        ctta.CoTTA(layer_normed(), seed=1.5)

"""Normalization layers: batch and blended statistics, and which parameters TENT trains."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import ctta
from ctta.core.parallel import change_call
from ctta.nn import find_norm_parameters

LAYERS: dict[str, tuple[Callable[[], _BatchNorm], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(4), (8, 4)),
    "1d sequence": (lambda: nn.BatchNorm1d(4), (8, 4, 5)),
    "2d": (lambda: nn.BatchNorm2d(4), (8, 4, 3, 3)),
    "3d": (lambda: nn.BatchNorm3d(4), (8, 4, 2, 3, 3)),
    "sync": (lambda: nn.SyncBatchNorm(4), (8, 4, 3, 3)),
}


def statistics(net: nn.Sequential) -> tuple[Tensor, Tensor]:
    """Return the running mean and variance of the first layer."""
    layer = net[0]
    assert isinstance(layer, _BatchNorm) and layer.running_mean is not None and layer.running_var is not None
    return layer.running_mean, layer.running_var


def make_network_and_batch(name: str) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    make_layer, shape = LAYERS[name]
    x = torch.randn(shape) * 3 + 1
    net = nn.Sequential(make_layer(), nn.Flatten(), nn.Linear(x[0].numel(), 3)).eval()
    mean, variance = statistics(net)
    mean.normal_()
    variance.uniform_(0.5, 2)
    return net, x


@pytest.mark.parametrize("name", LAYERS)
def test_batch_statistics_equal_training_mode_and_keep_every_key(name: str) -> None:
    net, x = make_network_and_batch(name)
    model = ctta.Tent(net, batch_stats=1.0)
    logits = model(x)
    assert model.student.state_dict().keys() == net.state_dict().keys()
    for key in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        assert torch.equal(model.student.state_dict()[key], net.state_dict()[key])
    torch.testing.assert_close(logits, copy.deepcopy(net).train()(x))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.9])
def test_blended_statistics(name: str, fraction: float) -> None:
    net, x = make_network_and_batch(name)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    blended = copy.deepcopy(net)
    mean, variance = statistics(blended)
    mean.lerp_(x.mean(axes), fraction)
    variance.lerp_(x.var(axes, correction=0), fraction)
    torch.testing.assert_close(ctta.BNStats(net, batch_stats=fraction)(x), blended(x), rtol=1e-5, atol=1e-5)


def test_a_single_channels_last_image_gives_the_gradients_of_a_contiguous_one() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    x, gradients = torch.rand(1, 3, 8, 8), []
    for layout in (torch.contiguous_format, torch.channels_last):
        student = ctta.Tent(net, batch_stats=0.3).student
        ctta.functional.entropy(student(x.to(memory_format=layout))).sum().backward()
        gradients.append(student.get_parameter("1.weight").grad)
    torch.testing.assert_close(*gradients)


def test_one_value_per_channel_needs_blended_statistics() -> None:
    net, x = make_network_and_batch("1d")
    assert torch.isfinite(ctta.BNStats(net, batch_stats=0.1)(x[:1])).all()
    model = ctta.CoTTA(net, views=(), batch_stats=1.0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ctta.InputError):
        model(x[:1])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.num_steps == 0
    assert model.optimizer is not None and model.optimizer.state_dict()["state"] == {}


def test_a_single_image_has_statistics_over_its_pixels() -> None:
    net, x = make_network_and_batch("2d")
    assert torch.isfinite(ctta.BNStats(net, batch_stats=1.0)(x[:1])).all()


def test_layers_without_running_statistics_can_only_use_the_batch() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    ctta.BNStats(net)(torch.randn(5, 4))
    with pytest.raises(ctta.ConfigError):
        ctta.BNStats(net, batch_stats=0.5)


@pytest.mark.parametrize("own", [1.0, 0.5, "auto"])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_blend_statistics_overrides_the_fraction_of_the_layers(own: Any, fraction: float) -> None:
    net, x = make_network_and_batch("2d")
    student = ctta.Tent(net, batch_stats=own).student
    before = student(x)
    with change_call(fraction=fraction):
        overridden = student(x)
    assert torch.equal(overridden, ctta.Tent(net, batch_stats=fraction).student(x))
    assert fraction > 0 or torch.equal(overridden, net(x))
    assert torch.equal(student(x), before)


def test_layers_without_running_statistics_use_the_batch_whatever_the_override() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    model, x = ctta.BNStats(net), torch.randn(5, 4)
    expected = model(x)
    with change_call(fraction=0.0):
        assert torch.equal(model(x), expected)


def test_batch_statistics_survive_eval_of_the_inner_network() -> None:
    net, x = make_network_and_batch("2d")
    model = ctta.BNStats(net, batch_stats=1.0)
    expected = model(x)
    model.source.eval()
    assert torch.equal(model(x), expected)


class CustomNorm(nn.Module):
    """A norm layer that a user wrote."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.mixing = nn.Parameter(torch.ones(width)), nn.Parameter(torch.eye(width))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.gain * x / x.norm(dim=-1, keepdim=True)
        return scaled @ self.mixing


class AbnormalityHead(nn.Linear):
    """Not a norm layer, in spite of its name."""


def test_find_norm_parameters() -> None:
    net = nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.RMSNorm(4),
        nn.InstanceNorm1d(4, affine=True),
        CustomNorm(4),
        nn.BatchNorm1d(4, affine=False),
        AbnormalityHead(4, 4),
    )
    net.get_parameter("3.bias").requires_grad_(False)
    expected = {"1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "4.weight", "5.weight", "5.bias", "6.gain"}
    assert find_norm_parameters(net) == expected


@pytest.mark.parametrize("method", ["tent", "pseudo_label"])
def test_only_norm_parameters_change(method: str) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), CustomNorm(8), nn.Linear(8, 3))
    model = ctta.adapt(net, method)
    for _ in range(3):
        model(torch.randn(16, 4))
    changed = {
        name
        for name, parameter in model.get_submodule("student").named_parameters()
        if not torch.equal(parameter, net.get_parameter(name))
    }
    assert changed == {"1.weight", "1.bias", "2.gain"}


def test_group_norm_survives_channels_last_input_without_gradient() -> None:
    """Without the hook the interpreter crashes here (torch 2.13, CPU)."""
    net = nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.rand(2, 4, 6, 6)
    expected = ctta.Tent(net)(x)
    torch.testing.assert_close(ctta.Tent(net)(x.to(memory_format=torch.channels_last)), expected)

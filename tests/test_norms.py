"""Norm layers: batch statistics without losing a key, blends, and which parameters TENT trains."""

import copy

import pytest
import torch
from torch import nn

import ctta
from ctta.norms import find_norm_parameters

LAYERS = {
    "1d": (lambda: nn.BatchNorm1d(4), (8, 4)),
    "1d sequence": (lambda: nn.BatchNorm1d(4), (8, 4, 5)),
    "2d": (lambda: nn.BatchNorm2d(4), (8, 4, 3, 3)),
    "3d": (lambda: nn.BatchNorm3d(4), (8, 4, 2, 3, 3)),
    "sync": (lambda: nn.SyncBatchNorm(4), (8, 4, 3, 3)),
}


def network(layer: nn.Module) -> nn.Module:
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    return nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(3))


def filled(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    build, shape = LAYERS[name]
    x = torch.randn(shape) * 3 + 1
    net = network(build()).eval()
    net(x)
    return net, x


@pytest.mark.parametrize("name", LAYERS)
def test_batch_statistics_equal_training_mode_and_keep_every_key(name: str) -> None:
    net, x = filled(name)
    model = ctta.Tent(net)
    answer = model(x)
    assert model.student.state_dict().keys() == net.state_dict().keys()
    for key in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        assert torch.equal(model.student.state_dict()[key], net.state_dict()[key])
    torch.testing.assert_close(answer, copy.deepcopy(net).train()(x))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_blended_statistics(name: str, share: float) -> None:
    net, x = filled(name)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    blended = copy.deepcopy(net)
    blended[0].running_mean.lerp_(x.mean(axes), share)
    blended[0].running_var.lerp_(x.var(axes, correction=0), share)
    torch.testing.assert_close(ctta.BNStats(net, batch_stats=share)(x), blended(x), rtol=1e-5, atol=1e-5)


def test_a_single_channels_last_image_gives_the_gradients_of_a_contiguous_one() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    x, gradients = torch.rand(1, 3, 8, 8), []
    for layout in (torch.contiguous_format, torch.channels_last):
        student = ctta.Tent(net, batch_stats=0.3).student
        ctta.functional.entropy(student(x.to(memory_format=layout))).sum().backward()
        gradients.append(student[1].weight.grad)
    torch.testing.assert_close(*gradients)


def test_a_batch_of_one_value_per_channel_can_be_blended_but_not_normalised() -> None:
    net, x = filled("1d")
    assert torch.isfinite(ctta.BNStats(net, batch_stats=0.1)(x[:1])).all()
    model = ctta.CoTTA(net, views=())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"batch_stats=0\.1"):
        model(x[:1])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.num_steps == 0
    assert model.optimizer.state_dict()["state"] == {}


def test_a_batch_of_one_image_has_statistics_where_its_maps_are_large() -> None:
    net, x = filled("2d")
    assert torch.isfinite(ctta.BNStats(net)(x[:1])).all()


def test_layers_without_running_statistics_can_only_use_the_batch() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    ctta.BNStats(net)(torch.randn(5, 4))
    with pytest.raises(ValueError, match="layer '0'"):
        ctta.BNStats(net, batch_stats=0.5)


def test_batch_statistics_survive_eval_of_the_inner_network() -> None:
    net, x = filled("2d")
    model = ctta.BNStats(net)
    expected = model(x)
    model.source.eval()
    assert torch.equal(model(x), expected)


class HouseNorm(nn.Module):
    """A norm layer of the user's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.mixing = nn.Parameter(torch.ones(width)), nn.Parameter(torch.eye(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * x / x.norm(dim=-1, keepdim=True) @ self.mixing


class AbnormalityHead(nn.Linear):
    """No norm layer, whatever its name may sound like."""


def test_which_parameters_are_norm_parameters() -> None:
    net = nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.RMSNorm(4),
        nn.InstanceNorm1d(4, affine=True),
        HouseNorm(4),
        nn.BatchNorm1d(4, affine=False),
        AbnormalityHead(4, 4),
    )
    net[3].bias.requires_grad_(False)
    expected = {"1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "4.weight", "5.weight", "5.bias", "6.gain"}
    assert find_norm_parameters(net) == expected


@pytest.mark.parametrize("method", ["tent", "pseudo_label"])
def test_only_norm_parameters_move(method: str) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), HouseNorm(8), nn.Linear(8, 3))
    model = ctta.adapt(net, method)
    for _ in range(3):
        model(torch.randn(16, 4))
    moved = {
        name
        for name, parameter in model.student.named_parameters()
        if not torch.equal(parameter, net.get_parameter(name))
    }
    assert moved == {"1.weight", "1.bias", "2.gain"}


def test_group_norm_survives_channels_last_input_without_gradient() -> None:
    """The plain layer crashes the interpreter here (torch 2.13, CPU)."""
    net = nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.rand(2, 4, 6, 6)
    expected = ctta.Tent(net)(x)
    torch.testing.assert_close(ctta.Tent(net)(x.to(memory_format=torch.channels_last)), expected)

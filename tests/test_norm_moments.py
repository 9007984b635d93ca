"""Statistics of the inputs of BatchNorm, and gradients through them, against torch's own operations."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ctta.nn import moments, renormalize, use_batch_statistics_
from ctta.nn.moments import attach_statistics_gradient, batch_var_mean, image_var_mean
from ctta.nn.surgery import copy_without_hooks

SHAPES = [(5, 3), (5, 3, 4), (6, 3, 4, 5), (1, 3, 4, 5), (4, 3, 1, 1), (3, 2, 3, 2, 2)]
LAYOUTS = [torch.contiguous_format, torch.channels_last]
CASES = [(shape, layout) for shape in SHAPES for layout in LAYOUTS if layout is LAYOUTS[0] or len(shape) == 4]


def draw(shape: tuple[int, ...], layout: torch.memory_format) -> Tensor:
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 2
    return values.to(memory_format=layout).requires_grad_()


def make_layer(num_channels: int, num_axes: int) -> _BatchNorm:
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    layer: _BatchNorm = kinds[num_axes](num_channels).double().eval()
    generator = torch.Generator().manual_seed(1)
    for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
        assert tensor is not None
        tensor.detach().uniform_(0.5, 2, generator=generator)
    return layer


@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_moments_and_their_gradients(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    values, weights = draw(shape, layout), torch.arange(1, shape[1] + 1).double()
    for axes, compute in (([0, *range(2, len(shape))], batch_var_mean), ([*range(2, len(shape))], image_var_mean)):
        expected = torch.var_mean(values, axes, correction=0) if axes else (torch.zeros_like(values), values)
        results = []
        for found in (expected, compute(values)):
            variance, mean = (each.reshape(-1, shape[1]) for each in found)
            (gradient,) = torch.autograd.grad((weights * (variance + 2 * mean)).square().sum(), values)
            results.append((variance, mean, gradient))
        torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


def test_images_are_measured_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = draw((7, 3, 4, 5), torch.contiguous_format)
    expected = image_var_mean(values), batch_var_mean(values)
    monkeypatch.setattr(moments, "CACHED_ELEMENTS", 2 * 3 * 4 * 5)  # two images, and one in the end
    torch.testing.assert_close((image_var_mean(values), batch_var_mean(values)), expected, rtol=1e-12, atol=1e-12)


def test_a_small_variance_far_from_zero_is_exact() -> None:
    values = 1000 + 0.01 * torch.randn(8, 2, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.var_mean(values.double(), [0, 2, 3], correction=0)
    found = [batch_var_mean(values)[0], batch_var_mean(values.to(memory_format=torch.channels_last))[0]]
    found.append(moments._measure_channels_by_group_norm(values)[0])
    for variance in found:
        torch.testing.assert_close(variance.flatten().double(), expected[0], rtol=1e-2, atol=0)


@pytest.mark.parametrize("elements", [None, 1, 2**20], ids=["kernel", "group norm of rows", "group norm of all"])
@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_blended_statistics_and_their_gradients(
    shape: tuple[int, ...], layout: torch.memory_format, elements: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they are measured, the layer gives the output and gradients of an input that is rescaled for it."""
    if elements is not None:
        monkeypatch.setattr(moments, "MIN_GROUP_NORM_ELEMENTS", 0)
        monkeypatch.setattr(moments, "GROUP_NORM_ELEMENTS", elements)
    values, layer = draw(shape, layout), make_layer(shape[1], len(shape))
    assert layer.running_mean is not None and layer.running_var is not None
    variance, mean = torch.var_mean(values, [0, *range(2, len(shape))], correction=0, keepdim=True)
    mean = layer.running_mean.view_as(mean).lerp(mean, 0.3)
    variance = layer.running_var.view_as(variance).lerp(variance, 0.3)
    weights = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    blending = copy.deepcopy(layer)
    use_batch_statistics_(blending, 0.3)
    results = []
    for each, given in ((layer, renormalize(layer, values, mean, variance, len(shape) - 2)), (blending, values)):
        output = each(given)
        parameters = (values, each.weight, each.bias)
        results.append((output, *torch.autograd.grad((weights * output).sum(), parameters)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_blended_statistics_last_for_one_call(error: type[BaseException]) -> None:
    """Whatever interrupts it: what is read, copied and saved are the running statistics."""
    net = nn.Sequential(nn.BatchNorm2d(3)).eval()
    use_batch_statistics_(net, 0.3)
    layer: Any = net[0]
    x = 5 + torch.rand(4, 3, 2, 2)
    expected = net(x)
    assert torch.equal(layer.running_mean, torch.zeros(3)) and torch.equal(layer.running_var, torch.ones(3))

    def fail(*_: object) -> None:
        assert layer.running_mean.min() > 1
        assert torch.equal(net.state_dict()["0.running_mean"], torch.zeros(3))
        raise error

    handle = layer.register_forward_hook(fail, prepend=True)
    with pytest.raises(error):
        net(x)
    handle.remove()
    assert torch.equal(net.state_dict()["0.running_mean"], torch.zeros(3))
    assert torch.equal(copy_without_hooks(net).get_buffer("0.running_mean"), torch.zeros(3))
    assert torch.equal(net(x), expected) and torch.equal(layer.running_mean, torch.zeros(3))


@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_gradients_reach_the_statistics_that_a_layer_normalizes_by(
    shape: tuple[int, ...], layout: torch.memory_format
) -> None:
    """The layer with updated statistics has the output and gradients of an input that is rescaled for its old ones."""
    values, layer = draw(shape, layout), make_layer(shape[1], len(shape))
    assert layer.running_mean is not None and layer.running_var is not None
    variance, mean = batch_var_mean(values)
    mean = layer.running_mean.view_as(mean).lerp(mean, 0.3)
    variance = layer.running_var.view_as(variance).lerp(variance, 0.3)
    expected = layer(renormalize(layer, values, mean, variance, len(shape) - 2))
    layer.running_mean, layer.running_var = mean.detach().flatten(), variance.detach().flatten()
    inputs = attach_statistics_gradient(layer, (values,), mean, variance)
    assert inputs is not None
    found = layer(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradients = [
        torch.autograd.grad((weights * output).sum(), (values, layer.weight, layer.bias), retain_graph=True)
        for output in (expected, found)
    ]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-11, atol=1e-11)


def test_an_input_without_gradient_is_left_alone() -> None:
    values, layer = torch.randn(4, 3), nn.BatchNorm1d(3).eval()
    variance, mean = batch_var_mean(values)
    assert attach_statistics_gradient(layer, (values,), mean, variance) is None

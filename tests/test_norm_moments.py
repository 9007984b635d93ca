"""Statistics of the inputs of BatchNorm, and gradients through them, against torch's own operations."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ctta.norms import moments, renormalize
from ctta.norms.moments import batch_var_mean, blend_with_batch, image_var_mean, pass_with_gradient

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
    for found in (batch_var_mean(values), batch_var_mean(values.to(memory_format=torch.channels_last))):
        torch.testing.assert_close(found[0].flatten().double(), expected[0], rtol=1e-2, atol=0)


@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_values_for_blended_statistics(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    values, layer = draw(shape, layout), make_layer(shape[1], len(shape))
    assert layer.running_mean is not None and layer.running_var is not None
    variance, mean = torch.var_mean(values, [0, *range(2, len(shape))], correction=0, keepdim=True)
    mean = layer.running_mean.view_as(mean).lerp(mean, 0.3)
    variance = layer.running_var.view_as(variance).lerp(variance, 0.3)
    weights = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    results = []
    for blended in (renormalize(layer, values, mean, variance, len(shape) - 2), blend_with_batch(layer, values, 0.3)):
        output = layer(blended)
        results.append((output, *torch.autograd.grad((weights * output).sum(), (values, layer.weight, layer.bias))))
    torch.testing.assert_close(results[1], results[0], rtol=1e-11, atol=1e-11)


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
    inputs = pass_with_gradient(layer, (values,), mean, variance)
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
    assert pass_with_gradient(layer, (values,), mean, variance) is None

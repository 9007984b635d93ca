"""The CIFAR networks against naive implementations of their description, and the normalizing wrapper."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ctta
from ctta.errors import ConfigError, InputError
from ctta.models import Normalized, ResNeXt29, WideResNet

Shapes = dict[str, tuple[int, ...]]


def batch_norm(name: str, channels: int) -> Shapes:
    vectors = {f"{name}.{leaf}": (channels,) for leaf in ("weight", "bias", "running_mean", "running_var")}
    return vectors | {f"{name}.num_batches_tracked": ()}


def wide_resnet_shapes(depth: int, width: int, classes: int) -> Shapes:
    shapes: Shapes = {"conv1.weight": (16, 3, 3, 3)}
    into = 16
    for block, out in enumerate((16 * width, 32 * width, 64 * width), start=1):
        for layer in range((depth - 4) // 6):
            prefix = f"block{block}.layer.{layer}"
            shapes |= batch_norm(f"{prefix}.bn1", into) | {f"{prefix}.conv1.weight": (out, into, 3, 3)}
            shapes |= batch_norm(f"{prefix}.bn2", out) | {f"{prefix}.conv2.weight": (out, out, 3, 3)}
            if into != out:
                shapes[f"{prefix}.convShortcut.weight"] = (out, into, 1, 1)
            into = out
    return shapes | batch_norm("bn1", into) | {"fc.weight": (classes, into), "fc.bias": (classes,)}


def resnext_shapes(classes: int, cardinality: int, base_width: int) -> Shapes:
    shapes: Shapes = {"mu": (1, 3, 1, 1), "sigma": (1, 3, 1, 1), "conv_1_3x3.weight": (64, 3, 3, 3)}
    shapes |= batch_norm("bn_1", 64)
    into = 64
    for stage, planes in enumerate((64, 128, 256), start=1):
        group, out = math.floor(planes * base_width / 64), 4 * planes
        for layer in range(3):
            prefix, inner = f"stage_{stage}.{layer}", group * cardinality
            shapes |= {f"{prefix}.conv_reduce.weight": (inner, into, 1, 1)} | batch_norm(f"{prefix}.bn_reduce", inner)
            shapes |= {f"{prefix}.conv_conv.weight": (inner, group, 3, 3)} | batch_norm(f"{prefix}.bn", inner)
            shapes |= {f"{prefix}.conv_expand.weight": (out, inner, 1, 1)} | batch_norm(f"{prefix}.bn_expand", out)
            if layer == 0:
                shapes |= {f"{prefix}.downsample.0.weight": (out, into, 1, 1)}
                shapes |= batch_norm(f"{prefix}.downsample.1", out)
            into = out
    return shapes | {"classifier.weight": (classes, into), "classifier.bias": (classes,)}


def get_shapes(net: nn.Module) -> Shapes:
    return {name: tuple(value.shape) for name, value in net.state_dict().items()}


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):  # shapes without memory
        return build()


@pytest.mark.parametrize(("build", "count"), [(WideResNet, 36_479_194), (ResNeXt29, 6_900_132)])
def test_parameter_counts_match_the_published_ones(build: Callable[[], nn.Module], count: int) -> None:
    assert sum(parameter.numel() for parameter in build_on_meta(build).parameters()) == count


@pytest.mark.parametrize(("depth", "width", "classes"), [(28, 10, 10), (10, 2, 7), (16, 1, 3), (40, 2, 100)])
def test_wide_resnet_state_dict_layout(depth: int, width: int, classes: int) -> None:
    found = get_shapes(build_on_meta(lambda: WideResNet(depth, width, classes)))
    assert found == wide_resnet_shapes(depth, width, classes)


@pytest.mark.parametrize(("classes", "cardinality", "base_width"), [(100, 4, 32), (5, 2, 8), (10, 8, 64), (3, 3, 5)])
def test_resnext_state_dict_layout(classes: int, cardinality: int, base_width: int) -> None:
    found = get_shapes(build_on_meta(lambda: ResNeXt29(classes, cardinality, base_width)))
    assert found == resnext_shapes(classes, cardinality, base_width)


def randomize_statistics(net: nn.Module) -> nn.Module:
    """Randomize the BatchNorm state of a network, in float64 and eval mode."""
    generator = torch.Generator().manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            for tensor in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return net.double().eval()


def apply_batch_norm(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    mean, var, scale, shift = (
        w[f"{name}.{leaf}"][:, None, None] for leaf in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / (var + 1e-5).sqrt() * scale + shift


def naive_wide_resnet(w: dict[str, Tensor], x: Tensor, num_layers: int) -> Tensor:
    x = F.conv2d(x, w["conv1.weight"], padding=1)
    for block in (1, 2, 3):
        for layer in range(num_layers):
            prefix = f"block{block}.layer.{layer}"
            stride = 2 if block > 1 and layer == 0 else 1
            has_shortcut = f"{prefix}.convShortcut.weight" in w
            activated = apply_batch_norm(w, f"{prefix}.bn1", x).clamp(min=0)
            out = F.conv2d(activated, w[f"{prefix}.conv1.weight"], stride=stride, padding=1)
            out = F.conv2d(
                apply_batch_norm(w, f"{prefix}.bn2", out).clamp(min=0), w[f"{prefix}.conv2.weight"], padding=1
            )
            if has_shortcut:
                x = F.conv2d(activated, w[f"{prefix}.convShortcut.weight"], stride=stride)
            x = x + out
    x = F.avg_pool2d(apply_batch_norm(w, "bn1", x).clamp(min=0), 8).flatten(1)
    return x @ w["fc.weight"].T + w["fc.bias"]


def naive_resnext(w: dict[str, Tensor], x: Tensor, cardinality: int) -> Tensor:
    x = apply_batch_norm(w, "bn_1", F.conv2d(2 * x - 1, w["conv_1_3x3.weight"], padding=1)).clamp(min=0)
    for stage in (1, 2, 3):
        for layer in (0, 1, 2):
            prefix = f"stage_{stage}.{layer}"
            stride = 2 if stage > 1 and layer == 0 else 1
            out = apply_batch_norm(w, f"{prefix}.bn_reduce", F.conv2d(x, w[f"{prefix}.conv_reduce.weight"])).clamp(
                min=0
            )
            kernels = w[f"{prefix}.conv_conv.weight"].chunk(cardinality)
            parts = zip(out.chunk(cardinality, 1), kernels, strict=True)
            out = torch.cat([F.conv2d(part, kernel, stride=stride, padding=1) for part, kernel in parts], 1)
            out = F.conv2d(apply_batch_norm(w, f"{prefix}.bn", out).clamp(min=0), w[f"{prefix}.conv_expand.weight"])
            if layer == 0:
                x = F.conv2d(x, w[f"{prefix}.downsample.0.weight"], stride=stride)
                x = apply_batch_norm(w, f"{prefix}.downsample.1", x)
            x = (x + apply_batch_norm(w, f"{prefix}.bn_expand", out)).clamp(min=0)
    return F.avg_pool2d(x, 8).flatten(1) @ w["classifier.weight"].T + w["classifier.bias"]


@pytest.mark.parametrize(("depth", "width"), [(10, 2), (16, 2), (16, 1)])
def test_wide_resnet_matches_the_naive_implementation(depth: int, width: int) -> None:
    net = randomize_statistics(WideResNet(depth, width, 7))
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(net(x), naive_wide_resnet(net.state_dict(), x, (depth - 4) // 6))


def test_resnext_matches_the_naive_implementation() -> None:
    net = randomize_statistics(ResNeXt29(7, cardinality=2, base_width=8))
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(net(x), naive_resnext(net.state_dict(), x, 2))


@pytest.mark.parametrize("side", [8, 32, 48])
def test_networks_accept_other_image_sizes(side: int) -> None:
    for net in (WideResNet(10, 1, 4), ResNeXt29(4, 1, 4)):
        assert net.eval()(torch.rand(2, 3, side, side)).shape == (2, 4)


def test_methods_adapt_these_networks() -> None:
    for net in (WideResNet(10, 1, 4), ResNeXt29(4, 1, 4), Normalized(WideResNet(10, 1, 4), [0.5] * 3, [0.2] * 3)):
        model = ctta.Tent(net)
        assert model(torch.rand(4, 3, 16, 16)).shape == (4, 4)


@pytest.mark.parametrize("depth", [4, 27, -2])
def test_invalid_wide_resnet_depth(depth: int) -> None:
    with pytest.raises(ConfigError):
        WideResNet(depth)


def test_sizes_below_one_are_rejected() -> None:
    with pytest.raises(ConfigError):
        WideResNet(10, width=0)
    with pytest.raises(ConfigError):
        ResNeXt29(5, cardinality=0)


def test_normalized_subtracts_mean_and_divides_by_std() -> None:
    x = torch.rand(2, 3, 4, 4)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    found = Normalized(nn.Identity(), mean, std)(x)
    for channel in range(3):
        torch.testing.assert_close(found[:, channel], (x[:, channel] - mean[channel]) / std[channel])


@pytest.mark.parametrize(("mean", "std"), [((0.5,), (0.5, 0.5)), ((), ()), ((0.5,), (0.0,))])
def test_normalized_rejects_invalid_constants(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        Normalized(nn.Identity(), mean, std)


@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (3, 4, 4)])
def test_normalized_does_not_broadcast(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError):
        Normalized(nn.Identity(), [0.5] * 3, [0.5] * 3)(torch.rand(shape))


def test_the_wide_network_of_the_repository() -> None:
    net = ctta.models.load(f"file:{Path(__file__).parents[1]}/benchmarks/networks/load.py:wide")
    assert sum(parameter.numel() for parameter in net.parameters()) == 1_467_610
    data = ctta.data.datasets.sample()
    x = torch.from_numpy(data.images[:200]).permute(0, 3, 1, 2) / 255
    with torch.inference_mode():
        wrong = net(x).argmax(1).numpy() != data.labels[:200]
    assert wrong.mean() <= 0.12

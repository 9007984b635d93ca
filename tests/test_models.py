"""The two CIFAR networks against naive ones written from their description, and their files of weights."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import ctta
from ctta.models import Normalized, ResNeXt29, WideResNet, load_weights_

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


def shapes_of(net: nn.Module) -> Shapes:
    return {name: tuple(value.shape) for name, value in net.state_dict().items()}


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):  # shapes without memory
        return build()


@pytest.mark.parametrize(("build", "count"), [(WideResNet, 36_479_194), (ResNeXt29, 6_900_132)])
def test_parameters_are_as_many_as_published(build: Callable[[], nn.Module], count: int) -> None:
    assert sum(parameter.numel() for parameter in on_meta(build).parameters()) == count


@pytest.mark.parametrize(("depth", "width", "classes"), [(28, 10, 10), (10, 2, 7), (16, 1, 3), (40, 2, 100)])
def test_wide_resnet_has_the_tensors_of_the_layout(depth: int, width: int, classes: int) -> None:
    found = shapes_of(on_meta(lambda: WideResNet(depth, width, classes)))
    assert found == wide_resnet_shapes(depth, width, classes)


@pytest.mark.parametrize(("classes", "cardinality", "base_width"), [(100, 4, 32), (5, 2, 8), (10, 8, 64), (3, 3, 5)])
def test_resnext_has_the_tensors_of_the_layout(classes: int, cardinality: int, base_width: int) -> None:
    found = shapes_of(on_meta(lambda: ResNeXt29(classes, cardinality, base_width)))
    assert found == resnext_shapes(classes, cardinality, base_width)


def with_random_statistics(net: nn.Module) -> nn.Module:
    """In float64 and eval mode, with BatchNorms that no longer do nearly nothing."""
    generator = torch.Generator().manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            for tensor in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return net.double().eval()


def normed(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
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
            has_own_shortcut = f"{prefix}.convShortcut.weight" in w
            activated = normed(w, f"{prefix}.bn1", x).clamp(min=0)
            out = F.conv2d(activated, w[f"{prefix}.conv1.weight"], stride=stride, padding=1)
            out = F.conv2d(normed(w, f"{prefix}.bn2", out).clamp(min=0), w[f"{prefix}.conv2.weight"], padding=1)
            if has_own_shortcut:
                x = F.conv2d(activated, w[f"{prefix}.convShortcut.weight"], stride=stride)
            x = x + out
    x = F.avg_pool2d(normed(w, "bn1", x).clamp(min=0), 8).flatten(1)
    return x @ w["fc.weight"].T + w["fc.bias"]


def naive_resnext(w: dict[str, Tensor], x: Tensor, cardinality: int) -> Tensor:
    x = normed(w, "bn_1", F.conv2d(2 * x - 1, w["conv_1_3x3.weight"], padding=1)).clamp(min=0)
    for stage in (1, 2, 3):
        for layer in (0, 1, 2):
            prefix = f"stage_{stage}.{layer}"
            stride = 2 if stage > 1 and layer == 0 else 1
            out = normed(w, f"{prefix}.bn_reduce", F.conv2d(x, w[f"{prefix}.conv_reduce.weight"])).clamp(min=0)
            kernels = w[f"{prefix}.conv_conv.weight"].chunk(cardinality)
            parts = zip(out.chunk(cardinality, 1), kernels, strict=True)
            out = torch.cat([F.conv2d(part, kernel, stride=stride, padding=1) for part, kernel in parts], 1)
            out = F.conv2d(normed(w, f"{prefix}.bn", out).clamp(min=0), w[f"{prefix}.conv_expand.weight"])
            if layer == 0:
                x = F.conv2d(x, w[f"{prefix}.downsample.0.weight"], stride=stride)
                x = normed(w, f"{prefix}.downsample.1", x)
            x = (x + normed(w, f"{prefix}.bn_expand", out)).clamp(min=0)
    return F.avg_pool2d(x, 8).flatten(1) @ w["classifier.weight"].T + w["classifier.bias"]


@pytest.mark.parametrize(("depth", "width"), [(10, 2), (16, 2), (16, 1)])
def test_wide_resnet_computes_what_a_naive_one_does(depth: int, width: int) -> None:
    net = with_random_statistics(WideResNet(depth, width, 7))
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(net(x), naive_wide_resnet(net.state_dict(), x, (depth - 4) // 6))


def test_resnext_computes_what_a_naive_one_does() -> None:
    net = with_random_statistics(ResNeXt29(7, cardinality=2, base_width=8))
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(net(x), naive_resnext(net.state_dict(), x, 2))


@pytest.mark.parametrize("side", [8, 32, 48])
def test_networks_take_other_sizes(side: int) -> None:
    for net in (WideResNet(10, 1, 4), ResNeXt29(4, 1, 4)):
        assert net.eval()(torch.rand(2, 3, side, side)).shape == (2, 4)


def test_methods_adapt_these_networks() -> None:
    for net in (WideResNet(10, 1, 4), ResNeXt29(4, 1, 4), Normalized(WideResNet(10, 1, 4), [0.5] * 3, [0.2] * 3)):
        model = ctta.Tent(net)
        assert model(torch.rand(4, 3, 16, 16)).shape == (4, 4)


@pytest.mark.parametrize("depth", [4, 27, -2])
def test_a_depth_that_no_wide_resnet_has(depth: int) -> None:
    with pytest.raises(ValueError, match=rf"6 n \+ 4.*got {depth}"):
        WideResNet(depth)


def test_sizes_below_one() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0 and 10"):
        WideResNet(10, width=0)
    with pytest.raises(ValueError, match="at least 1, got 5, 0 and 32"):
        ResNeXt29(5, cardinality=0)


def test_normalized_is_what_it_says() -> None:
    x = torch.rand(2, 3, 4, 4)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    found = Normalized(nn.Identity(), mean, std)(x)
    for channel in range(3):
        torch.testing.assert_close(found[:, channel], (x[:, channel] - mean[channel]) / std[channel])


@pytest.mark.parametrize(("mean", "std"), [((0.5,), (0.5, 0.5)), ((), ()), ((0.5,), (0.0,))])
def test_normalized_refuses_constants_that_cannot_be(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="one mean and one positive std per channel"):
        Normalized(nn.Identity(), mean, std)


@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (3, 4, 4)])
def test_normalized_does_not_broadcast(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected images \(N, 3, height, width\)"):
        Normalized(nn.Identity(), [0.5] * 3, [0.5] * 3)(torch.rand(shape))


# Files of weights


def small() -> nn.Module:
    return WideResNet(10, 1, 3)


def same(net: nn.Module, other: nn.Module) -> bool:
    others = other.state_dict()
    return all(torch.equal(value, others[name]) for name, value in net.state_dict().items())


def prefixed(net: nn.Module) -> dict[str, Tensor]:
    return {f"module.{name}": value for name, value in net.state_dict().items()}


@pytest.mark.parametrize("zipped", [True, False])  # RobustBench's files are older than torch's zip format
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda net: net.state_dict(),
        lambda net: {"state_dict": net.state_dict()},
        lambda net: prefixed(net),
        lambda net: {"epoch": 3, "best_acc": 0.9, "state_dict": prefixed(net), "optimizer": {"state": {}}},
    ],
)
def test_pytorch_files_in_all_wrappings(tmp_path: Path, wrapped: Callable[[nn.Module], Any], zipped: bool) -> None:
    trained, net = with_random_statistics(small()).float(), small()
    torch.save(wrapped(trained), tmp_path / "weights.pt", _use_new_zipfile_serialization=zipped)
    assert not same(net, trained)
    load_weights_(net, tmp_path / "weights.pt")
    assert same(net, trained)


def test_safetensors_whatever_their_name(tmp_path: Path) -> None:
    trained, net = with_random_statistics(small()).float(), small()
    save_file(prefixed(trained), tmp_path / "weights.pt")
    load_weights_(net, str(tmp_path / "weights.pt"))
    assert same(net, trained)


def test_half_precision_becomes_the_networks(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    torch.save({"weight": torch.eye(2).half(), "bias": torch.ones(2).half()}, tmp_path / "weights.pt")
    load_weights_(net, tmp_path / "weights.pt")
    assert net.weight.dtype == torch.float32 and torch.equal(net.weight, torch.eye(2))


def test_counters_and_constants_may_be_absent(tmp_path: Path) -> None:
    trained, net = ResNeXt29(4, 1, 4), ResNeXt29(4, 1, 4)
    absent = ("num_batches_tracked", "mu", "sigma")
    torch.save({k: v for k, v in trained.state_dict().items() if not k.endswith(absent)}, tmp_path / "weights.pt")
    load_weights_(net, tmp_path / "weights.pt")
    assert same(net, trained)


def test_constants_of_the_file_are_taken(tmp_path: Path) -> None:
    net = ResNeXt29(4, 1, 4)
    torch.save(net.state_dict() | {"mu": torch.full((1, 3, 1, 1), 0.4)}, tmp_path / "weights.pt")
    load_weights_(net, tmp_path / "weights.pt")
    assert net.mu.unique().tolist() == pytest.approx([0.4])


def test_a_parameter_of_that_name_may_not_be_absent(tmp_path: Path) -> None:
    net = nn.ParameterDict({"mu": nn.Parameter(torch.zeros(1))})
    torch.save({}, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="missing: mu"):
        load_weights_(net, tmp_path / "weights.pt")


def test_one_error_names_all_that_does_not_fit_and_nothing_is_changed(tmp_path: Path) -> None:
    net = small()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    weights = {name: torch.zeros_like(value) for name, value in before.items()} | {"fc.weight": torch.zeros(10, 64)}
    weights |= {"fc.bias": torch.zeros(3, dtype=torch.long), "head.weight": torch.zeros(1)}
    del weights["bn1.running_var"]
    torch.save(weights, tmp_path / "weights.pt")
    with pytest.raises(ValueError) as raised:
        load_weights_(net, tmp_path / "weights.pt")
    for words in (
        "weights.pt does not fit this WideResNet",
        "missing: bn1.running_var;",
        "not in the network: head.weight;",
        "of another shape: fc.weight (10, 64) instead of (3, 64);",
        "of another kind: fc.bias torch.int64 instead of torch.float32.",
    ):
        assert words in str(raised.value)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_another_architecture_does_not_fill_the_screen(tmp_path: Path) -> None:
    torch.save(ResNeXt29(4, 1, 4).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"conv1\.weight, .* and \d+ more") as raised:
        load_weights_(small(), tmp_path / "weights.pt")
    assert len(str(raised.value)) < 1000


PAGE = b"\n<!DOCTYPE html><html><head><title>Google Drive - Virus scan warning</title></head></html>"


@pytest.mark.parametrize("page", [PAGE, b"<HTML><body>404</body></HTML>", b"\xef\xbb\xbf" + PAGE])
def test_a_web_page_is_called_one(tmp_path: Path, page: bytes) -> None:
    (tmp_path / "Standard.pt").write_bytes(page)
    with pytest.raises(ValueError, match=r"Standard.pt is a web page, not a file of weights.*Google Drive.*Delete it"):
        load_weights_(small(), tmp_path / "Standard.pt")


def saved(zipped: bool | None) -> bytes:
    """A file as bytes; None means safetensors."""
    content, weights = io.BytesIO(), nn.Linear(50, 50).state_dict()
    if zipped is None:
        from safetensors.torch import save

        return save(weights)
    torch.save(weights, content, _use_new_zipfile_serialization=zipped)
    return content.getvalue()


@pytest.mark.parametrize("zipped", [True, False, None])
@pytest.mark.parametrize("share", [0.0005, 0.004, 0.03, 0.5, 0.999])
def test_a_truncated_file_is_called_one(tmp_path: Path, zipped: bool | None, share: float) -> None:
    content = saved(zipped)
    (tmp_path / "weights.pt").write_bytes(content[: max(1, int(share * len(content)))])
    with pytest.raises(ValueError, match=r"weights.pt is truncated.*delete it and fetch it again \([\d,]+ bytes; ."):
        load_weights_(nn.Linear(50, 50), tmp_path / "weights.pt")


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b'{"message": "Not Found"}'])
def test_a_file_of_another_kind(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "weights.pt").write_bytes(content)
    with pytest.raises(ValueError, match="neither a PyTorch nor a safetensors file"):
        load_weights_(nn.Linear(2, 2), tmp_path / "weights.pt")


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").touch()
    with pytest.raises(ValueError, match="is empty"):
        load_weights_(nn.Linear(2, 2), tmp_path / "weights.pt")
    with pytest.raises(FileNotFoundError, match=r"no file of weights at .*other.pt"):
        load_weights_(nn.Linear(2, 2), tmp_path / "other.pt")


def test_pickles_that_could_run_code_are_not_opened(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "whole.pt")
    with pytest.raises(ValueError, match=r"could run code.*weights_only=False"):
        load_weights_(nn.Linear(2, 2), tmp_path / "whole.pt")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model": {"weight": torch.zeros(1)}, "epoch": 3}, "entries that are no tensors: model, epoch"),
        ([torch.zeros(1)], "holds a list; expected tensors by name"),
    ],
)
def test_tensors_in_an_unknown_wrapping(tmp_path: Path, content: object, words: str) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=words):
        load_weights_(nn.Linear(2, 2), tmp_path / "weights.pt")

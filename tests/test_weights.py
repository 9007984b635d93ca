"""Weights files: every supported format and nesting, and a clear error for every file that cannot be loaded."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor, nn

from ctta.errors import CheckpointError
from ctta.models import ResNeXt29, WideResNet, load_weights_


def build_small() -> nn.Module:
    return WideResNet(10, 1, 3)


def build_trained() -> nn.Module:
    """Return a small network whose weights and statistics differ from those of a new one."""
    net = build_small()
    with torch.no_grad():
        for value in net.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape) + 0.5)
    return net


def have_equal_state(net: nn.Module, other: nn.Module) -> bool:
    others = other.state_dict()
    return all(torch.equal(value, others[name]) for name, value in net.state_dict().items())


def add_prefix(net: nn.Module) -> dict[str, Tensor]:
    return {f"module.{name}": value for name, value in net.state_dict().items()}


@pytest.mark.parametrize("zipped", [True, False])  # RobustBench's files are older than torch's zip format
@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: net.state_dict(),
        lambda net: {"state_dict": net.state_dict()},
        lambda net: add_prefix(net),
        lambda net: {"epoch": 3, "best_acc": 0.9, "state_dict": add_prefix(net), "optimizer": {"state": {}}},
    ],
)
def test_pytorch_files_with_every_nesting(tmp_path: Path, wrap: Callable[[nn.Module], Any], zipped: bool) -> None:
    trained, net = build_trained(), build_small()
    torch.save(wrap(trained), tmp_path / "weights.pt", _use_new_zipfile_serialization=zipped)
    assert not have_equal_state(net, trained)
    load_weights_(net, tmp_path / "weights.pt")
    assert have_equal_state(net, trained)


def test_safetensors_are_recognized_by_content(tmp_path: Path) -> None:
    trained, net = build_trained(), build_small()
    save_file(add_prefix(trained), tmp_path / "weights.pt")
    load_weights_(net, str(tmp_path / "weights.pt"))
    assert have_equal_state(net, trained)


def test_half_precision_is_converted_to_the_dtype_of_the_network(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    torch.save({"weight": torch.eye(2).half(), "bias": torch.ones(2).half()}, tmp_path / "weights.pt")
    load_weights_(net, tmp_path / "weights.pt")
    assert net.weight.dtype == torch.float32 and torch.equal(net.weight, torch.eye(2))


def test_counters_and_constants_are_optional(tmp_path: Path) -> None:
    trained, net = ResNeXt29(4, 1, 4), ResNeXt29(4, 1, 4)
    absent = ("num_batches_tracked", "mu", "sigma")
    torch.save({k: v for k, v in trained.state_dict().items() if not k.endswith(absent)}, tmp_path / "weights.pt")
    load_weights_(net, tmp_path / "weights.pt")
    assert have_equal_state(net, trained)


def test_constants_are_loaded_from_the_file(tmp_path: Path) -> None:
    net = ResNeXt29(4, 1, 4)
    torch.save(net.state_dict() | {"mu": torch.full((1, 3, 1, 1), 0.4)}, tmp_path / "weights.pt")
    load_weights_(net, tmp_path / "weights.pt")
    assert net.mu.unique().tolist() == pytest.approx([0.4])


def test_a_parameter_named_like_an_optional_buffer_is_required(tmp_path: Path) -> None:
    net = nn.ParameterDict({"mu": nn.Parameter(torch.zeros(1))})
    torch.save({}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError):
        load_weights_(net, tmp_path / "weights.pt")


def test_one_error_lists_all_mismatches_and_nothing_is_changed(tmp_path: Path) -> None:
    net = build_small()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    weights = {name: torch.zeros_like(value) for name, value in before.items()} | {"fc.weight": torch.zeros(10, 64)}
    weights |= {"fc.bias": torch.zeros(3, dtype=torch.long), "head.weight": torch.zeros(1)}
    del weights["bn1.running_var"]
    torch.save(weights, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError) as raised:
        load_weights_(net, tmp_path / "weights.pt")
    for words in (
        "weights.pt does not match this WideResNet",
        "missing: bn1.running_var;",
        "unexpected: head.weight;",
        "wrong shape: fc.weight (10, 64) instead of (3, 64);",
        "wrong dtype: fc.bias torch.int64 instead of torch.float32.",
    ):
        assert words in str(raised.value)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_long_lists_of_mismatches_are_shortened(tmp_path: Path) -> None:
    torch.save(ResNeXt29(4, 1, 4).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"conv1\.weight, .* and \d+ more") as raised:
        load_weights_(build_small(), tmp_path / "weights.pt")
    assert len(str(raised.value)) < 1000


PAGE = b"\n<!DOCTYPE html><html><head><title>Google Drive - Virus scan warning</title></head></html>"


@pytest.mark.parametrize("page", [PAGE, b"<HTML><body>404</body></HTML>", b"\xef\xbb\xbf" + PAGE])
def test_a_web_page_is_reported_as_one(tmp_path: Path, page: bytes) -> None:
    (tmp_path / "Standard.pt").write_bytes(page)
    with pytest.raises(CheckpointError, match="web page"):
        load_weights_(build_small(), tmp_path / "Standard.pt")


def serialize(zipped: bool | None) -> bytes:
    """Return the bytes of a file, in the PyTorch formats or, for None, as safetensors."""
    content, weights = io.BytesIO(), nn.Linear(50, 50).state_dict()
    if zipped is None:
        return save(weights)
    torch.save(weights, content, _use_new_zipfile_serialization=zipped)
    return content.getvalue()


@pytest.mark.parametrize("zipped", [True, False, None])
@pytest.mark.parametrize("fraction", [0.0005, 0.004, 0.03, 0.5, 0.999])
def test_a_truncated_file_is_reported_as_one(tmp_path: Path, zipped: bool | None, fraction: float) -> None:
    content = serialize(zipped)
    (tmp_path / "weights.pt").write_bytes(content[: max(1, int(fraction * len(content)))])
    with pytest.raises(CheckpointError, match="truncated"):
        load_weights_(nn.Linear(50, 50), tmp_path / "weights.pt")


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b'{"message": "Not Found"}'])
def test_a_file_of_another_format(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "weights.pt").write_bytes(content)
    with pytest.raises(CheckpointError):
        load_weights_(nn.Linear(2, 2), tmp_path / "weights.pt")


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").touch()
    with pytest.raises(CheckpointError):
        load_weights_(nn.Linear(2, 2), tmp_path / "weights.pt")
    with pytest.raises(FileNotFoundError, match=r"other\.pt"):
        load_weights_(nn.Linear(2, 2), tmp_path / "other.pt")


def test_pickles_that_could_execute_code_are_rejected(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "whole.pt")
    with pytest.raises(CheckpointError, match="weights_only=False"):
        load_weights_(nn.Linear(2, 2), tmp_path / "whole.pt")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model": {"weight": torch.zeros(1)}, "epoch": 3}, "entries that are not tensors: model, epoch"),
        ([torch.zeros(1)], "holds a list; expected a state_dict"),
    ],
)
def test_tensors_with_unknown_nesting(tmp_path: Path, content: object, words: str) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=words):
        load_weights_(nn.Linear(2, 2), tmp_path / "weights.pt")

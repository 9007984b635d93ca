"""Read weights files: PyTorch checkpoints such as RobustBench's, and safetensors, with every tensor checked."""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ctta.errors import CheckpointError

#: Buffers that a file may lack because the network already has the right value: files of torch before 0.4.1 have no
#: counters (which only a BatchNorm with ``momentum=None`` reads), and AugMix's lacks the normalization constants.
OPTIONAL_BUFFERS = frozenset({"num_batches_tracked", "mu", "sigma"})

_MAX_NAMES = 8


def load_weights_(net: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a weights file into a network, completely or not at all.

    The file is safetensors or a PyTorch checkpoint, whose tensors may be nested under ``state_dict`` and prefixed with
    ``module.``, as in RobustBench's files. Names and shapes must match the network's. Pickled code is never executed.

    Args:
        net: Network to change in place.
        path: File to read.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is damaged, is not a weights file, or does not match the network.

    >>> import tempfile
    >>> net = nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"state_dict": {"module.weight": torch.eye(2), "module.bias": torch.ones(2)}}, f"{folder}/w.pt")
    ...     load_weights_(net, f"{folder}/w.pt")
    >>> net.bias.tolist()
    [1.0, 1.0]
    """
    copy_weights_(net, read_weights(path), origin=path)


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of a file by name, on the CPU, without ``state_dict`` nesting and ``module.`` prefix."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"weights file not found: {path}")
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        raise CheckpointError(f"{path} is empty: delete it and download it again")
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html")):
        raise CheckpointError(
            f"{path} is a web page, not a weights file: the host asked to confirm the download (Google Drive does for "
            "large files) or refused it. Delete it and download it with a browser, or with ctta.data.datasets.download"
        )
    # A safetensors file starts with the length of its header in eight bytes, followed by the header, which is JSON.
    try:
        content = load_file(path) if head[8:9] == b"{" else _read_pytorch(path, head)
    except SafetensorError as error:
        raise CheckpointError(_damaged_message(path, error)) from error
    return _unwrap_state_dict(content, path)


def copy_weights_(net: nn.Module, weights: Mapping[str, Tensor], *, origin: str | os.PathLike[str]) -> None:
    """Copy tensors into a network if all names, shapes and dtype kinds match; errors refer to them as `origin`."""
    own = {name: value for name, value in net.state_dict().items() if isinstance(value, Tensor)}
    optional = {name for name, _ in net.named_buffers() if name.rpartition(".")[2] in OPTIONAL_BUFFERS}
    shared = [name for name in own if name in weights]
    mismatches = {
        "missing": [name for name in own if name not in weights and name not in optional],
        "unexpected": [name for name in weights if name not in own],
        "wrong shape": [
            f"{name} {tuple(weights[name].shape)} instead of {tuple(own[name].shape)}"
            for name in shared
            if weights[name].shape != own[name].shape
        ],
        "wrong dtype": [
            f"{name} {weights[name].dtype} instead of {own[name].dtype}"
            for name in shared
            if weights[name].is_floating_point() != own[name].is_floating_point()
        ],
    }
    if found := [f"{kind}: {_join_names(names)}" for kind, names in mismatches.items() if names]:
        raise CheckpointError(
            f"{os.fspath(origin)} does not match this {type(net).__name__}: {'; '.join(found)}. "
            "Use a file of this architecture, or build the network with the depth, width and classes of the file"
        )
    with torch.no_grad():
        for name in shared:
            own[name].copy_(weights[name])


def _join_names(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _read_pytorch(path: Path, head: bytes) -> object:
    if not head.startswith((b"PK\x03\x04", b"\x80\x02")):  # a zip archive, or the pickle of torch before 1.6
        raise CheckpointError(_damaged_message(path, "unknown file signature"))
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "GLOBAL" not in str(error):  # pickle's opcode for classes and functions
            raise CheckpointError(_damaged_message(path, error)) from error
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, and loading that could execute code. If you trust it, "
            "open it with torch.load(path, weights_only=False) and save its state_dict alone with torch.save"
        ) from error
    except (RuntimeError, OSError, EOFError, LookupError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(_damaged_message(path, error)) from error  # truncated or altered bytes cause all of these


def _damaged_message(path: Path, reason: Exception | str) -> str:
    first_sentence = (str(reason) or type(reason).__name__).strip().splitlines()[0].split(". ")[0]
    return (
        f"{path} is truncated, or neither a PyTorch nor a safetensors file: delete it and download it again "
        f"({path.stat().st_size:,} bytes; {first_sentence})"
    )


def _unwrap_state_dict(content: object, path: Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; expected a state_dict of tensors by name")
    if others := [str(key) for key, value in content.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(
            f"{path} holds entries that are not tensors: {_join_names(others)}; expected tensors by name, at the top "
            "level or under 'state_dict': save the state_dict alone with torch.save"
        )
    weights = {str(name): value for name, value in content.items()}
    is_wrapped = all(name.startswith("module.") for name in weights)  # DataParallel prefixes every name
    return {name.removeprefix("module.") if is_wrapped else name: value for name, value in weights.items()}

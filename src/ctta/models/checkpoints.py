"""Weights from files: RobustBench's and other PyTorch checkpoints, and safetensors, each tensor checked."""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

#: Buffers that files may lack, because the network already holds the right value: files of torch before 0.4.1 have no
#: counters (which only a BatchNorm with `momentum=None` reads), and AugMix's has no constants of the normalisation.
MAY_BE_ABSENT = frozenset({"num_batches_tracked", "mu", "sigma"})

_NAMES_SHOWN = 8


def load_weights_(net: nn.Module, path: str | os.PathLike[str]) -> None:
    """Put a file's weights into a network, all of them or none.

    The file is safetensors or a PyTorch checkpoint; its weights may sit under ``state_dict`` and behind a ``module.``
    prefix, as RobustBench's do. Names and shapes must be the network's. Nothing is unpickled that could run code.

    Args:
        net: changed in place.
        path: the file.

    >>> import tempfile
    >>> net = nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"state_dict": {"module.weight": torch.eye(2), "module.bias": torch.ones(2)}}, f"{folder}/it.pt")
    ...     load_weights_(net, f"{folder}/it.pt")
    >>> net.bias.tolist()
    [1.0, 1.0]
    """
    copy_weights_(net, read_weights(path), origin=path)


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU, without the wrappings ``state_dict`` and ``module.``"""
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of weights at {path}")
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        raise ValueError(f"{path} is empty: delete it and fetch it again")
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html")):
        raise ValueError(
            f"{path} is a web page, not a file of weights: the host asked to confirm the download (Google Drive does "
            "for large files) or refused it. Delete it and fetch it with a browser, or with ctta.datasets.download"
        )
    # Safetensors start with the length of their header, in eight bytes, and then the header, which is JSON.
    content = _read_safetensors(path) if head[8:9] == b"{" else _read_pytorch(path, head)
    return _without_wrappings(content, path)


def copy_weights_(net: nn.Module, weights: Mapping[str, Tensor], *, origin: str | os.PathLike[str]) -> None:
    """Put tensors into a network if every name, shape and kind fits; `origin` is what errors call them."""
    own = {name: value for name, value in net.state_dict().items() if isinstance(value, Tensor)}
    optional = {name for name, _ in net.named_buffers() if name.rpartition(".")[2] in MAY_BE_ABSENT}
    shared = [name for name in own if name in weights]
    problems = {
        "missing": [name for name in own if name not in weights and name not in optional],
        "not in the network": [name for name in weights if name not in own],
        "of another shape": [
            f"{name} {tuple(weights[name].shape)} instead of {tuple(own[name].shape)}"
            for name in shared
            if weights[name].shape != own[name].shape
        ],
        "of another kind": [
            f"{name} {weights[name].dtype} instead of {own[name].dtype}"
            for name in shared
            if weights[name].is_floating_point() != own[name].is_floating_point()
        ],
    }
    if found := [f"{problem}: {_some_of(names)}" for problem, names in problems.items() if names]:
        raise ValueError(
            f"{os.fspath(origin)} does not fit this {type(net).__name__}: {'; '.join(found)}. "
            "Give the file of this architecture, or build the network with the file's depth, width and classes"
        )
    with torch.no_grad():
        for name in shared:
            own[name].copy_(weights[name])


def _some_of(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _read_safetensors(path: Path) -> object:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(_damaged(path, error)) from error


def _read_pytorch(path: Path, head: bytes) -> object:
    if not head.startswith((b"PK\x03\x04", b"\x80\x02")):  # a zip archive, or a pickle as before torch 1.6
        raise ValueError(_damaged(path, "its first bytes are of neither"))
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "GLOBAL" not in str(error):  # the word for classes and functions that a pickle asks for
            raise ValueError(_damaged(path, error)) from error
        raise ValueError(
            f"{path} holds more than tensors and plain values, and opening that could run code. If you trust it, "
            "open it with torch.load(path, weights_only=False) and save its state_dict alone with torch.save"
        ) from error
    except (RuntimeError, OSError, EOFError, LookupError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(_damaged(path, error)) from error  # all of these come from cut or changed bytes


def _damaged(path: Path, reason: Exception | str) -> str:
    first_sentence = (str(reason) or type(reason).__name__).strip().splitlines()[0].split(". ")[0]
    return (
        f"{path} is truncated, or neither a PyTorch nor a safetensors file: delete it and fetch it again "
        f"({path.stat().st_size:,} bytes; {first_sentence})"
    )


def _without_wrappings(content: object, path: Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected tensors by name, as in a state_dict")
    if foreign := [str(key) for key, value in content.items() if not isinstance(value, Tensor)]:
        raise ValueError(
            f"{path} holds entries that are no tensors: {_some_of(foreign)}; expected tensors by name, at the top or "
            "under 'state_dict': save the state_dict alone with torch.save"
        )
    weights = {str(name): value for name, value in content.items()}
    is_wrapped = all(name.startswith("module.") for name in weights)  # all of them, as DataParallel names them
    return {name.removeprefix("module.") if is_wrapped else name: value for name, value in weights.items()}

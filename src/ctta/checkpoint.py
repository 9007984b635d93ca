"""Save a stream and go on with it, bit for bit: one pickle-free file, written atomically.

The file is safetensors with a JSON header in its metadata. It holds what the stream has changed: a tensor that still
equals the source's is left out, so source weights are not stored again, and TENT on a large network takes kilobytes.
"""

import json
import os
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ctta.base import AdaptiveModel
from ctta.encoding import NotStorableError, decode, encode
from ctta.fingerprint import fingerprint, source_fingerprint
from ctta.methods import METHODS
from ctta.optimizer_state import restore_state, split_state

FORMAT = 1
_METADATA_KEY = "ctta"
_OPTIMIZER = "optimizer."


class CheckpointError(ValueError):
    """A file that cannot be gone on with: truncated, foreign, or of another network or method."""


def save(model: AdaptiveModel, path: str | os.PathLike[str]) -> None:
    """Write a stream to a file, all of it or nothing.

    >>> import ctta, tempfile
    >>> net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    >>> model = ctta.Tent(net)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ctta.save(model, f"{folder}/camera7.safetensors")
    ...     model = ctta.load(f"{folder}/camera7.safetensors", net)
    """
    path = Path(path)
    header, tensors = _describe(model), _changed_tensors(model)
    if model.optimizer is not None:
        header["optimizer"], state = split_state(model.optimizer)
        tensors |= {_OPTIMIZER + name: value for name, value in state.items()}
    contiguous = {name: value.detach().contiguous() for name, value in tensors.items()}
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(contiguous, temporary, metadata={_METADATA_KEY: json.dumps(header)})
        _flush_to_disk(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _flush_to_disk(path.parent)  # the name too must survive a power cut


def load(
    path: str | os.PathLike[str], net: nn.Module, *, method: type[AdaptiveModel] | None = None, **given: Any
) -> AdaptiveModel:
    """The stream that :func:`save` wrote, on the network it was started with; it goes on bit-identically.

    Args:
        path: the file.
        net: the source network; not touched.
        method: the class, if it is not one of this library's.
        given: hyperparameters that a file cannot hold (a lambda, a view of your own), or that you want to change.
            A new ``optimizer`` comes with its own learning rate and takes over the rest of the state.
    """
    header, tensors = _read(Path(path))
    if header["source"] != (found := fingerprint(net)):
        raise CheckpointError(
            f"{path} was saved for a network with fingerprint {header['source']}, and this one has {found}: give the "
            "network that the stream was started with, in the dtype that the stream had when it was saved"
        )
    model = _class_for(header["method"], method, path)(net, **_hyperparameters(header, given, path))
    model.frozen = header["frozen"]
    for name, value in header["counters"].items():
        setattr(model, name, value)
    state = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_OPTIMIZER)}
    _copy_into(model, tensors, path)
    if model.optimizer is not None:
        bare = {name.removeprefix(_OPTIMIZER): value for name, value in state.items()}
        try:
            restore_state(model.optimizer, header["optimizer"], bare, keep_options="optimizer" in given)
        except ValueError as error:
            raise CheckpointError(f"{path} does not fit: {error}") from error
    return model


def _describe(model: AdaptiveModel) -> dict[str, Any]:
    """The JSON header, but for the optimiser."""
    hyperparameters, give_on_load = {}, []
    for name, value in model.hyperparameters.items():
        try:
            hyperparameters[name] = encode(value)
        except NotStorableError:
            give_on_load.append(name)
    return {
        "format": FORMAT,
        "ctta": version("ctta"),
        "torch": torch.__version__,
        "method": _name_of(type(model)),
        "hyperparameters": hyperparameters,
        "give_on_load": give_on_load,
        "counters": {name: value for name, value in vars(model).items() if name.startswith("num_")},
        "frozen": model.frozen,
        "source": source_fingerprint(model.source),
    }


def _changed_tensors(model: AdaptiveModel) -> dict[str, Tensor]:
    """Every tensor of the stream that does not equal its counterpart in the source; tied ones once."""
    source = model.source.state_dict()
    changed, seen = {}, set()
    for name, value in model.state_dict(keep_vars=True).items():
        if name.startswith("source.") or not isinstance(value, Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        _network, _, inner = name.partition(".")
        if not _same_bits(value, source.get(inner)):
            changed[name] = value
    return changed


def _same_bits(value: Tensor, other: Tensor | None) -> bool:
    """Equality that tells -0 from 0 and takes a NaN for itself."""
    if other is None or value.shape != other.shape or value.dtype != other.dtype:
        return False
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return torch.equal(value.detach().view(as_integers), other.view(as_integers))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.exists():
        raise FileNotFoundError(f"no saved stream at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(_METADATA_KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is truncated or no file that ctta.save wrote: {error}") from error
    if not isinstance(header, dict) or "format" not in header:
        raise CheckpointError(f"{path} is a safetensors file, but not one that ctta.save wrote")
    if header["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {header['format']} (ctta {header['ctta']}), and this version reads format {FORMAT}"
        )
    return header, tensors


def _name_of(method: type[AdaptiveModel]) -> str:
    own = {cls: name for name, cls in METHODS.items()}
    return own.get(method, f"{method.__module__}.{method.__qualname__}")


def _class_for(name: str, given: type[AdaptiveModel] | None, path: str | os.PathLike[str]) -> type[AdaptiveModel]:
    if given is None and name in METHODS:
        return METHODS[name]
    if given is None:
        raise CheckpointError(f"{path} was saved by {name}, which is not of this library: load(path, net, method=...)")
    if _name_of(given) != name:
        raise CheckpointError(f"{path} was saved by {name}, not by {_name_of(given)}")
    return given


def _hyperparameters(header: dict[str, Any], given: dict[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    stored, give_on_load = header["hyperparameters"], header["give_on_load"]
    if unknown := given.keys() - stored.keys() - set(give_on_load):
        raise TypeError(f"{header['method']} has no hyperparameter {', '.join(sorted(unknown))}")
    if missing := [name for name in give_on_load if name not in given]:
        again = ", ".join(f"{name}=..." for name in missing)
        raise CheckpointError(f"{path} could not hold all that the model was made with: load(path, net, {again})")
    return {name: decode(code) for name, code in stored.items() if name not in given} | given


def _copy_into(model: AdaptiveModel, tensors: dict[str, Tensor], path: str | os.PathLike[str]) -> None:
    targets = model.state_dict(keep_vars=True)
    for name, value in tensors.items():
        target = targets.get(name)
        if not isinstance(target, Tensor):
            raise CheckpointError(f"{path} holds '{name}', which the model does not have")
        if (target.shape, target.dtype) != (value.shape, value.dtype):
            raise CheckpointError(
                f"{path} holds '{name}' as {value.dtype} {tuple(value.shape)}, "
                f"and the model has it as {target.dtype} {tuple(target.shape)}"
            )
        with torch.no_grad():
            target.copy_(value)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

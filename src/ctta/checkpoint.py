"""Save a stream and go on with it, bit for bit: one pickle-free file, written atomically.

The file is safetensors with a JSON header in its metadata. It holds what the stream has changed: a tensor that still
equals the source's is left out, so source weights are not stored again, and TENT on a large network takes kilobytes.
"""

import inspect
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
from ctta.encoding import decode, encode, is_storable
from ctta.fingerprint import fingerprint, source_fingerprint
from ctta.methods import METHODS
from ctta.optimizer_state import restore_state_, split_state

FORMAT = 1
_METADATA_KEY = "ctta"
_HEADER = {
    "format": int,
    "ctta": str,
    "torch": str,
    "method": str,
    "hyperparameters": dict,
    "give_on_load": list,
    "counters": dict,
    "frozen": bool,
    "source": str,
    "optimizer": dict,
    "tensors": list,
}
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
    header["tensors"] = sorted(tensors)
    contiguous = {name: value.detach().contiguous() for name, value in tensors.items()}
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.touch(exist_ok=False)
        usual_mode = temporary.stat().st_mode
        save_file(contiguous, temporary, metadata={_METADATA_KEY: json.dumps(header)})
        temporary.chmod(usual_mode)  # safetensors makes files that only their owner can read
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
            An ``optimizer`` that the file holds is replaced by the new one, which starts without its momenta.
    """
    header, tensors = _read(Path(path))
    if header["source"] != (found := fingerprint(net)):
        raise CheckpointError(
            f"{path} was saved for a network with fingerprint {header['source']}, and this one has {found}: give the "
            "network that the stream was started with, in the dtype that the stream had when it was saved"
        )
    method = _class_for(header["method"], method, path)
    _check_given(method, header, given, path)
    try:
        stored = {name: decode(code) for name, code in header["hyperparameters"].items() if name not in given}
        model = method(net, **stored | given)
        model.frozen = header["frozen"]
        _set_counters(model, header["counters"])
        state = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_OPTIMIZER)}
        _copy_into(model, tensors)
        if model.optimizer is not None and "optimizer" not in given.keys() & header["hyperparameters"].keys():
            bare = {name.removeprefix(_OPTIMIZER): value for name, value in state.items()}
            restore_state_(model.optimizer, header["optimizer"], bare)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} does not fit: {error}") from error
    return model


def _describe(model: AdaptiveModel) -> dict[str, Any]:
    """The JSON header, but for the optimiser and the list of tensors."""
    settings = model.hyperparameters
    return {
        "format": FORMAT,
        "ctta": version("ctta"),
        "torch": torch.__version__,
        "method": _name_of(type(model)),
        "hyperparameters": {name: encode(value) for name, value in settings.items() if is_storable(value)},
        "give_on_load": [name for name, value in settings.items() if not is_storable(value)],
        "counters": {name: value for name, value in vars(model).items() if name.startswith("num_")},
        "frozen": model.frozen,
        "source": source_fingerprint(model.source),
        "optimizer": {},
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
    if value.is_complex():
        value, other = torch.view_as_real(value), torch.view_as_real(other)
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return torch.equal(value.detach().view(as_integers), other.view(as_integers))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
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
        raise CheckpointError(f"{path} has format {header['format']}, and this version of ctta reads format {FORMAT}")
    if wrong := [key for key, kind in _HEADER.items() if not isinstance(header.get(key), kind)]:
        raise CheckpointError(f"the header of {path} is damaged: no usable {', '.join(wrong)}")
    if header["tensors"] != sorted(tensors):
        raise CheckpointError(f"{path} does not hold the tensors that its header lists")
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


def _check_given(
    method: type[AdaptiveModel], header: dict[str, Any], given: dict[str, Any], path: str | os.PathLike[str]
) -> None:
    """What the file could not hold must be given, and nothing that the method does not know."""
    # By the class and not by the file, which may be older than some of its settings.
    if unknown := given.keys() - set(inspect.signature(method).parameters):
        raise TypeError(f"{header['method']} has no hyperparameter {', '.join(sorted(unknown))}")
    if missing := [name for name in header["give_on_load"] if name not in given]:
        again = ", ".join(f"{name}=..." for name in missing)
        raise CheckpointError(f"{path} could not hold all that the model was made with: load(path, net, {again})")


def _set_counters(model: AdaptiveModel, counters: dict[str, Any]) -> None:
    for name, value in counters.items():
        if not name.startswith("num_") or not hasattr(model, name) or type(value) is not int:
            raise ValueError(f"it counts {name!r} as {value!r}, which the model does not")
        setattr(model, name, value)


def _copy_into(model: AdaptiveModel, tensors: dict[str, Tensor]) -> None:
    targets = model.state_dict(keep_vars=True)
    for name, value in tensors.items():
        target = targets.get(name)
        if name.startswith("source.") or not isinstance(target, Tensor):
            raise ValueError(f"it holds '{name}', which is no state of the model")
        if (target.shape, target.dtype) != (value.shape, value.dtype):
            raise ValueError(
                f"it holds '{name}' as {value.dtype} {tuple(value.shape)}, "
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

"""Save a stream and go on with it, bit for bit: one pickle-free file, written atomically.

The file is safetensors with a JSON header in its metadata. It holds what the stream has changed: a tensor that still
equals the source's is left out, so source weights are not stored again, and TENT on a large network takes kilobytes.
"""

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ctta.base import AdaptiveModel
from ctta.checkpoint.fingerprint import fingerprint, source_fingerprint
from ctta.checkpoint.manifest import (
    NotGivenError,
    UnknownSettingError,
    build,
    describe,
    is_of_optimizer,
    name_in_source,
    optimizer_tensors,
    restore,
    unusable_fields,
)
from ctta.errors import CheckpointError
from ctta.guard import Guarded
from ctta.io.atomic import atomic_write

FORMAT = 1
_METADATA_KEY = "ctta"
_HEADER = {"format": int, "ctta": str, "torch": str, "source": str, "tensors": list}


def save(model: AdaptiveModel, path: str | os.PathLike[str]) -> None:
    """Write a stream to a file, all of it or nothing; of several ranks that share the stream, the first writes it.

    >>> import ctta, tempfile
    >>> net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    >>> model = ctta.Tent(net)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ctta.save(model, f"{folder}/camera7.safetensors")
    ...     model = ctta.load(f"{folder}/camera7.safetensors", net)
    """
    if not model.coordinator.is_rank_zero:
        return
    tensors = _changed_tensors(model) | optimizer_tensors(model)
    header = {
        "format": FORMAT,
        "ctta": version("ctta"),
        "torch": torch.__version__,
        "source": source_fingerprint(model.source),
        "tensors": sorted(tensors),
        **describe(model),
    }
    contiguous = {name: value.detach().contiguous() for name, value in tensors.items()}
    # Durable, because streams are saved so that they survive the machine's failures too.
    with atomic_write(path, durable=True) as temporary:
        save_file(contiguous, temporary, metadata={_METADATA_KEY: json.dumps(header)})


def load(
    path: str | os.PathLike[str], net: nn.Module, *, method: type[AdaptiveModel] | None = None, **given: Any
) -> AdaptiveModel:
    """The stream that :func:`save` wrote, on the network it was started with; it goes on bit-identically.

    Args:
        path: the file.
        net: the source network; not touched.
        method: the class, if it is not one of this library's; for a guarded method that of the one inside.
        given: hyperparameters that a file cannot hold (a lambda, a view of your own), or that you want to change.
            An ``optimizer`` that the file holds is replaced by the new one, which starts without its momenta. The
            ``audit`` log of a guarded method is never in a file.
    """
    header, tensors = _read(Path(path))
    if header["source"] != (found := fingerprint(net)):
        raise CheckpointError(
            f"{path} was saved for a network with fingerprint {header['source']}, and this one has {found}: give the "
            "network that the stream was started with, in the dtype that the stream had when it was saved"
        )
    try:
        model = build(header, net, method, given)
        restore(model, header, tensors, given)
        _copy_into(model, {name: value for name, value in tensors.items() if not is_of_optimizer(name)})
    except UnknownSettingError:
        raise
    except NotGivenError as error:
        raise CheckpointError(f"{path} {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} does not fit: {error}") from error
    if isinstance(model, Guarded):
        model.note("load", f"from {path}")
    return model


def _changed_tensors(model: AdaptiveModel) -> dict[str, Tensor]:
    """Every tensor of the stream that does not equal its counterpart in the source; tied ones once."""
    source = model.source.state_dict(keep_vars=True)
    changed, seen = {}, _ids_of(source)
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        if not _same_bits(value, source.get(name_in_source(name))):
            changed[name] = value
    return changed


def _ids_of(state: dict[str, Any]) -> set[int]:
    return {id(value) for value in state.values()}


def _same_bits(value: Tensor, other: Tensor | None) -> bool:
    """Equality that tells -0 from 0 and takes a NaN for itself."""
    if other is None or value.shape != other.shape or value.dtype != other.dtype:
        return False
    if value.is_complex():
        value, other = torch.view_as_real(value), torch.view_as_real(other)
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return torch.equal(value.detach().view(as_integers), other.detach().view(as_integers))


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
    wrong = [key for key, kind in _HEADER.items() if not isinstance(header.get(key), kind)] + unusable_fields(header)
    if wrong:
        raise CheckpointError(f"the header of {path} is damaged: no usable {', '.join(wrong)}")
    if header["tensors"] != sorted(tensors):
        raise CheckpointError(f"{path} does not hold the tensors that its header lists")
    return header, tensors


def _copy_into(model: AdaptiveModel, tensors: dict[str, Tensor]) -> None:
    targets, of_source = model.state_dict(keep_vars=True), _ids_of(model.source.state_dict(keep_vars=True))
    for name, value in tensors.items():
        target = targets.get(name)
        if not isinstance(target, Tensor) or id(target) in of_source:
            raise ValueError(f"it holds '{name}', which is no state of the model")
        if (target.shape, target.dtype) != (value.shape, value.dtype):
            raise ValueError(
                f"it holds '{name}' as {value.dtype} {tuple(value.shape)}, "
                f"and the model has it as {target.dtype} {tuple(target.shape)}"
            )
        with torch.no_grad():
            target.copy_(value)

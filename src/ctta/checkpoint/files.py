"""Save a stream and resume it bit-identically: one file without pickle, written atomically.

The file is safetensors with a JSON header in its metadata. It holds what the stream has changed: a tensor that still
equals the source's is left out, so source weights are not stored again, and TENT on a large network takes kilobytes.
"""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ctta.checkpoint.manifest import (
    InvalidArgumentError,
    MissingArgumentError,
    UnknownArgumentError,
    build,
    describe,
    invalid_fields,
    nested_models,
    optimizer_tensors,
    rename_parts,
    restore_,
    split_name,
)
from ctta.core.model import AdaptiveModel
from ctta.core.registry import resolve_method
from ctta.core.state import allocate_lazy_buffers_
from ctta.errors import CheckpointError, DamagedCheckpointError
from ctta.io.atomic import atomic_write
from ctta.io.tensors import read_tensors, write_tensors
from ctta.nn.surgery import fingerprint, source_fingerprint

FORMAT = 2
_METADATA_KEY = "ctta"
#: What the constructors of methods, views and optimizers raise for arguments of a wrong type or value.
_ERRORS_OF_CLASSES = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError)
_HEADER = {"format": int, "ctta": str, "torch": str, "source": str, "tensors": list}


class _NotFiniteError(ValueError):
    """Raised for a tensor with NaN or infinity, of which no stream can make use."""


def save(model: AdaptiveModel, path: str | os.PathLike[str]) -> None:
    """Write a stream to a file, completely or not at all.

    Of several ranks that share the stream, rank 0 writes it.

    Args:
        model: The stream; it can adapt further afterwards.
        path: The file, which is replaced if it exists.

    Raises:
        OSError: If the file cannot be written, for instance because the disk is full; the old one then stays.
        TypeError: If the optimizer's state cannot be stored.

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
    if not callable(model.output):
        header["output"] = model.output
    # Durable, since a stream is saved to survive failures of the machine too.
    with atomic_write(path, durable=True) as temporary:
        write_tensors(temporary, tensors, _METADATA_KEY, header)


def load(
    path: str | os.PathLike[str], net: nn.Module, *, method: type[AdaptiveModel] | str | None = None, **given: Any
) -> AdaptiveModel:
    """Return the stream that :func:`save` wrote; it continues bit-identically.

    Args:
        path: The file.
        net: The source network that the stream was started with; it is copied.
        method: The class, if it is not one of this library's, or its name, such as ``"file:mine.py:Mine"``; for a
            wrapped method that of the one inside. A file never decides which code is imported.
        **given: Hyperparameters that a file cannot hold (a lambda, a view of your own), or that you want to change.
            Giving an ``optimizer`` that the file holds replaces it by a new one without momenta; ``lr`` changes only
            the learning rate. The ``audit`` log of
            a guarded method is never in a file.

    Returns:
        The model.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is of another network, or lacks an argument that must be given.
        ConfigError: If no method has this name.
        DamagedCheckpointError: If the file is truncated, damaged or not a checkpoint.
        ConfigError: If a given argument is out of range, as the method's constructor says.
        TypeError: If an argument is given that the method does not have.
    """
    if isinstance(method, str):
        method = resolve_method(method).method
    header, tensors = _read(Path(path))
    if header["source"] != (found := fingerprint(net)):
        raise CheckpointError(
            f"{path} was saved for a network with fingerprint {header['source']}, and this one has {found}: give the "
            "network that the stream was started with, in the dtype that the stream had when it was saved"
        )
    try:
        model = build(header, net, method, given)
        if "output" not in given and header.get("output", model.output) != model.output:
            raise ValueError(
                f"it was saved with the logits of the network at {header['output']!r}, and its settings look for them "
                f"at {model.output!r}"
            )
        restore_(model, header, tensors, given)
        _copy_tensors_(model, tensors)
    except UnknownArgumentError:
        raise
    except InvalidArgumentError as error:
        raise error.reason from None
    except _NotFiniteError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error
    except MissingArgumentError as error:
        raise CheckpointError(f"{path} {error}") from error
    except _ERRORS_OF_CLASSES as error:
        raise CheckpointError(f"{path} does not fit: {error}") from error
    model.on_load(path)
    return model


def saved_method(path: str | os.PathLike[str]) -> str:
    """Return the name of the method that a file was saved from, without its wrappers.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is damaged or not a checkpoint.
    """
    description, _ = _read(Path(path))
    while (inside := description.get("inside", {}).get("wrapped")) is not None:
        description = inside
    name: str = description["method"]
    return name


def _changed_tensors(model: AdaptiveModel) -> dict[str, Tensor]:
    """Return every tensor of the stream that differs from its counterpart in the source; tied ones once."""
    source, prefixes = model.source.state_dict(keep_vars=True), [prefix for prefix, _ in nested_models(model)]
    changed, seen = {}, _ids(source)
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        if not _same_bits(value, source.get(split_name(name, prefixes)[1])):
            changed[name] = value
    return changed


def _ids(state: dict[str, Any]) -> set[int]:
    return {id(value) for value in state.values()}


def _same_bits(value: Tensor, other: Tensor | None) -> bool:
    """Compare bit for bit, so that -0 differs from 0 and a NaN equals itself."""
    if other is None or value.shape != other.shape or value.dtype != other.dtype:
        return False
    if value.is_complex():
        value, other = torch.view_as_real(value), torch.view_as_real(other)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return torch.equal(value.detach().view(integers), other.detach().view(integers))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file and check that its header is complete."""
    try:
        header, tensors = read_tensors(path, _METADATA_KEY)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise FileNotFoundError(f"no saved stream at {path}") from error
    if not isinstance(header, dict) or "format" not in header:
        raise DamagedCheckpointError(f"{path} is a safetensors file, but not one of ctta.save")
    if header["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {header['format']}, and this version of ctta reads format {FORMAT}: load it with the "
            "version that saved it"
        )
    invalid = [key for key, kind in _HEADER.items() if not isinstance(header.get(key), kind)] + invalid_fields(header)
    if invalid:
        raise DamagedCheckpointError(f"the header of {path} is damaged: no usable {', '.join(invalid)}")
    if header["tensors"] != sorted(tensors):
        raise DamagedCheckpointError(f"{path} does not hold the tensors that its header lists")
    return rename_parts(header, tensors)


def _copy_tensors_(model: AdaptiveModel, tensors: dict[str, Tensor]) -> None:
    """Copy the tensors that are not an optimizer's into a new model."""
    allocate_lazy_buffers_(model, tensors)
    targets, source = model.state_dict(keep_vars=True), _ids(model.source.state_dict(keep_vars=True))
    prefixes = [prefix for prefix, _ in nested_models(model)]
    for name, value in tensors.items():
        if split_name(name, prefixes)[0] == "optimizer":
            if not bool(value.isfinite().all()):
                raise _NotFiniteError(f"its optimizer state '{name}' is not finite")
            continue
        target = targets.get(name)
        if not isinstance(target, Tensor) or id(target) in source:
            raise ValueError(f"it holds '{name}', which is not part of the model's state")
        if (target.shape, target.dtype) != (value.shape, value.dtype):
            raise ValueError(
                f"it holds '{name}' as {value.dtype} {tuple(value.shape)}, "
                f"and the model has it as {target.dtype} {tuple(target.shape)}"
            )
        # Some buffers hold infinities from the start: attention masks, the open bounds of an input specification.
        if bool((~value.isfinite() & target.detach().cpu().isfinite()).any()):
            raise _NotFiniteError(f"it holds '{name}' with values that are not finite")
        with torch.no_grad():
            target.copy_(value)

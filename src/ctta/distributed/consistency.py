"""Compare the state of a model between ranks, and broadcast it from rank 0."""

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ctta.core.hyperparameters import format_hyperparameters
from ctta.core.model import AdaptiveModel
from ctta.distributed.collectives import (
    DistributedError,
    all_gather_json,
    all_gather_stack,
    translate_connection_errors,
    world_size,
)
from ctta.optim import restore_state_, split_state

_MODULUS = 1 << 62  # checksums fit an int64


def check_consistent(model: AdaptiveModel) -> None:
    """Check that all ranks hold the same weights, optimizer state and counters.

    Args:
        model: The stream that the ranks share; all ranks must call this together.

    Raises:
        DistributedError: On every rank, if one differs.
    """
    if world_size() > 1:
        compare_checksums(all_gather_stack(torch.tensor(checksum(model))).tolist(), model.num_steps)


def compare_checksums(checksums: list[int], num_steps: int) -> None:
    """Raise the same error on every rank if the checksums of the ranks differ."""
    if len(set(checksums)) > 1:
        most_common = max(checksums, key=checksums.count)
        different = ", ".join(str(number) for number, found in enumerate(checksums) if found != most_common)
        raise DistributedError(
            f"after {num_steps} steps rank {different} holds different weights than the others, so all ranks stop: "
            "resume from the last saved state, and look for the cause there (hardware, torch version, threads, or a "
            "method that uses more of a batch than its mean loss)"
        )


def checksum(model: AdaptiveModel) -> int:
    """Return a checksum of all bits of the stream's state.

    It takes one pass over the memory; a cryptographic hash would take many times longer.
    """
    tensors, total = [*_state(model).values()], 0
    if model.optimizer is not None:
        tensors += [value for _, value in sorted(split_state(model.optimizer)[1].items())]
    for number, tensor in enumerate(tensors):
        total = (total * 31 + sum_bits(tensor) + number) % _MODULUS
    return (total + hash_repr(sorted(model.counters.items()))) % _MODULUS


def sum_bits(tensor: Tensor) -> int:
    """Return the sum of a tensor's memory, read as integers of 32 bits."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 4:  # an unaligned slice of a larger tensor cannot be viewed as int32
        data = data.clone()
    aligned = len(data) // 4 * 4
    return int(data[:aligned].view(torch.int32).sum()) + int(data[aligned:].sum())


def hash_repr(obj: object) -> int:
    """Return a hash of ``repr(obj)`` that fits an int64 and is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(obj).encode(), digest_size=7).digest())


def broadcast_model_(model: AdaptiveModel) -> None:
    """Give a model the state that it has on rank 0: source, adapted weights, optimizer, counters and mode."""
    shapes = [(name, str(value.dtype), tuple(value.shape)) for name, value in _state(model).items()]
    identity = {
        "method": f"{type(model).__module__}.{type(model).__qualname__}",
        "settings": format_hyperparameters(model.hyperparameters),
        "network": hex(hash_repr(shapes)),
    }
    optimizer, momenta = split_state(model.optimizer) if model.optimizer else ({}, {})
    mode = {**model.counters, "frozen": model.frozen}
    momentum_shapes = {name: [str(value.dtype), list(value.shape)] for name, value in momenta.items()}
    gathered = all_gather_json([identity, mode, optimizer, momentum_shapes])
    expected = gathered[0][0]
    for number, (found, *_) in enumerate(gathered):
        if different := [name for name, value in found.items() if value != expected[name]]:
            name = different[0]
            raise DistributedError(
                f"rank {number} differs from rank 0 in the {name} of the model ({found[name]}, and on rank 0 "
                f"{expected[name]}): build the same model on every rank"
            )
    _, mode, optimizer, momentum_shapes = gathered[0]
    for name, value in mode.items():
        setattr(model, name, value)
    for tensor in _state(model).values():
        _broadcast_(tensor)
    if model.optimizer is not None:
        _broadcast_optimizer_(model, optimizer, momenta, momentum_shapes)


def _broadcast_optimizer_(
    model: AdaptiveModel, plain: dict[str, Any], local: dict[str, Tensor], shapes: dict[str, Any]
) -> None:
    """Give the optimizer the state that it has on rank 0, whose dtypes and shapes are given."""
    assert model.optimizer is not None
    device = next(model.source.parameters()).device
    received = {}
    for name, (dtype_name, shape) in shapes.items():
        dtype = getattr(torch, dtype_name.removeprefix("torch."))
        matches = name in local and local[name].shape == torch.Size(shape) and local[name].dtype == dtype
        tensor = local[name].to(device).clone() if matches else torch.zeros(shape, dtype=dtype, device=device)
        _broadcast_(tensor)
        received[name] = tensor if shape else tensor.cpu()  # torch keeps single numbers on the CPU
    restore_state_(model.optimizer, plain, received)


def _broadcast_(tensor: Tensor) -> None:
    with torch.no_grad(), translate_connection_errors():
        sent = tensor.detach().contiguous()
        dist.broadcast(sent, 0)
        tensor.copy_(sent)


def _state(model: AdaptiveModel) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}

"""Whether a model is the same on all ranks, and making it so."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ctta.base import AdaptiveModel
from ctta.distributed.collectives import all_gather_json, all_gather_stack, explaining_lost_ranks
from ctta.distributed.process_group import DistributedError, world_size
from ctta.hyperparameters import format_hyperparameters
from ctta.optim import restore_state_, split_state


def check_same(model: AdaptiveModel) -> None:
    """Raise :class:`DistributedError` on every rank unless all hold the same weights, optimiser state and counters."""
    if world_size() > 1:
        raise_unless_same(all_gather_stack(torch.tensor(checksum(model))).tolist(), model.num_steps)


def raise_unless_same(checksums: list[int], num_steps: int) -> None:
    """The same error on every rank, if the checksums differ."""
    if len(set(checksums)) > 1:
        usual = max(checksums, key=checksums.count)
        odd = ", ".join(str(number) for number, found in enumerate(checksums) if found != usual)
        raise DistributedError(
            f"after {num_steps} steps rank {odd} holds other weights than the rest, so all stop before they drift "
            "further: go on from the last saved state, and look for what differs there (hardware, torch, threads, or "
            "a method that reads more of a batch than its mean loss)"
        )


def checksum(model: AdaptiveModel) -> int:
    """Of every bit of the stream's state: one pass over the memory, where a hash would take many times longer."""
    total = 0
    for number, tensor in enumerate(_tensors(model)):
        total = (total * 31 + sum_of_bits(tensor) + number) % (1 << 62)
    return (total + digest(sorted(model.counters.items()))) % (1 << 62)


def sum_of_bits(tensor: Tensor) -> int:
    """Of a tensor's memory, taken for whole numbers of 32 bits."""
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 4:  # a slice of something larger, which cannot be looked at in fours where it lies
        bits = bits.clone()
    whole = len(bits) // 4 * 4
    return int(bits[:whole].view(torch.int32).sum()) + int(bits[whole:].sum())


def digest(thing: object) -> int:
    """Of what a thing is shown as; fits an int64."""
    return int.from_bytes(hashlib.blake2b(repr(thing).encode(), digest_size=7).digest())


def copy_from_first_rank_(model: AdaptiveModel) -> None:
    """Give the model the state that it has on rank 0: source, adapted weights, optimiser, counters and mode."""
    shapes = [(name, str(value.dtype), tuple(value.shape)) for name, value in _state(model).items()]
    about = {
        "method": f"{type(model).__module__}.{type(model).__qualname__}",
        "settings": format_hyperparameters(model.hyperparameters),
        "network": hex(digest(shapes)),
    }
    optimizer, moments = split_state(model.optimizer) if model.optimizer else ({}, {})
    mode = {**model.counters, "frozen": model.frozen}
    moment_shapes = {name: [str(value.dtype), list(value.shape)] for name, value in moments.items()}
    found = all_gather_json([about, mode, optimizer, moment_shapes])
    for number, (other, *_) in enumerate(found):
        if different := [name for name, value in other.items() if value != found[0][0][name]]:
            raise DistributedError(
                f"rank {number} has another {different[0]} than rank 0 ({other[different[0]]}, there "
                f"{found[0][0][different[0]]}): build the same model on every rank"
            )
    _, mode, optimizer, moment_shapes = found[0]
    for name, value in mode.items():
        setattr(model, name, value)
    for value in _state(model).values():
        _broadcast_(value)
    if model.optimizer is not None:
        _take_over_optimizer(model, optimizer, moments, moment_shapes)


def _take_over_optimizer(
    model: AdaptiveModel, plain: dict[str, Any], own: dict[str, Tensor], shapes: dict[str, Any]
) -> None:
    assert model.optimizer is not None
    device = next(model.source.parameters()).device
    received = {}
    for name, (dtype, shape) in shapes.items():
        kind = getattr(torch, dtype.removeprefix("torch."))
        is_own = name in own and own[name].shape == torch.Size(shape) and own[name].dtype == kind
        tensor = own[name].to(device).clone() if is_own else torch.zeros(shape, dtype=kind, device=device)
        _broadcast_(tensor)
        received[name] = tensor if shape else tensor.cpu()  # single numbers are kept on the CPU, as torch does
    restore_state_(model.optimizer, plain, received)


def _broadcast_(tensor: Tensor) -> None:
    with torch.no_grad(), explaining_lost_ranks():
        sent = tensor.detach().contiguous()
        dist.broadcast(sent, 0)
        tensor.copy_(sent)


def _state(model: AdaptiveModel) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _tensors(model: AdaptiveModel) -> Iterator[Tensor]:
    yield from _state(model).values()
    if model.optimizer is not None:
        _, moments = split_state(model.optimizer)
        yield from (value for _, value in sorted(moments.items()))

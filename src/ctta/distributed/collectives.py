"""The process group of ``torchrun``, and collectives on it: rows of batches, JSON, and actions that fail together."""

import atexit
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from ctta.errors import ConfigError

T = TypeVar("T")


def shard(x: Tensor) -> Tensor:
    """Return the rows of this rank of a batch that every rank has.

    Args:
        x: The whole batch.

    Returns:
        Consecutive rows, at most one more than any other rank has; the whole batch on a single process.
    """
    return x[local_rows(len(x))]


def local_rows(num_rows: int) -> slice:
    """Return the rows of this rank of a batch of ``num_rows``."""
    quotient, remainder = divmod(num_rows, world_size())
    start = rank() * quotient + min(rank(), remainder)
    return slice(start, start + quotient + (rank() < remainder))


def all_gather(rows: Tensor) -> Tensor:
    """Return the rows of all ranks.

    Args:
        rows: The rows of this rank; ranks may have different numbers of them.

    Returns:
        All rows in the order of the ranks, on every rank.
    """
    return all_gather_rows(rows) if world_size() > 1 else rows


@contextmanager
def translate_connection_errors() -> Iterator[None]:
    """Turn torch's errors about a lost connection into a :class:`DistributedError`."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # ValueError: the process group was destroyed
        reason = str(error).strip().splitlines()[0]
        raise DistributedError(
            f"this rank has lost the others: one has ended, failed or does not answer ({reason}); restart all ranks, "
            "from the last saved state"
        ) from error


def all_gather_stack(local: Tensor) -> Tensor:
    """Return the tensors of all ranks, which have the same shape, stacked in the order of the ranks."""
    with translate_connection_errors():
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(world_size())]
        dist.all_gather(parts, local.contiguous())
        return torch.stack(parts)


def all_reduce_sum(local: Tensor) -> Tensor:
    """Return the sum over all ranks; bit-identical on each."""
    total = local.clone(memory_format=torch.contiguous_format)
    with translate_connection_errors():
        dist.all_reduce(total)
    return total


def all_gather_rows(local: Tensor) -> Tensor:
    """Concatenate the rows of all ranks, which may have different numbers of them."""
    counts = all_gather_stack(torch.tensor(len(local), device=local.device)).tolist()
    padded = local.new_zeros(max(counts), *local.shape[1:])
    padded[: len(local)] = local
    return torch.cat([part[:count] for part, count in zip(all_gather_stack(padded), counts, strict=True)])


def broadcast_first_row(source_rank: int, local: Tensor) -> Tensor:
    """Return the first row of a rank on every rank."""
    row = local.detach()[:1].clone(memory_format=torch.contiguous_format)
    row = row if len(row) else row.new_zeros(1, *row.shape[1:])
    with translate_connection_errors():
        dist.broadcast(row.view(-1).view(torch.uint8), source_rank)  # as bytes, since backends lack some dtypes
    return row


def all_gather_json(local: Any) -> list[Any]:
    """Return the JSON values of all ranks; as bytes, because torch's own function would unpickle what it receives."""
    data = torch.frombuffer(bytearray(json.dumps(local).encode()), dtype=torch.uint8)
    counts = all_gather_stack(torch.tensor(len(data))).tolist()
    return [json.loads(bytes(part.tolist())) for part in all_gather_rows(data).split(counts)]


def all_gather_object(action: Callable[[], T]) -> list[T]:
    """Run an action on every rank and return all results, which must be plain JSON; if it fails on one, all raise."""
    failure: Exception | None = None
    outcome: dict[str, Any] = {}
    try:
        outcome["result"] = action()
    except Exception as error:
        failure, outcome["error"] = error, f"{type(error).__name__}: {error}"
    try:
        outcomes = all_gather_json(outcome)
    finally:
        if failure is not None:  # the cause, even if the connection is lost by now
            raise failure
    for number, other in enumerate(outcomes):
        if "error" in other:
            raise DistributedError(f"rank {number} failed, so all ranks stop: {other['error']}")
    return [other["result"] for other in outcomes]


def run_on_rank_zero(action: Callable[[], T]) -> T:
    """Run an action on rank 0 only and return its result, plain JSON, on every rank; if it fails, all raise."""
    if world_size() == 1:
        return action()
    result: T = all_gather_object(lambda: action() if rank() == 0 else None)[0]  # type: ignore[assignment]
    return result


def all_reduce_any(flag: bool) -> bool:
    """Return whether the flag is set on at least one rank."""
    return flag if world_size() == 1 else bool(all_gather_stack(torch.tensor(int(flag))).any())


def all_gather_with_grad(local: Tensor) -> Tensor:
    """Differentiable :func:`all_gather_stack`; each rank holds a part of one sum, so gradients add up over ranks."""
    stacked: Tensor = _AllGather.apply(local)  # type: ignore[no-untyped-call]
    return stacked


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        return all_gather_stack(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return all_reduce_sum(gradients[0])[rank()]


TIMEOUT = 300.0  # seconds
_has_shut_down = False


class DistributedError(ConnectionError):
    """Raised if the ranks cannot continue together: one is gone, has failed, or holds different weights."""


def init(timeout: float = TIMEOUT) -> None:
    """Join the processes of ``torchrun``.

    Does nothing if this process was started alone, or has joined already.

    Args:
        timeout: Seconds after which a rank that does not answer is considered lost.

    Raises:
        ConfigError: If the process group was initialized by the caller with a backend that has no CPU tensors.
        DistributedError: If this process has left the group before.
    """
    if _is_initialized():
        if world_size() > 1 and "cpu" not in str(dist.get_backend_config()):
            raise ConfigError(
                "the process group has no backend for CPU tensors, which the ranks use to coordinate: initialize it "
                "with both, such as 'cpu:gloo,cuda:nccl', or leave it to ctta"
            )
    elif world_size() > 1:
        if _has_shut_down:  # ranks that join again may wait for each other until the timeout
            raise DistributedError("the process group was shut down, for instance after a failure: restart all ranks")
        dist.init_process_group(_use_accelerator(), timeout=timedelta(seconds=timeout))
        atexit.register(shutdown)


def _use_accelerator() -> str:
    """Make the accelerator of this rank the current one, if there is any; return the backends by type of device.

    Named explicitly, since torch starts that of the accelerator alone otherwise.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return "cpu:gloo"
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
    backend = dist.Backend.default_device_backend_map.get(accelerator.type, "gloo")
    return "cpu:gloo" if backend == "gloo" else f"cpu:gloo,{accelerator.type}:{backend}"


def shutdown() -> None:
    """Leave the process group for good; the other ranks fail at their next collective."""
    global _has_shut_down
    if _is_initialized():
        _has_shut_down = True
        dist.destroy_process_group()


def rank() -> int:
    """Return the number of this process among all, from 0; 0 if it was started alone."""
    return dist.get_rank() if _is_initialized() else int(os.environ["RANK"]) if _is_launched() else 0


def world_size() -> int:
    """Return the number of processes; 1 if this one was started alone."""
    return dist.get_world_size() if _is_initialized() else int(os.environ["WORLD_SIZE"]) if _is_launched() else 1


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _is_launched() -> bool:
    """Return whether ``torchrun`` started this process, also before joining and after leaving the group."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()

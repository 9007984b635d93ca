"""What ranks tell each other, on torch's own collectives."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from ctta.distributed.process_group import DistributedError, rank, world_size

T = TypeVar("T")


@contextmanager
def explaining_lost_ranks() -> Iterator[None]:
    """Torch's errors about a connection, as one sentence."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch has the second for a group that was left
        reason = str(error).strip().splitlines()[0]
        raise DistributedError(
            f"this rank has lost the others: one has ended, failed or does not answer ({reason}); start all again, "
            "from the last saved state"
        ) from error


def all_gather_stack(here: Tensor) -> Tensor:
    """The tensors of all ranks, of one shape, stacked in the order of the ranks."""
    with explaining_lost_ranks():
        parts = [torch.empty_like(here, memory_format=torch.contiguous_format) for _ in range(world_size())]
        dist.all_gather(parts, here.contiguous())
        return torch.stack(parts)


def all_reduce_sum(here: Tensor) -> Tensor:
    """The sum over all ranks; the very same bits on each."""
    total = here.clone(memory_format=torch.contiguous_format)
    with explaining_lost_ranks():
        dist.all_reduce(total)
    return total


def all_gather_rows(here: Tensor) -> Tensor:
    """The rows of all ranks, of which each may have another number, one below the other."""
    counts = all_gather_stack(torch.tensor(len(here), device=here.device)).tolist()
    padded = here.new_zeros(max(counts), *here.shape[1:])
    padded[: len(here)] = here
    return torch.cat([part[:count] for part, count in zip(all_gather_stack(padded), counts, strict=True)])


def broadcast_row(giver: int, here: Tensor) -> Tensor:
    """The first row that a rank has, on every rank; as bytes, since not every dtype travels by itself."""
    row = here.detach()[:1].clone(memory_format=torch.contiguous_format)
    row = row if len(row) else row.new_zeros(1, *row.shape[1:])
    with explaining_lost_ranks():
        dist.broadcast(row.view(-1).view(torch.uint8), giver)
    return row


def all_gather_json(here: Any) -> list[Any]:
    """Plain JSON of all ranks; as bytes, because nothing that came from elsewhere is unpickled here."""
    data = torch.frombuffer(bytearray(json.dumps(here).encode()), dtype=torch.uint8)
    counts = all_gather_stack(torch.tensor(len(data))).tolist()
    content = bytes(all_gather_rows(data).tolist())
    found = []
    for count in counts:
        found.append(json.loads(content[:count]))
        content = content[count:]
    return found


def all_gather_object(action: Callable[[], T]) -> list[T]:
    """What an action gives on every rank; where it fails on one, it fails on all."""
    failure: Exception | None = None
    here: dict[str, Any] = {}
    try:
        here["gives"] = action()
    except Exception as error:
        failure, here["fails"] = error, f"{type(error).__name__}: {error}"
    try:
        found = all_gather_json(here)
    finally:
        if failure is not None:  # which is the cause, also where the others are lost by now
            raise failure
    for number, outcome in enumerate(found):
        if "fails" in outcome:
            raise DistributedError(f"rank {number} failed, so all stop: {outcome['fails']}")
    return [outcome["gives"] for outcome in found]


def run_on_rank_zero(action: Callable[[], T]) -> T:
    """What an action gives on rank 0, which alone does it; where it fails there, it fails on all."""
    if world_size() == 1:
        return action()
    gives: T = all_gather_object(lambda: action() if rank() == 0 else None)[0]  # type: ignore[assignment]
    return gives


def any_rank(truth: bool) -> bool:
    """Whether it is true on some rank."""
    return truth if world_size() == 1 else bool(all_gather_stack(torch.tensor(int(truth))).any())


def all_gather_with_grad(here: Tensor) -> Tensor:
    """Differentiable :func:`all_gather_stack`: each rank holds its part of one sum, so gradients add up over ranks."""
    there: Tensor = _Gather.apply(here)  # type: ignore[no-untyped-call]
    return there


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, here: Tensor) -> Tensor:
        return all_gather_stack(here)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return all_reduce_sum(gradients[0])[rank()]

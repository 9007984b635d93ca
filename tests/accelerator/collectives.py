"""Collectives of the simulated accelerator, with the rules of NCCL; importing it registers the backend ``simccl``.

As with ``cpu:gloo,cuda:nccl``, tensors of the host go to gloo. Those of the device must all be on the device of their
rank, which no other rank has, dense, and of a dtype that NCCL knows. Gloo then moves copies of them.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Work

import accelerator

#: Collectives of this rank since its start, by the type of the tensors' device.
counts = {"cpu": 0, "sim": 0}
DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


class _Done(Work):
    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True


class RulesOfNccl(dist.ProcessGroup):
    """The default group of a rank."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo: Any = ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.device: torch.device | None = None

    def getBackendName(self) -> str:
        return "simccl"

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        return self._run(list(tensors), lambda copies: self.gloo.allreduce(copies, options))

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        (received,), (sent,) = outputs, inputs
        return self._run([*received, sent], lambda copies: self.gloo.allgather([copies[:-1]], copies[-1:], options))

    def broadcast(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        return self._run(list(tensors), lambda copies: self.gloo.broadcast(copies, options))

    def barrier(self, options: Any = None) -> Any:
        return self.gloo.barrier(options)

    def _run(self, tensors: list[Tensor], collective: Callable[[list[Tensor]], Any]) -> Any:
        kinds = {tensor.device.type for tensor in tensors}
        if len(kinds) > 1:
            raise RuntimeError(f"a collective got tensors on {sorted(kinds)}: expected one device")
        counts[kinds.pop()] += 1
        if tensors[0].device.type == "cpu":
            return collective(tensors)
        self._check(tensors)
        copies = [tensor.cpu() for tensor in tensors]
        collective(copies).wait()
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
        return _Done()

    def _check(self, tensors: list[Tensor]) -> None:
        if self.device is None:
            self._join(tensors[0].device)
        for tensor in tensors:
            if tensor.device != self.device:
                raise RuntimeError(f"a collective got a tensor on {tensor.device} on the rank of {self.device}")
            if not tensor.is_contiguous() or tensor.dtype not in DTYPES:
                raise RuntimeError(f"a collective got {tensor.dtype} with the strides {tensor.stride()}")

    def _join(self, device: torch.device) -> None:
        """Find out at the first collective which device each rank has."""
        others = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size())]
        self.gloo.allgather([others], [torch.tensor([device.index])]).wait()
        found = [int(other) for other in others]
        if len(set(found)) < min(len(found), accelerator.NUM_DEVICES):
            raise RuntimeError(f"duplicate device: the ranks have the devices {found}, expected one for each")
        self.device = device


dist.Backend.register_backend("simccl", RulesOfNccl, devices=["sim"])

"""The processes that torchrun has started: joining them, and which of them this one is."""

import atexit
import os
from datetime import timedelta

import torch
from torch import distributed as dist

TIMEOUT = 300.0  # seconds
_has_left = False


class DistributedError(ConnectionError):
    """The ranks cannot go on together: one is gone, has failed, or holds other weights than the rest."""


def init(timeout: float = TIMEOUT) -> None:
    """Join the processes of ``torchrun``; nothing where this one was started by itself, or has joined already.

    Args:
        timeout: seconds after which a rank that does not answer is given up, and the others end with an error.
    """
    if _is_member():
        if world_size() > 1 and "cpu" not in str(dist.get_backend_config()):
            raise ValueError(
                "the process group serves no tensors on the CPU, which ranks agree by: start it without naming a "
                "backend, or with 'cpu:gloo,cuda:nccl'"
            )
    elif world_size() > 1:
        if _has_left:  # ranks that joined again were seen to wait for each other until the time-out
            raise DistributedError("the ranks have parted, as after a failure of one: start all again")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(timeout=timedelta(seconds=timeout))
        atexit.register(shutdown)


def shutdown() -> None:
    """Part from the others for good; they find out at their next exchange."""
    global _has_left
    if _is_member():
        _has_left = True
        dist.destroy_process_group()


def rank() -> int:
    """The number of this process among all, from 0; 0 where there is no other."""
    return dist.get_rank() if _is_member() else int(os.environ["RANK"]) if _is_started_with_others() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _is_member() else int(os.environ["WORLD_SIZE"]) if _is_started_with_others() else 1


def _is_member() -> bool:
    return dist.is_available() and dist.is_initialized()


def _is_started_with_others() -> bool:
    """Also before joining and after leaving: a rank must not take itself for the only process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()

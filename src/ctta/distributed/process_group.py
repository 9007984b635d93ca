"""The process group of ``torchrun``: joining it, leaving it, and the rank of this process."""

import atexit
import os
from datetime import timedelta

import torch
from torch import distributed as dist

from ctta.errors import ConfigError

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
                "without naming a backend, or with 'cpu:gloo,cuda:nccl'"
            )
    elif world_size() > 1:
        if _has_shut_down:  # ranks that join again may wait for each other until the timeout
            raise DistributedError("the process group was shut down, for instance after a failure: restart all ranks")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(timeout=timedelta(seconds=timeout))
        atexit.register(shutdown)


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

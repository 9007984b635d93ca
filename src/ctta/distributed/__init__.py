"""One stream on many devices, under ``torchrun``: the same script, the same answers, on any number of processes.

>>> import torch, ctta
>>> net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(192, 10))
>>> model = ctta.distributed.data_parallel(ctta.CoTTA(net))
>>> x = torch.rand(6, 3, 8, 8)
>>> here = model(ctta.distributed.shard(x))    # predictions of this rank's rows
>>> ctta.distributed.gather(here).shape        # of all
torch.Size([6, 10])
"""

from torch import Tensor

from ctta.distributed.collectives import all_gather_rows
from ctta.distributed.consistency import check_same
from ctta.distributed.data_parallel import data_parallel, local_rows
from ctta.distributed.process_group import DistributedError, init, rank, shutdown, world_size

__all__ = [
    "DistributedError",
    "check_same",
    "data_parallel",
    "gather",
    "init",
    "rank",
    "shard",
    "shutdown",
    "world_size",
]


def shard(x: Tensor) -> Tensor:
    """This rank's rows of a batch that every rank has; all of them where there is one process."""
    return x[local_rows(len(x))]


def gather(rows: Tensor) -> Tensor:
    """The rows of all ranks in order, on every rank."""
    return all_gather_rows(rows) if world_size() > 1 else rows

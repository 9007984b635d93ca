"""One stream on several devices under ``torchrun``: the same script and the same results on any number of processes.

>>> import torch, ctta
>>> net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(192, 10))
>>> model = ctta.distributed.data_parallel(ctta.CoTTA(net))
>>> x = torch.rand(6, 3, 8, 8)
>>> local = model(ctta.distributed.shard(x))     # logits of the rows of this rank
>>> ctta.distributed.all_gather(local).shape     # of all rows
torch.Size([6, 10])
"""

from ctta.distributed.collectives import DistributedError, all_gather, init, rank, shard, shutdown, world_size
from ctta.distributed.consistency import check_consistent
from ctta.distributed.data_parallel import data_parallel

__all__ = [
    "DistributedError",
    "all_gather",
    "check_consistent",
    "data_parallel",
    "init",
    "rank",
    "shard",
    "shutdown",
    "world_size",
]

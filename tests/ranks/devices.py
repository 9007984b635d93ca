"""Cases: ranks that each have a simulated accelerator, under the rules of NCCL."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

import ctta
from ctta.core.options import resolve_device
from ctta.distributed import data_parallel, rank
from ctta.models import to_device
from ranks import case
from ranks.stream import DEVICE, VIEWS, Stream

#: Collectives on tensors of the host in a step: the ranks agree that it can begin, and on its sizes.
MOST_ON_HOST = 2


@case
def each_rank_has_a_device_of_its_own(folder: Path) -> None:
    for name in ("auto", DEVICE):
        assert resolve_device(name) == DEVICE, "so that the ranks record the same options"
        assert next(to_device(torch.nn.Linear(2, 2), name).parameters()).device.index == rank()
    assert torch.zeros(1, device=DEVICE).device.index == rank()
    assert dist.get_backend_config() == "cpu:gloo,sim:simccl"


@case
def tensors_of_the_device_are_reduced_there(folder: Path) -> None:
    """What the ranks reduce of a batch never passes through the host; only what they agree on does."""
    from accelerator.collectives import counts

    for method, settings in ((ctta.Tent, {}), (ctta.CoTTA, VIEWS), (ctta.VANE, {})):
        stream = Stream(method, settings=settings)
        model = data_parallel(stream.make_model(), check_every=1000)
        for step in (0, 2):
            before = dict(counts)
            model(stream.make_batch(step)[stream.local_rows(step)])
            assert counts["cpu"] - before["cpu"] <= MOST_ON_HOST + step // 2
            assert counts["sim"] > before["sim"]


@case
def what_nccl_refuses_is_refused(folder: Path) -> None:
    """The rules that the other cases hold to."""
    own, other = torch.ones(2, 2, device=DEVICE), torch.ones(2, 2, device=f"{DEVICE}:{1 - rank()}")
    refused: list[Tensor] = [other, torch.ones(2, 3, device=DEVICE).T, own.to(torch.int16)]
    for tensor in refused:
        with pytest.raises(RuntimeError, match="a collective got"):
            dist.all_reduce(tensor)
    with pytest.raises(RuntimeError, match="expected one device"):
        dist.all_gather([torch.ones(2), torch.ones(2)], own.flatten()[:2])
    dist.all_reduce(own)
    assert own.tolist() == [[2.0, 2.0]] * 2

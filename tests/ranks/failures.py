"""Cases: mistakes and failures that all ranks must notice."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

import ctta
from ctta.distributed import DistributedError, check_consistent, data_parallel, rank, shard, world_size
from ctta.errors import ConfigError, InputError
from ctta.testing.case import collect_state
from ranks import case, write_outcome
from ranks.stream import VIEWS, Stream


@case
def all_start_from_the_state_of_rank_zero(folder: Path) -> None:
    stream = Stream(ctta.Tent)
    net = stream.make_network()
    with torch.no_grad():
        net.get_parameter("0.weight").add_(rank())
    model = ctta.Tent(net)
    if rank() == 0:
        model(stream.make_batch(0))  # so that only its optimizer has a state
    check_consistent(data_parallel(model))
    assert model.num_steps == 1
    assert torch.equal(model.source.get_parameter("0.weight"), stream.make_network().get_parameter("0.weight"))
    with pytest.raises(DistributedError, match="rank 1 differs from rank 0 in the settings"):
        data_parallel(ctta.CoTTA(stream.make_network(), seed=rank()))


@case
def a_bad_batch_on_one_rank_is_refused_by_all(folder: Path) -> None:
    stream = Stream(ctta.Tent)
    model = data_parallel(stream.make_model())
    before = collect_state(model)
    x = shard(stream.make_batch(0)).clone()
    if rank() == 1:
        x[0, 0, 0, 0] = torch.nan
    with pytest.raises(InputError, match="NaN" if rank() == 1 else "rank 1 was given a bad batch"):
        model(x)
    with pytest.raises(InputError, match="different shapes"):
        model(torch.rand(2, 3, 16, 16 + rank()).double())
    assert all(map(torch.equal, collect_state(model), before))
    empty = x[:0]
    assert model(empty) is empty and model.num_steps == 0
    model(shard(stream.make_batch(0)))


@case
def sharded_views_need_the_whole_batch(folder: Path) -> None:
    stream = Stream(ctta.CoTTA, settings=VIEWS)
    model = data_parallel(stream.make_model(), shard="views")
    with pytest.raises(InputError, match=r"call model\(x\), not model\(shard\(x\)\)"):
        model(stream.make_batch(0)[rank() : rank() + 2])
    assert model.num_steps == 0


@case
def a_guard_is_refused(folder: Path) -> None:
    stream = Stream(ctta.Tent)
    attempts: list[Callable[[], ctta.AdaptiveModel]] = [
        lambda: data_parallel(ctta.Guarded(stream.make_model())),
        lambda: ctta.Guarded(data_parallel(stream.make_model())),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigError, match="by its local rows"):
            attempt()


@case
def diverging_weights_stop_all(folder: Path) -> None:
    stream = Stream(ctta.Tent)
    model = data_parallel(stream.make_model(), check_every=2)
    if rank() == 1:
        with torch.no_grad():
            model.get_parameter("student.1.weight")[0] += 1e-15
    with pytest.raises(DistributedError, match="after 0 steps rank"):
        model(shard(stream.make_batch(0)))


@case
def a_frozen_model_is_not_compared_at_every_call(folder: Path) -> None:
    stream = Stream(ctta.Tent)
    model = data_parallel(stream.make_model()).freeze()
    with mock.patch("ctta.distributed.consistency.sum_bits", side_effect=AssertionError):
        model(shard(stream.make_batch(0)))


@case
def unaligned_buffers_are_compared_too(folder: Path) -> None:
    net = Stream(ctta.Tent).make_network()
    net.register_buffer("mask", torch.ones(9, dtype=torch.bool)[1:])
    model = data_parallel(ctta.Tent(net))
    check_consistent(model)
    if rank() == 1:
        model.source.get_buffer("mask")[3] = False
    with pytest.raises(DistributedError, match="holds different weights"):
        check_consistent(model)


@case
def a_killed_rank_ends_the_others_with_an_error(folder: Path) -> None:
    """The last case, since no rank can continue after it."""
    stream = Stream(ctta.Tent)
    model = data_parallel(stream.make_model())
    model(shard(stream.make_batch(2)))
    if rank() == world_size() - 1:
        write_outcome(folder, a_killed_rank_ends_the_others_with_an_error.__name__)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DistributedError, match="this rank has lost the others"):
        model(shard(stream.make_batch(2)))
    ctta.distributed.shutdown()
    with pytest.raises(DistributedError, match="process group was shut down"):
        data_parallel(stream.make_model())

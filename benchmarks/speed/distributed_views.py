"""The speed-up of a CoTTA step whose views are divided among ranks with one thread each, over one such process.

torchrun --nproc-per-node 2 benchmarks/speed/distributed_views.py [--views 32] [--batch 200] [--pairs 5]

Waiting ranks use no core. All times are from one run, taken in turns, so that noise affects them alike. Needs as many
idle cores as ranks.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch import Tensor

import ctta
from benchmarks.speed.measurements import seconds
from benchmarks.speed.steps import cifar_batch
from ctta.distributed import all_gather, data_parallel, init, rank, world_size
from ctta.methods.cotta import CoTTA


def build(num_views: int) -> CoTTA:
    """Return CoTTA with a gate that always opens."""
    net = ctta.models.embedded().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return CoTTA(net, threshold=1.0, views=ctta.views.image_views(num_views))


def time_together(call: Callable[[], object], ranks: range) -> float:
    """Return the seconds until the last of these ranks is done, having started together; the others wait."""
    all_gather(torch.zeros(1))
    elapsed = seconds(call) if rank() in ranks else 0.0
    return float(all_gather(torch.tensor([elapsed])).max())


def measure_view_fraction(model: CoTTA, x: Tensor) -> float:
    """Return the fraction of a step's time that is spent on the views, the only part that is divided."""
    predict_over_views, elapsed = CoTTA._predict_over_views, []

    def timed(self: CoTTA, x: Tensor) -> Tensor:
        logits: list[Tensor] = []
        elapsed.append(seconds(lambda: logits.append(predict_over_views(self, x))))
        return logits[0]

    with mock.patch.object(CoTTA, "_predict_over_views", timed):
        total = seconds(partial(model, x))
    return sum(elapsed) / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("views", 32), ("batch", 200), ("pairs", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    init()
    if world_size() == 1:
        parser.error("start it with torchrun --nproc-per-node 2")
    x = cifar_batch(arguments.batch)
    alone, divided = build(arguments.views), data_parallel(build(arguments.views), shard="views")
    first, all_ranks = range(1), range(world_size())
    alone(x)
    divided(x)
    fractions, speed_ups, contention = [], [], []
    for _ in range(arguments.pairs):
        by_one = time_together(partial(alone, x), first)
        speed_ups.append(by_one / time_together(partial(divided, x), all_ranks))
        contention.append(time_together(partial(alone, x), all_ranks) / by_one)
        fractions.append(measure_view_fraction(alone, x) if rank() == 0 else 0.0)
    if rank() == 0:
        fraction, speed_up = statistics.median(fractions), statistics.median(speed_ups)
        bound = 1 / (1 - fraction + fraction / world_size())
        print(f"fraction of a step that is divided          {fraction:7.3f}")
        print(f"Amdahl's bound on the speed-up              {bound:7.3f}, efficiency {bound / world_size():.3f}")
        print(
            f"speed-up on {world_size()} ranks                       {speed_up:7.3f}, "
            f"efficiency {speed_up / world_size():.3f}"
        )
        print(f"of the bound (goal 0.8)                     {speed_up / bound:7.3f}")
        print(f"a whole step on all ranks at once / on one  {statistics.median(contention):7.3f}")


if __name__ == "__main__":
    main()

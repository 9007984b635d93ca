"""How much faster a CoTTA step is when ranks divide its views: one thread each, against one process with one thread.

torchrun --nproc-per-node 2 benchmarks/distributed_views.py [--views 32] [--batch 200] [--pairs 5]

Ranks that wait hold no core. All figures are from one run, in turns, so that a noisy machine disturbs them alike; needs
as many quiet cores as ranks.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from measurements import seconds
from step_speed import cifar_batch
from torch import Tensor

import ctta
from ctta.distributed import all_gather, data_parallel, init, rank, world_size
from ctta.methods.cotta import CoTTA


def build(num_views: int) -> CoTTA:
    """With a gate that always opens."""
    net = ctta.models.embedded().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return CoTTA(net, threshold=1.0, views=ctta.views.image_views(num_views))


def together(call: Callable[[], object], ranks: range) -> float:
    """Seconds until the last of these ranks has done it, having begun together; the others wait."""
    all_gather(torch.zeros(1))
    spent = seconds(call) if rank() in ranks else 0.0
    return float(all_gather(torch.tensor([spent])).max())


def share_of_views(model: CoTTA, x: Tensor) -> float:
    """Of a step's time, what is spent on the views, which alone is divided."""
    predict_over_views, spent = CoTTA._predict_over_views, []

    def timed(self: CoTTA, x: Tensor) -> Tensor:
        answers: list[Tensor] = []
        spent.append(seconds(lambda: answers.append(predict_over_views(self, x))))
        return answers[0]

    with mock.patch.object(CoTTA, "_predict_over_views", timed):
        total = seconds(partial(model, x))
    return sum(spent) / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("views", 32), ("batch", 200), ("pairs", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    init()
    if world_size() == 1:
        parser.error("start it by torchrun --nproc-per-node 2")
    x = cifar_batch(asked.batch)
    alone, divided = build(asked.views), data_parallel(build(asked.views), shard="views")
    first, all_ranks = range(1), range(world_size())
    alone(x)
    divided(x)
    shares, speed_ups, crowding = [], [], []
    for _ in range(asked.pairs):
        by_one = together(partial(alone, x), first)
        speed_ups.append(by_one / together(partial(divided, x), all_ranks))
        crowding.append(together(partial(alone, x), all_ranks) / by_one)
        shares.append(share_of_views(alone, x) if rank() == 0 else 0.0)
    if rank() == 0:
        share, speed_up = statistics.median(shares), statistics.median(speed_ups)
        bound = 1 / (1 - share + share / world_size())
        print(f"share of a step that is divided             {share:7.3f}")
        print(f"Amdahl's bound on the speed-up              {bound:7.3f}, efficiency {bound / world_size():.3f}")
        print(
            f"speed-up on {world_size()} ranks                       {speed_up:7.3f}, "
            f"efficiency {speed_up / world_size():.3f}"
        )
        print(f"of the bound (goal 0.8)                     {speed_up / bound:7.3f}")
        print(f"a whole step on all ranks at once / on one  {statistics.median(crowding):7.3f}")


if __name__ == "__main__":
    main()

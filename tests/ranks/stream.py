"""A stream that ranks share, and its comparison with a single process."""

import importlib
import os
from dataclasses import astuple, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

import ctta
from ctta.distributed import check_consistent, rank, world_size
from ctta.testing import NETWORKS, ContractCase, select_networks
from ctta.testing.case import collect_state
from ctta.views import image_views

#: Where the stream is computed; :mod:`ranks.launch` sets it.
DEVICE = os.environ.get("CTTA_RANKS_DEVICE", "cpu")
if DEVICE == "sim":
    importlib.import_module("accelerator.collectives")
NUM_STEPS = 10
#: Rows of ranks 0, 1, 2 at each step: uneven, few, and none at all.
SIZES = [(3, 4, 1), (0, 5, 2), (2, 2, 2), (1, 3, 0), (4, 0, 0)]
VIEWS = {"views": image_views(3)}


@dataclass(frozen=True)
class Stream:
    """A method on a network in double precision, with settings, and what the ranks divide."""

    method: type[ctta.AdaptiveModel]
    network: str = "batch_norm"
    settings: dict[str, Any] = field(default_factory=dict)
    shard: Literal["batch", "views"] = "batch"

    def make_network(self) -> nn.Module:
        return self.make_case().make_network().to(DEVICE, torch.float64)

    def make_case(self) -> ContractCase:
        factories = NETWORKS | select_networks(self.method)
        return ContractCase(self.method, factories[self.network], self.settings)

    def make_model(self) -> ctta.AdaptiveModel:
        case, net = self.make_case(), self.make_network()
        stats = case.make_source_stats(net, dtype=torch.float64)
        return self.method(net, **stats, **self.settings)

    def make_batch(self, step: int) -> Tensor:
        """Return the whole batch of a step."""
        return make_batch(step, sum(SIZES[step % len(SIZES)][: world_size()]))

    def local_rows(self, step: int) -> slice:
        """Return the rows of a batch that this rank is called with."""
        if self.shard == "views":
            return slice(None)
        sizes = SIZES[step % len(SIZES)][: world_size()]
        return slice(sum(sizes[: rank()]), sum(sizes[: rank() + 1]))


def make_batch(number: int, size: int = 6) -> Tensor:
    """Return random images in double precision."""
    return ContractCase(ctta.Tent, NETWORKS["batch_norm"], {}).make_batch(number, size).to(DEVICE, torch.float64)


def assert_equals_single_process(
    stream: Stream, parallel: ctta.AdaptiveModel, alone: ctta.AdaptiveModel, steps: range = range(NUM_STEPS)
) -> None:
    """Compare some steps with other ranks and alone: logits, `last_step` and state are equal up to rounding."""
    for step in steps:
        x, rows = stream.make_batch(step), stream.local_rows(step)
        torch.testing.assert_close(parallel(x[rows]), alone(x)[rows], rtol=0, atol=1e-12)
        ours, theirs = (astuple(model.last_step) if model.last_step else () for model in (parallel, alone))
        for value, expected in zip(ours, theirs, strict=True):
            is_double = isinstance(expected, Tensor) and expected.dtype == torch.float64  # `augmented` is not
            # Relative to a loss above 1: ROID's sample weights reach exp(3).
            tolerance = (1e-12 if is_double else 1e-6) * max(1.0, abs(float(expected or 0)))
            assert value == expected or abs(value - expected) < tolerance
    # Adam divides by the size of a gradient, so where that is nothing but rounding, it grows by up to its eps of 1e-8.
    for value, expected in zip(collect_state(parallel), collect_state(alone), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)
    check_consistent(parallel)

"""Cases: steps on several ranks equal those of a single process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ctta
from ctta.core.parallel import current_reducer, replicated
from ctta.distributed import all_gather, check_consistent, data_parallel, rank, shard, world_size
from ctta.functional import (
    batch_sum,
    contrastive_loss,
    correct_prior,
    entropy,
    information_maximization,
    masked_mean,
    mean_probabilities,
    roid_weights,
    soft_likelihood_ratio,
    update_average_,
)
from ctta.testing import select_networks
from ctta.testing.case import collect_state
from ctta.views import image_views, multiscale_flip
from ranks import CASES, case
from ranks.stream import SIZES, VIEWS, Stream, assert_equals_single_process, make_batch

#: Fewer views; updates within a batch and across batches.
MEMORY = {"memory_size": 6, "update_every": 5}
SETTINGS: dict[str, dict[str, Any]] = {
    "cotta": VIEWS,
    "adacontrast": {"start_after": 6, "bank_size": 16, "queue_size": 16},
    "memo": VIEWS,
    "test_aug": VIEWS,
    "eta": {"margin": 0.99, "redundancy": 0.999},
    "eata": {"margin": 0.99, "redundancy": 0.999},
    "rdumb": {"margin": 0.99, "redundancy": 1.1, "period": 3},
    "sar": {"margin": 0.99},
    "deyo": {"select_below": 0.99, "min_drop": 0.0},
    "rotta": MEMORY,
    "petta": {"memory_size": 6},
    "note": MEMORY,
    "sotta": MEMORY | {"min_confidence": 0.25},
    "tribe": {"max_entropy": 0.99},
    "petal": VIEWS,
    "palm": {"views": image_views(1)},
    "tea": {"buffer_size": 16, "num_steps_langevin": 2},
    "foa": {"num_prompts": 1, "population": 4},
}
REPLAY = ctta.SourceReplay(make_batch(99, 9), torch.arange(9) % 5, batch_size=4)
POLICIES = [
    ctta.policies.restore(0.3),
    ctta.policies.restore_by_fisher(0.2),
    ctta.policies.average_with_source(0.9),
    ctta.policies.kalman(noise=20.0),
    ctta.policies.reset_every(25, "images"),
    ctta.policies.reset_on_low_entropy(0.99, "share"),
    ctta.policies.adaptive_reset(share=0.99),
]
ELEMENT = {"views": image_views(2), "gate": "element"}


def median_confidence(network: str, batch_stats: float) -> float:
    """Return a threshold between two of the source's confidences, far from each in terms of rounding."""
    stream = Stream(ctta.BNStats, network, {"batch_stats": batch_stats})
    ordered = ctta.functional.confidence(stream.make_model()(stream.make_batch(0))).flatten().sort().values
    middle = len(ordered) // 2
    return float(ordered[middle - 1 : middle + 1].mean())


def gated(network: str, settings: dict[str, Any], batch_stats: float = 1.0) -> Stream:
    """Return CoTTA with a gate that opens for about half of the elements."""
    threshold = {"threshold": median_confidence(network, batch_stats)}
    return Stream(ctta.CoTTA, network, settings | threshold | {"batch_stats": batch_stats})


class OutlierStream(Stream):
    """Batches with outliers: one row, then all rows of the first rank, then all of the last one."""

    def make_batch(self, step: int) -> Tensor:
        x, sizes = super().make_batch(step), SIZES[step % len(SIZES)][: world_size()]
        rows = [slice(0, 1), slice(0, sizes[0]), slice(sum(sizes[:-1]), None)][step % 3]
        x[rows, :, 3, 3] = -1e6
        return x


#: Every method on BatchNorm and LayerNorm, then everything else that is reduced over a batch.
STREAMS: dict[str, Callable[[], Stream]] = {
    **{
        f"{name}_{network}": partial(Stream, method, network, SETTINGS.get(name, {}))
        for name, method in ctta.METHODS.items()
        for network in ("batch_norm", "vit")
        if network in select_networks(method)
    },
    **{f"views_{network}": partial(Stream, ctta.CoTTA, network, VIEWS, "views") for network in ("batch_norm", "vit")},
    "batch_statistics": lambda: Stream(ctta.Tent, settings={"batch_stats": 1.0}),
    "blended_statistics": lambda: Stream(ctta.Tent, settings={"batch_stats": 0.3}),
    "views_at_once": lambda: Stream(ctta.TestAug, settings={"views": image_views(3), "views_at_once": 2}),
    "pixels": lambda: gated("segmentation", {"views": multiscale_flip((0.5, 1)), "gate": "element", "loss": "hard"}),
    "gated_rows": lambda: gated("batch_norm", ELEMENT, batch_stats=0.0),
    "gated_rows_paper": lambda: gated("vit", ELEMENT | {"predict_with": "teacher", "average": "probabilities"}),
    "note_iid": lambda: Stream(ctta.NOTE, settings=MEMORY | {"iid": True, "iabn": 0.5}),
    "replay": lambda: Stream(ctta.RMT, settings={"replay": REPLAY}),
    "policies": lambda: Stream(ctta.Tent, settings={"policies": POLICIES, "lr": 0.01}),
    "policies_vit": lambda: Stream(ctta.Tent, "vit", {"policies": POLICIES, "lr": 0.01}),
    "outliers": lambda: OutlierStream(ctta.VANE),
    "fewer_views_than_ranks": lambda: Stream(ctta.TestAug, settings={"views": image_views(1)}, shard="views"),
}


def _stream_case(make_stream: Callable[[], Stream]) -> Callable[[Path], None]:
    def check(folder: Path) -> None:
        stream = make_stream()
        parallel = data_parallel(stream.make_model(), shard=stream.shard, check_every=3)
        assert_equals_single_process(stream, parallel, stream.make_model())

    return check


CASES |= {f"equals_single_process_{name}": _stream_case(make_stream) for name, make_stream in STREAMS.items()}


@case
def the_same_ranks_give_bit_identical_results(folder: Path) -> None:
    stream = Stream(ctta.CoTTA, settings=VIEWS)
    one, other = (data_parallel(stream.make_model()) for _ in range(2))
    for step in range(5):
        x = stream.make_batch(step)[stream.local_rows(step)]
        assert torch.equal(one(x), other(x))
    for first, second in zip(collect_state(one), collect_state(other), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


class Standardize(nn.Module):
    """Divide each image by its own standard deviation, which is zero for a constant one."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.std((1, 2, 3), keepdim=True)


@case
def a_rank_without_rows_contributes_nothing(folder: Path) -> None:
    stream = Stream(ctta.Tent)
    parallel, alone = (ctta.Tent(nn.Sequential(Standardize(), stream.make_network())) for _ in range(2))
    assert_equals_single_process(stream, data_parallel(parallel), alone, range(3))


class MinimalMethod(ctta.AdaptiveModel):
    """A method that does not use the reducer: a plain mean, unused parameters, and the default predict_step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.student = self.copy_of_source()
        self.student.unused = nn.Linear(2, 2, dtype=torch.float64)
        self.optimize(self.student, torch.optim.Adam)

    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        self.minimize(ctta.functional.entropy(logits).mean())
        return logits


@case
def a_users_method_needs_no_changes(folder: Path) -> None:
    stream = Stream(MinimalMethod, "vit")
    parallel, alone = data_parallel(stream.make_model()), stream.make_model()
    assert isinstance(parallel, MinimalMethod) and isinstance(alone, MinimalMethod)
    alone.student.get_submodule("unused").load_state_dict(parallel.student.get_submodule("unused").state_dict())
    x, rows = stream.make_batch(0), stream.local_rows(0)
    expected = parallel.predict(x[rows])
    assert parallel.num_steps == 0
    assert torch.equal(parallel(x[rows]), expected)
    alone(x)
    assert_equals_single_process(stream, parallel, alone, range(1, 6))
    assert parallel.optimizer is not None and alone.optimizer is not None
    assert len(parallel.optimizer.state) == len(alone.optimizer.state) < len(list(parallel.student.parameters()))


class SelectiveMethod(ctta.AdaptiveModel):
    """A method that uses everything that is computed over a batch: selections, weights, averages and contrasts."""

    average: Tensor
    student: nn.Module

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.student = self.copy_of_source()
        self.optimize(self.student, torch.optim.Adam)
        self.register_buffer("average", torch.zeros(5))

    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        entropies, weights = entropy(logits), roid_weights(logits, self.average)
        mean = current_reducer().mean(entropies.detach().mean())
        is_reliable = entropies < mean  # an uneven number on each rank, often none
        views = torch.stack([logits, self.student(x.flip(-1)), self.source(x)], 1)
        loss = masked_mean(weights * entropies, is_reliable) + information_maximization(logits)
        loss = loss + batch_sum(soft_likelihood_ratio(logits) * weights) / 64 + contrastive_loss(views)
        if self.minimize(loss, selected=is_reliable):
            update_average_(self.average, mean_probabilities(logits.detach(), is_reliable))
        batch = current_reducer()
        return batch.local(batch.gather(correct_prior(logits.detach())).cumsum(0))


@case
def selections_over_the_batch_equal_those_of_one_process(folder: Path) -> None:
    stream = Stream(SelectiveMethod, "vit")
    assert_equals_single_process(stream, data_parallel(stream.make_model()), stream.make_model())


class SelectsNothing(SelectiveMethod):
    """Learns from nothing on some ranks, and on odd steps from nothing at all; climbs before it descends."""

    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        is_selected = torch.full((len(x),), self.num_steps % 2 == 0 and rank() == 0)

        def compute_second_loss() -> tuple[Tensor, Tensor]:
            return masked_mean(entropy(self.student(x)), is_selected), is_selected

        loss = masked_mean(entropy(logits), is_selected)
        self.minimize_sharpness(loss, compute_second_loss, radius=0.05, selected=is_selected)
        return logits


@case
def ranks_agree_that_nothing_was_selected(folder: Path) -> None:
    stream = Stream(SelectsNothing)
    model = data_parallel(SelectsNothing(stream.make_network()))
    for step in range(6):
        before = collect_state(model.student)
        model(stream.make_batch(step)[stream.local_rows(step)])
        assert model.last_step is not None and not model.last_step.skipped
        num_selected = len(range(*stream.local_rows(step).indices(99))) if rank() == 0 else None
        assert model.last_step.updated == (not all(map(torch.equal, collect_state(model.student), before)))
        assert num_selected is None or model.last_step.updated == (step % 2 == 0 and num_selected > 0)
    check_consistent(model)


class LearnsFromMemory(ctta.AdaptiveModel):
    """Learns from the rows of the last batch, which every rank holds."""

    memory: Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.student = self.copy_of_source()
        self.optimize(self.student, torch.optim.Adam)
        self.register_buffer("memory", torch.zeros(4, 3, 16, 16, dtype=torch.float64))

    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        self.memory.copy_(torch.cat([self.memory, current_reducer().gather(x)])[-4:])
        with replicated():
            self.minimize(entropy(self.student(self.memory)).mean())
        return logits


@case
def a_memory_is_learned_from_alike_on_every_rank(folder: Path) -> None:
    stream = Stream(LearnsFromMemory)
    assert_equals_single_process(stream, data_parallel(stream.make_model()), stream.make_model())


@case
def reset_and_fork_stay_parallel(folder: Path) -> None:
    stream = Stream(ctta.Tent)
    model = data_parallel(stream.make_model())
    model(stream.make_batch(0)[stream.local_rows(0)])
    assert_equals_single_process(stream, model.reset(), stream.make_model(), range(2))
    assert_equals_single_process(stream, model.fork(), stream.make_model(), range(2))


@case
def a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(folder: Path) -> None:
    stream = Stream(ctta.Tent, "vit")
    model = data_parallel(stream.make_model())
    x = shard(stream.make_batch(0)).clone()
    if rank() == 1:
        x *= 1e300
    logits = model(x)
    assert bool(logits.isfinite().all()) == (rank() != 1)
    assert model.num_skipped == 1 and model.last_step is not None and model.last_step.skipped
    check_consistent(model)


@case
def rows_are_sharded_and_gathered_in_order(folder: Path) -> None:
    x = torch.arange(7 * 2).view(7, 2)
    assert torch.equal(all_gather(shard(x)), x)
    assert torch.equal(all_gather(shard(x[:1])), x[:1])

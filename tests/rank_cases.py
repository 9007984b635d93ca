"""What every rank of a world does in tests: all cases in one process, since starting processes is what takes long.

Run as a script by each rank with a folder, in which it leaves what went wrong, by the name of the case.
"""

import contextlib
import io
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from command_line import write_images
from torch import Tensor, nn

import ctta
from ctta.distributed import DistributedError, all_gather, check_consistent, data_parallel, rank, shard, world_size
from ctta.evaluation.label_maps import load_label_maps
from ctta.evaluation.results import BatchRecord
from ctta.inference import adapt_folder
from ctta.streams import Segment
from ctta.testing import NETWORKS, ContractCase
from ctta.testing.case import state_of
from ctta.views import image_views, multiscale_flip

STEPS = 10
#: Rows of ranks 0, 1, 2 at each step: uneven, short, and none at all.
SIZES = [(3, 4, 1), (0, 5, 2), (2, 2, 2), (1, 3, 0), (4, 0, 0)]
VIEWS = {"views": image_views(3)}
ELEMENT = {"views": image_views(2), "gate": "element"}

CASES: dict[str, Callable[[Path], None]] = {}


def case(check: Callable[[Path], None]) -> Callable[[Path], None]:
    CASES[check.__name__] = check
    return check


@dataclass(frozen=True)
class Stream:
    """A method on a network in double precision, with settings, and how the ranks divide the work."""

    method: type[ctta.AdaptiveModel]
    network: str = "batch_norm"
    settings: dict[str, Any] = field(default_factory=dict)
    divide: str = "batch"

    def net(self) -> nn.Module:
        return ContractCase(self.method, NETWORKS[self.network], {}).make_network().double()

    def model(self) -> ctta.AdaptiveModel:
        return self.method(self.net(), **self.settings)

    def batch(self, step: int) -> Tensor:
        rows = sum(SIZES[step % len(SIZES)][: world_size()])
        return ContractCase(self.method, NETWORKS[self.network], {}).make_batch(step, rows).double()

    def rows(self, step: int) -> slice:
        if self.divide == "views":
            return slice(None)
        sizes = SIZES[step % len(SIZES)][: world_size()]
        return slice(sum(sizes[: rank()]), sum(sizes[: rank() + 1]))


def unsure_half(network: str, batch_stats: float) -> float:
    """A threshold that lies between the source's confidences, far from each as rounding goes."""
    stream = Stream(ctta.BNStats, network, {"batch_stats": batch_stats})
    ordered = ctta.functional.confidence(stream.model()(stream.batch(0))).flatten().sort().values
    middle = len(ordered) // 2
    return float(ordered[middle - 1 : middle + 1].mean())


def streams() -> dict[str, Stream]:
    """Every method on BatchNorm and LayerNorm, then what else there is to reduce over a batch."""
    found = {
        f"{name} {network}": Stream(method, network, VIEWS if name in ("cotta", "test_aug") else {})
        for name, method in ctta.METHODS.items()
        for network in ("batch_norm", "vit")
    }
    for network in ("batch_norm", "vit"):
        found[f"views {network}"] = Stream(ctta.CoTTA, network, VIEWS, "views")
    dense = {"views": multiscale_flip((0.5, 1)), "gate": "element", "loss": "hard"}
    rows_only = ELEMENT | {"batch_stats": 0.0, "threshold": unsure_half("batch_norm", 0.0)}
    paper = ELEMENT | {"predict_with": "teacher", "average": "probabilities"}
    return found | {
        "blended": Stream(ctta.Tent, settings={"batch_stats": 0.3}),
        "views at once": Stream(ctta.TestAug, settings={"views": image_views(3), "views_at_once": 2}),
        "pixels": Stream(ctta.CoTTA, "segmentation", dense | {"threshold": unsure_half("segmentation", 1.0)}),
        "only unsure rows": Stream(ctta.CoTTA, settings=rows_only),
        "only unsure rows, paper": Stream(ctta.CoTTA, "vit", paper | {"threshold": unsure_half("vit", 1.0)}),
        "fewer views than ranks": Stream(ctta.TestAug, settings={"views": image_views(1)}, divide="views"),
    }


def assert_as_by_itself(
    stream: Stream, parallel: ctta.AdaptiveModel, alone: ctta.AdaptiveModel, steps: range = range(STEPS)
) -> None:
    """Some steps with others and by oneself: the same answers, figures and state, but for rounding."""
    for step in steps:
        x, rows = stream.batch(step), stream.rows(step)
        torch.testing.assert_close(parallel(x[rows]), alone(x)[rows], rtol=0, atol=1e-12)
        ours, theirs = (model.last_step and astuple(model.last_step) for model in (parallel, alone))
        for figure, expected in zip(ours or (), theirs or (), strict=True):
            exact = isinstance(expected, Tensor) and expected.dtype == torch.float64  # the share of views is not
            assert figure == expected or abs(figure - expected) < (1e-12 if exact else 1e-6)
    # Adam divides by the size of a gradient, so where that is nothing but rounding, it grows by up to its eps of 1e-8.
    for ours, theirs in zip(state_of(parallel), state_of(alone), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    check_consistent(parallel)


@case
def the_same_ranks_give_the_same_bits_again(_folder: Path) -> None:
    stream = Stream(ctta.CoTTA, settings=VIEWS)
    one, other = (data_parallel(stream.model()) for _ in range(2))
    for step in range(5):
        x = stream.batch(step)[stream.rows(step)]
        assert torch.equal(one(x), other(x))
    for first, second in zip(state_of(one), state_of(other), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@case
def every_stream_is_as_on_one_process(folder: Path) -> None:
    for name, stream in streams().items():
        parallel = data_parallel(stream.model(), shard=stream.divide, check_every=3)  # type: ignore[arg-type]
        try:
            assert_as_by_itself(stream, parallel, stream.model())
        except AssertionError as error:
            error.add_note(name)
            raise


class Standardised(nn.Module):
    """Divides each image by its own deviation, which a blank one has none of."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.std((1, 2, 3), keepdim=True)


@case
def a_rank_without_rows_puts_nothing_of_its_own_in(folder: Path) -> None:
    stream = Stream(ctta.Tent)
    parallel = data_parallel(ctta.Tent(nn.Sequential(Standardised(), stream.net())))
    assert_as_by_itself(stream, parallel, ctta.Tent(nn.Sequential(Standardised(), stream.net())), range(3))


class OfOnesOwn(ctta.AdaptiveModel):
    """Knows nothing of ranks: a mean of its own, parameters that are never used, and the usual predict_step."""

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
def a_method_of_ones_own_needs_nothing(folder: Path) -> None:
    stream = Stream(OfOnesOwn, "vit")
    parallel, alone = data_parallel(stream.model()), stream.model()
    alone.student.unused.load_state_dict(parallel.student.unused.state_dict())
    x, rows = stream.batch(0), stream.rows(0)
    expected = parallel.predict(x[rows])
    assert parallel.num_steps == 0
    assert torch.equal(parallel(x[rows]), expected)
    alone(x)
    assert_as_by_itself(stream, parallel, alone, range(1, 6))
    assert len(parallel.optimizer.state) == len(alone.optimizer.state) < len(list(parallel.student.parameters()))


@case
def all_start_from_the_first_ranks_state(folder: Path) -> None:
    stream = Stream(ctta.Tent)
    net = stream.net()
    with torch.no_grad():
        net[0].weight.add_(rank())
    model = ctta.Tent(net)
    if rank() == 0:
        model(stream.batch(0))  # so that its optimiser has a state, and the others' have none
    check_consistent(data_parallel(model))
    assert model.num_steps == 1
    assert torch.equal(model.source[0].weight, stream.net()[0].weight)
    with pytest.raises(DistributedError, match="rank 1 differs from rank 0 in the settings"):
        data_parallel(ctta.CoTTA(stream.net(), seed=rank()))


@case
def reset_and_fork_stay_with_the_others(folder: Path) -> None:
    stream = Stream(ctta.Tent)
    model = data_parallel(stream.model())
    model(stream.batch(0)[stream.rows(0)])
    assert_as_by_itself(stream, model.reset(), stream.model(), range(2))
    assert_as_by_itself(stream, model.fork(), stream.model(), range(2))


@case
def a_bad_batch_on_one_rank_is_refused_by_all(folder: Path) -> None:
    stream = Stream(ctta.Tent)
    model = data_parallel(stream.model())
    before = state_of(model)
    x = shard(stream.batch(0)).clone()
    if rank() == 1:
        x[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN" if rank() == 1 else "rank 1 was given a bad batch"):
        model(x)
    with pytest.raises(ValueError, match="different shapes"):
        model(torch.rand(2, 3, 16, 16 + rank()).double())
    assert all(map(torch.equal, state_of(model), before))
    empty = x[:0]
    assert model(empty) is empty and model.num_steps == 0
    model(shard(stream.batch(0)))


@case
def dividing_views_takes_the_whole_batch(folder: Path) -> None:
    stream = Stream(ctta.CoTTA, settings=VIEWS)
    model = data_parallel(stream.model(), shard="views")
    with pytest.raises(ValueError, match=r"call model\(x\), not model\(shard\(x\)\)"):
        model(stream.batch(0)[rank() : rank() + 2])
    assert model.num_steps == 0


@case
def a_guard_is_refused(folder: Path) -> None:
    stream = Stream(ctta.Tent)
    for build in (
        lambda: data_parallel(ctta.Guarded(stream.model())),
        lambda: ctta.Guarded(data_parallel(stream.model())),
    ):
        with pytest.raises(ValueError, match="by the rows of its own process"):
            build()


@case
def a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(folder: Path) -> None:
    stream = Stream(ctta.Tent, "vit")
    model = data_parallel(stream.model())
    x = shard(stream.batch(0)).clone()
    if rank() == 1:
        x *= 1e300
    answer = model(x)
    assert answer.isfinite().all() == (rank() != 1)
    assert model.num_skipped == 1 and model.last_step is not None and model.last_step.skipped
    check_consistent(model)


@case
def drifting_apart_stops_all(folder: Path) -> None:
    stream = Stream(ctta.Tent)
    model = data_parallel(stream.model(), check_every=2)
    if rank() == 1:
        with torch.no_grad():
            model.student[1].weight[0] += 1e-15
    with pytest.raises(DistributedError, match="after 0 steps rank"):
        model(shard(stream.batch(0)))


@case
def a_frozen_model_is_not_compared_at_every_call(folder: Path) -> None:
    stream = Stream(ctta.Tent)
    model = data_parallel(stream.model()).freeze()
    with mock.patch("ctta.distributed.consistency.sum_bits", side_effect=AssertionError):
        model(shard(stream.batch(0)))


@case
def slices_are_compared_too(folder: Path) -> None:
    net = Stream(ctta.Tent).net()
    net.register_buffer("mask", torch.ones(9, dtype=torch.bool)[1:])
    model = data_parallel(ctta.Tent(net))
    check_consistent(model)
    if rank() == 1:
        model.source.mask[3] = False
    with pytest.raises(DistributedError, match="holds different weights"):
        check_consistent(model)


@case
def rows_are_cut_and_gathered_in_order(folder: Path) -> None:
    x = torch.arange(7 * 2).view(7, 2)
    assert torch.equal(all_gather(shard(x)), x)
    assert torch.equal(all_gather(shard(x[:1])), x[:1])


@case
def a_stream_goes_on_on_another_number_of_ranks(folder: Path) -> None:
    """The file comes from whoever was at it before; a process by itself checks the end."""
    stream, path = Stream(ctta.CoTTA, settings=VIEWS), folder / "stream.safetensors"
    loaded = ctta.load(path, stream.net()) if path.exists() else stream.model()
    model = data_parallel(loaded)
    for number in range(model.num_steps, model.num_steps + 3):
        model(shard(ContractCase(ctta.CoTTA, NETWORKS["batch_norm"], {}).make_batch(number).double()))
    check_consistent(model)  # so that nobody is still reading the file
    ctta.save(model, path)


@dataclass(frozen=True)
class Scenes:
    """Random scenes with label maps."""

    name: str
    labels = None

    def __len__(self) -> int:
        return 5

    def read(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        generators = [torch.Generator().manual_seed(len(self.name) * 100 + row) for row in rows.tolist()]
        pictures = [torch.rand(3, 16, 16, generator=generator) for generator in generators]
        maps = [torch.randint(5, (16, 16), generator=generator) for generator in generators]
        return torch.stack(pictures).double(), torch.stack(maps)


@case
def an_evaluation_that_was_stopped_ends_as_on_one_process(folder: Path) -> None:
    segments = [Segment(name, Scenes(name), np.arange(5)) for name in ("fog", "night")]
    scenes = ctta.streams.Stream("scenes", segments, batch_size=3)
    stream = Stream(ctta.CoTTA, "segmentation", {"views": multiscale_flip((0.5, 1))})
    alone = ctta.evaluate(stream.model(), scenes, folder=folder / f"alone-{world_size()}-{rank()}")

    def stop(record: BatchRecord) -> None:
        raise KeyboardInterrupt

    shared = folder / f"shared-{world_size()}"
    with pytest.raises(KeyboardInterrupt):
        ctta.evaluate(data_parallel(stream.model()), scenes, folder=shared, on_batch=stop)
    result = ctta.evaluate(data_parallel(stream.model()), scenes, folder=shared)
    assert result.is_complete and result.mious == alone.mious
    check_consistent(data_parallel(stream.model()))  # which also waits until the first rank has written all
    kept, expected = (load_label_maps(place, 1).maps for place in (shared, folder / f"alone-{world_size()}-{rank()}"))
    assert np.array_equal(kept, expected)
    with pytest.raises(ValueError if rank() == 0 else DistributedError, match="another"):
        ctta.evaluate(data_parallel(ctta.Tent(stream.net())), scenes, folder=shared)


def command(*arguments: object) -> str:
    """What ``ctta`` prints on this rank."""
    from ctta.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([str(argument) for argument in arguments])
    return printed.getvalue()


@case
def the_command_gives_what_one_process_gives(folder: Path) -> None:
    arguments = json.loads((folder / "commands.json").read_text())
    for name, words in arguments.items():
        printed = command(*words)
        assert bool(printed) == (rank() == 0)
        if rank() == 0:
            (folder / f"{name}.printed").write_text(printed)


@case
def pictures_that_come_meanwhile_are_left_for_the_next_time(folder: Path) -> None:
    pictures, out = folder / f"seen-by-{world_size()}", folder / f"seen-by-{world_size()}.csv"
    if rank() == 0:
        write_images(pictures, range(3))
    check_consistent(data_parallel(Stream(ctta.Tent).model()))  # until the pictures are there
    found = sorted(pictures.rglob("*.png"))
    only_here = [found[0].with_name("0.png"), *found]  # as if it had come after the first rank looked
    listing = mock.patch("ctta.inference.folder.find_images", lambda root: only_here if rank() else found)
    with listing:
        done = adapt_folder(
            ContractCase(ctta.Tent, NETWORKS["batch_norm"], {}).make_network(), pictures, out, method="tent"
        )
    assert done.num_images == 3


@case
def a_killed_rank_ends_the_others_with_an_error(folder: Path) -> None:
    stream = Stream(ctta.Tent)
    model = data_parallel(stream.model())
    model(shard(stream.batch(2)))
    if rank() == world_size() - 1:
        (folder / f"rank{rank()}.json").write_text("{}")
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DistributedError, match="this rank has lost the others"):
        model(shard(stream.batch(2)))
    ctta.distributed.shutdown()
    with pytest.raises(DistributedError, match="process group was shut down"):
        data_parallel(stream.model())


def run(names: list[str], folder: Path) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    ctta.distributed.init(300)
    number, failures = rank(), {}
    for name in names:
        try:
            CASES[name](folder)
        except BaseException:
            failures[name] = traceback.format_exc()
            break  # this rank is no longer where the others are
    (folder / f"rank{number}.json").write_text(json.dumps(failures))


if __name__ == "__main__":
    run(sys.argv[2:], Path(sys.argv[1]))

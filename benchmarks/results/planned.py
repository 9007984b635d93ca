"""The results of docs/results: what each shows, the command that measures it, and what that costs."""

import shlex
from dataclasses import dataclass

#: The rows of the paper, CoTTA's teacher alone, and the default of this library; the fast ones first.
PAPER_ROWS = "source,bn_stats,pseudo_label,tent_online,tent,cotta_weight_average,vane,cotta"
#: The same with CoTTA that restores nothing, the last row of the paper's ablation.
FULL_ROWS = PAPER_ROWS.replace("cotta_weight_average", "cotta_weight_average,cotta_view_average")


@dataclass(frozen=True)
class PlannedResult:
    """A result and how it is measured.

    Attributes:
        about: What it shows.
        commands: Commands, as the page of the result shows them; ``CIFAR`` stands for the folder of the images.
        core_hours: Expected hours of one core.
        run: Folder of the run within the folder that ``ctta`` is told to write to; None if the last command writes
            docs/results by itself.
    """

    about: str
    commands: tuple[str, ...]
    core_hours: float
    run: str | None = ""

    @property
    def needs_cifar(self) -> bool:
        """Whether it needs the images of CIFAR-10."""
        return any("CIFAR" in shlex.split(command) for command in self.commands)


def bench(arguments: str) -> tuple[str, ...]:
    """Return the command of a benchmark with one thread per cell, which makes it reproducible."""
    return (f"ctta bench {arguments} --threads 1",)


#: Expected hours follow from milliseconds per image on one core: Source and BN Stats 1.3, TENT and Pseudo-label 2.5,
#: weight-avg 5, VANE 7.6, CoTTA.fast 13.4 and CoTTA with 32 views 40.7; about 3.7 times as much for the wide network.
PLANNED: dict[str, PlannedResult] = {
    "demo": PlannedResult("what `ctta demo` shows", ("ctta demo",), 0.05, run="demo"),
    "full": PlannedResult(
        "the paper's first table at full length: 15 x 10,000 images, batches of 200, one seed",
        bench(f"embedded --data CIFAR --methods {FULL_ROWS} --seeds 1"),
        4.4,
    ),
    "visits": PlannedResult(
        "the corruptions 20 times over, 500 images each, batches of 100, 1,500 steps, one seed",
        bench(
            "embedded --rounds 20 --limit 500 --batch-size 100 --methods "
            "source,bn_stats,tent,cotta_weight_average,vane,cotta_fast --seeds 1"
        ),
        1.3,
    ),
    "wide": PlannedResult(
        "the rows of full on the wide network: 15 x 400 images, batches of 200, one seed",
        bench(f"embedded --model file:benchmarks/networks/load.py:wide --limit 400 --methods {PAPER_ROWS} --seeds 1"),
        0.4,
    ),
    "embedded": PlannedResult(
        "the paper's first table and its ablation in small batches: 15 x 500 images, 150 steps, three seeds",
        bench(
            "embedded --limit 500 --batch-size 50 --methods "
            "source,bn_stats,pseudo_label,tent_online,tent,cotta_weight_average,cotta_view_average,cotta --seeds 1-3"
        ),
        0.55,
    ),
    "ten-rounds": PlannedResult(
        "ten times 15 x 200 images, 600 steps, 8 views",
        bench(
            "embedded --limit 200 --batch-size 50 --rounds 10 --methods cotta,tent,pseudo_label,bn_stats,source "
            "--set cotta.views=8 --seeds 1"
        ),
        0.17,
    ),
    "gradual": PlannedResult(
        "severity rises and falls: 131 x 100 images, 262 steps, 8 views, order 0",
        bench(
            "embedded-gradual --limit 100 --batch-size 50 --methods cotta,tent,pseudo_label,bn_stats,source "
            "--set cotta.views=8 --orders 0 --seeds 1"
        ),
        0.08,
    ),
    "ccc": PlannedResult(
        "CCC: snow turns into fog, motion blur and gaussian noise, 20,000 images, 400 steps, one seed",
        bench("ccc --methods source,bn_stats,tent,rdumb,vane,cotta_fast --seeds 1"),
        0.25,
    ),
    "streets": PlannedResult(
        "fog, night, rain and snow on drawn streets, 5 scenes each, ten rounds, 200 steps; no BatchNorm",
        bench("streets --limit 5"),
        0.12,
    ),
    "streets-bn": PlannedResult(
        "streets with a convolutional network that has BatchNorm",
        bench("streets --limit 5 --model file:benchmarks/networks/load.py:streets_bn"),
        0.12,
    ),
    "all-methods": PlannedResult(
        "every method on 15 x 2,000 images",
        (*bench("embedded --methods all"), "python -m benchmarks.results.all_methods RUN"),
        20.0,
        run=None,
    ),
    "matrix": PlannedResult(
        "which method for which stream: eleven methods on every protocol, against Source",
        (*bench("matrix"), "python -m benchmarks.results.matrix RUN"),
        1.0,
        run=None,
    ),
    "views": PlannedResult("CoTTA by its views", ("python -m benchmarks.choose.error_by_views",), 2.0, run=None),
    "guards": PlannedResult(
        "failing streams with and without a guard",
        (
            "python -m benchmarks.results.guard_report run --work RUN",
            "python -m benchmarks.results.guard_report show --work RUN",
        ),
        1.0,
        run=None,
    ),
}

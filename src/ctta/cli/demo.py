"""``ctta demo``: a first benchmark, with a network and images that come with the library."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from ctta.benchmark import BenchmarkOptions, ProcessExecutor, plan
from ctta.benchmark.recipes.paper import METHODS
from ctta.cli.console import print_text
from ctta.cli.results import run_and_report

#: Recipe and options by the name of the run folder.
SHORT = {"demo": ("demo", BenchmarkOptions())}
FULL = {
    "full": ("embedded", BenchmarkOptions()),
    "ten-rounds": ("embedded", BenchmarkOptions(rounds=10, limit=200, batch_size=50)),
}


def demo(
    full: Annotated[
        bool,
        typer.Option("--full", help="2,000 images per corruption with the paper's settings, and ten rounds (hours)."),
    ] = False,
    folder: Annotated[Path, typer.Option("--out", help="Folder for the runs and the report.", metavar="DIR")] = Path(
        "runs/demo"
    ),
) -> None:
    """Compare seven methods on fifteen corruptions, with a small network that comes with the library.

    After Ctrl-C, run the same command again to resume.
    """
    print_text("A ResNet-20 trained on clean CIFAR-10 images sees 15 corruptions, one after the other.\n")
    runs = [
        plan(
            folder / name,
            recipe,
            options,
            methods=METHODS[::-1],  # the slowest first, so that no core idles at the end
            seeds=[1],
            threads=1,  # two small cells side by side are faster than one on two cores
            command=shlex.join(["ctta", *sys.argv[1:]]),
        )
        for name, (recipe, options) in (FULL if full else SHORT).items()
    ]
    executor = ProcessExecutor(torch.get_num_threads())
    run_and_report(runs, executor, report=folder / ("report-full" if full else "report"))

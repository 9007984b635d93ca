"""``ctta demo``: what a newcomer runs first."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from ctta.benchmark import Processes, plan
from ctta.benchmark.recipes import Options
from ctta.benchmark.recipes.rows import METHODS
from ctta.cli.console import out
from ctta.cli.running import run_and_report

#: The recipe and its options by the name of the run's folder.
SHORT = {"demo": ("demo", Options())}
FULL = {
    "full": ("embedded", Options()),
    "ten-rounds": ("embedded", Options(rounds=10, limit=200, batch_size=50)),
}


def demo(
    full: Annotated[
        bool, typer.Option("--full", help="2,000 images each with the paper's settings, and ten rounds (hours).")
    ] = False,
    folder: Annotated[Path, typer.Option("--out", help="Where the runs and the report go.")] = Path("runs/demo"),
) -> None:
    """Watch seven methods meet fifteen corruptions: a small network and its images come with the library.

    Stopped, the same command goes on where it was.
    """
    out.print("A ResNet-20 trained on clean CIFAR-10 photographs meets 15 corruptions, one after the other.\n")
    runs = [
        plan(
            folder / name,
            recipe,
            options,
            methods=METHODS[::-1],  # the slowest first, so that no core waits for it at the end
            seeds=[1],
            threads=1,  # two small cells side by side are faster than one on two cores
            command=shlex.join(["ctta", *sys.argv[1:]]),
        )
        for name, (recipe, options) in (FULL if full else SHORT).items()
    ]
    run_and_report(runs, Processes(torch.get_num_threads()), report=folder / ("report-full" if full else "report"))

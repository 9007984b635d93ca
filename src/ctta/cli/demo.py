"""``ctta demo``: a first benchmark, with a network and images that come with the library."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from ctta import benchmark
from ctta.benchmark import BenchmarkOptions
from ctta.benchmark.recipes.paper import METHODS
from ctta.cli.console import exit_on_interrupt, print_text, progress_bar
from ctta.cli.results import exit_on_failures, print_failure, print_results
from ctta.report import write_report

#: Recipe and options by the name of the run folder.
SHORT = {"demo": ("demo", BenchmarkOptions())}
FULL = {
    "full": ("embedded", BenchmarkOptions()),
    "ten-rounds": ("embedded", BenchmarkOptions(rounds=10, limit=200, batch_size=50)),
}


def demo(
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Run 2,000 images per corruption with the paper's settings, and ten rounds (hours)."
        ),
    ] = False,
    folder: Annotated[
        Path, typer.Option("--out", help="Write the runs and the report to this folder.", metavar="DIR")
    ] = Path("runs/demo"),
) -> None:
    """Compare seven methods on fifteen corruptions, with a small network that comes with the library.

    After Ctrl-C, run the same command again to resume.
    """
    print_text("A ResNet-20 trained on clean CIFAR-10 images sees 15 corruptions, one after the other.\n")
    results = []
    for name, (recipe, options) in (FULL if full else SHORT).items():
        with exit_on_interrupt(), progress_bar(name) as update:
            result = benchmark.run(
                recipe,
                methods=METHODS[::-1],  # the slowest first, so that no core idles at the end
                seeds=[1],
                model=options.model,
                limit=options.limit,
                batch_size=options.batch_size,
                rounds=options.rounds,
                folder=folder / name,
                workers=torch.get_num_threads(),
                threads=1,  # two small cells side by side are faster than one on two cores
                report=False,
                command=shlex.join(["ctta", *sys.argv[1:]]),
                on_progress=update,
                on_outcome=print_failure,
            )
        print_results(result)
        results.append(result)
    if any(result.results for result in results):
        folders, out = [result.run.folder for result in results], folder / ("report-full" if full else "report")
        with exit_on_interrupt(), progress_bar("reading") as update:
            page = write_report(folders, out, on_progress=update)
        print_text(f"Report: {page}")
    exit_on_failures(results)

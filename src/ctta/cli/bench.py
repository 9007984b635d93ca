"""``ctta bench``: run a benchmark."""

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ctta import benchmark
from ctta.benchmark.recipes import Preset
from ctta.cli.console import exit_on_interrupt, interrupt_between_steps, progress_bar
from ctta.cli.options import InsecureOption, parse_names, parse_orders, parse_seeds
from ctta.cli.results import exit_on_failures, print_failure, print_results

# Panel of ``ctta bench --help``.
EXECUTION = "Execution"


def bench(
    recipe: Annotated[str, typer.Argument(help="Benchmark to run; for a list see: ctta recipes", metavar="RECIPE")],
    methods: Annotated[
        str | None, typer.Option(help="Methods to run, such as source,tent,cotta.", metavar="NAMES")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Random seeds, such as 1,2,3 or 1-5.", metavar="LIST")] = None,
    orders: Annotated[
        str | None,
        typer.Option(help="Orders of the corruptions: standard, all, or numbers such as 0-3.", metavar="LIST"),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images per batch.", metavar="N")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N images of each segment.", metavar="N")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Repeat the stream N times.", metavar="N")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Hyperparameter of a method, such as cotta.restore=0.005; repeatable.",
            metavar="METHOD.NAME=VALUE",
        ),
    ] = None,
    preset: Annotated[
        Preset, typer.Option(help="CoTTA as in the reference implementation, or as in the text of the paper.")
    ] = "official",
    model: Annotated[
        str | None,
        typer.Option(
            help="Network to use instead of the recipe's: timm:NAME, hf:NAME, torchvision:NAME or "
            "file:PATH.py:function.",
            metavar="SPEC",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--data", help="Folder of the dataset. Default: the cache of 'ctta data get'.", metavar="DIR"),
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Download missing data and weights.")] = False,
    insecure: InsecureOption = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder. Default: one below runs/, the same for the same options.", metavar="DIR"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per cell instead of tables.")] = False,
    device: Annotated[
        str,
        typer.Option(help="Torch device, such as cpu or cuda:0.", metavar="DEVICE", rich_help_panel=EXECUTION),
    ] = "cpu",
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            help="Run cells in N processes; 0 runs them in this one.",
            metavar="N",
            rich_help_panel=EXECUTION,
        ),
    ] = 0,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Run cells on a Ray cluster: its address, auto, or local.",
            metavar="ADDRESS",
            rich_help_panel=EXECUTION,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="CPU threads per cell; results are reproducible for the same number only.",
            metavar="N",
            rich_help_panel=EXECUTION,
        ),
    ] = None,
    save_every: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds between two checkpoints of a cell.",
            metavar="SECONDS",
            rich_help_panel=EXECUTION,
        ),
    ] = 20.0,
) -> None:
    """Run methods over a benchmark stream and write the results as a resumable run folder.

    After a kill or Ctrl-C, run the same command again to resume: the results
    are identical to those of an uninterrupted run.
    """
    with ExitStack() as stack:
        stack.enter_context(exit_on_interrupt())
        update = stack.enter_context(progress_bar(recipe))
        executor = None
        if not workers and ray is None:
            raise_if_interrupted = stack.enter_context(interrupt_between_steps())
            executor = benchmark.SerialExecutor(lambda _record: raise_if_interrupted())
        result = benchmark.run(
            recipe,
            methods=None if methods is None else parse_names(methods),
            seeds=None if seeds is None else parse_seeds(seeds),
            orders=None if orders is None else parse_orders(orders),
            data=folder,
            model=model,
            preset=preset,
            limit=limit,
            batch_size=batch_size,
            rounds=rounds,
            settings=settings or (),
            device=device,
            folder=out,
            workers=workers,
            ray=ray,
            executor=executor,
            threads=threads,
            save_every=save_every,
            download=download,
            insecure=insecure,
            command=shlex.join(["ctta", *sys.argv[1:]]),
            on_progress=update,
            on_outcome=print_failure,
        )
    print_results(result, as_json=as_json)
    exit_on_failures([result])

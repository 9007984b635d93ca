"""``ctta bench``: run a benchmark."""

import hashlib
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from ctta import datasets
from ctta.benchmark import BenchmarkOptions, Executor, ProcessExecutor, RayExecutor, build_task, plan
from ctta.benchmark.recipes import Preset
from ctta.cli.options import absolute_spec, parse_names, parse_orders, parse_seeds
from ctta.cli.results import run_and_report

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
            "file:PATH.py:FUNCTION.",
            metavar="SPEC",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--data", help="Folder of the dataset. Default: the cache of 'ctta data get'.", metavar="DIR"),
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Download missing data and weights.")] = False,
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
    options = BenchmarkOptions(
        data=None if folder is None else str(folder.absolute()),
        model=absolute_spec(model),
        preset=preset,
        limit=limit,
        batch_size=batch_size,
        rounds=rounds,
        settings=tuple(settings or ()),
        device=device,
    )
    threads = threads or max(1, torch.get_num_threads() // max(1, workers))
    if download:
        for name in build_task(recipe, options).downloads:
            datasets.download(name)
    place = out or Path("runs") / f"{recipe}-{_digest(options, threads)}"
    run = plan(
        place,
        recipe,
        options,
        methods=None if methods is None else parse_names(methods),
        orders=None if orders is None else parse_orders(orders),
        seeds=None if seeds is None else parse_seeds(seeds),
        threads=threads,
        save_every=save_every,
        command=shlex.join(["ctta", *sys.argv[1:]]),
    )
    elsewhere: Executor | None = ProcessExecutor(workers) if workers else None
    if ray is not None:
        elsewhere = RayExecutor(None if ray == "local" else ray, threads, device)
    run_and_report([run], elsewhere, report=place / "report", as_json=as_json)


def _digest(options: BenchmarkOptions, threads: int) -> str:
    """Return a short hash of everything that affects the results."""
    return hashlib.sha256(json.dumps([asdict(options), threads]).encode()).hexdigest()[:6]

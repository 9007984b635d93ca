"""``ctta bench``: fill a table."""

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
from ctta.benchmark import Place, Processes, RayCluster, plan
from ctta.benchmark.recipes import Options, Preset, build
from ctta.cli import arguments
from ctta.cli.network import absolute
from ctta.cli.running import run_and_report


def bench(
    recipe: Annotated[str, typer.Argument(help="The table to fill; see: ctta recipes")],
    methods: Annotated[str | None, typer.Option(help="Rows, such as source,tent,cotta.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Such as 1,2,3 or 1-5.")] = None,
    orders: Annotated[str | None, typer.Option(help="Of corruptions: standard, all, or numbers such as 0-3.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images per batch.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many images of each segment.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Repeat the stream this many times.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of a row, such as cotta.restore=0.005; repeatable.")
    ] = None,
    preset: Annotated[
        Preset, typer.Option(help="CoTTA as in its authors' code, or as in the paper's text.")
    ] = "official",
    model: Annotated[
        str | None, typer.Option(help="timm:NAME, hf:NAME, torchvision:NAME or file:PATH.py:function.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--data", help="The data set; by default from the cache of 'ctta data get'.")
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch data and weights that are missing.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; by default one below runs/, the same for the same command.")
    ] = None,
    device: Annotated[str, typer.Option(help="Such as cuda:0.")] = "cpu",
    workers: Annotated[int, typer.Option(min=0, help="Run cells in this many processes; 0 is this one.")] = 0,
    ray: Annotated[
        str | None, typer.Option(help="Run cells on a Ray cluster: its address, auto, or local.", metavar="ADDRESS")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads per cell; results are reproducible only at the same number.")
    ] = None,
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between two saves of a cell's state.")] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON per cell instead of a table.")] = False,
) -> None:
    """Run methods over a stream and write the table, as a folder that can be gone on with.

    Killed or stopped by Ctrl-C, the same command goes on where it was and ends with the identical table.
    """
    options = Options(
        data=None if folder is None else str(folder.absolute()),
        model=absolute(model),
        preset=preset,
        limit=limit,
        batch_size=batch_size,
        rounds=rounds,
        settings=tuple(settings or ()),
        device=device,
    )
    threads = threads or max(1, torch.get_num_threads() // max(1, workers))
    if download:
        for name in build(recipe, options).downloads:
            datasets.download(name)
    place = out or Path("runs") / f"{recipe}-{_digest(options, threads)}"
    run = plan(
        place,
        recipe,
        options,
        methods=arguments.names(methods),
        orders=arguments.orders(orders),
        seeds=arguments.seeds(seeds),
        threads=threads,
        save_every=save_every,
        command=shlex.join(["ctta", *sys.argv[1:]]),
    )
    elsewhere: Place | None = Processes(workers) if workers else None
    if ray is not None:
        elsewhere = RayCluster(None if ray == "local" else ray, threads, device)
    run_and_report([run], elsewhere, report=place / "report", as_json=as_json)


def _digest(options: Options, threads: int) -> str:
    """Short, and different for whatever makes results differ."""
    return hashlib.sha256(json.dumps([asdict(options), threads]).encode()).hexdigest()[:6]

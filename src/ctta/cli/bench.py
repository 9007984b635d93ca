"""``ctta bench``: run a benchmark."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, get_args

import typer

from ctta import benchmark
from ctta.benchmark.choice import describe_left_out
from ctta.benchmark.matrix import MATRIX
from ctta.benchmark.recipes import Preset
from ctta.cli.console import exit_on_interrupt, interrupt_between_steps, print_notice, progress_bar
from ctta.cli.options import (
    ClassesOption,
    InsecureOption,
    MeanOption,
    SizeOption,
    StdOption,
    parse_orders,
    parse_protocols,
    parse_seeds,
    parse_target,
)
from ctta.cli.results import exit_on_failures, print_failure, print_matrix, print_results
from ctta.core.options import parse_channels, parse_names, read_class_names
from ctta.errors import ConfigError

# Panel of ``ctta bench --help``.
EXECUTION = "Execution"


def bench(
    recipe: Annotated[
        str,
        typer.Argument(
            help="Run this benchmark, such as embedded; for a list see: ctta recipes. matrix runs methods on many "
            "protocols, about an hour of one core with the default ones.",
            metavar="RECIPE",
        ),
    ],
    methods: Annotated[
        str | None,
        typer.Option(
            help="Run these methods, such as source,tent,cotta_fast or file:PATH.py:Class (see: ctta methods); all "
            "runs every method that fits the network. Default: those of the recipe.",
            metavar="NAMES",
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Repeat stochastic methods with these seeds, such as 1,2,3 or 1-5. Default: those of the recipe.",
            metavar="LIST",
        ),
    ] = None,
    orders: Annotated[
        str | None,
        typer.Option(
            help="Run these orders of the corruptions: standard, all, or numbers such as 0-3. Default: those of the "
            "recipe.",
            metavar="LIST",
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Adapt to N images at a time. Default: that of the recipe.", metavar="N")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N images of each segment. Default: all.", metavar="N")
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="Let the corruptions arrive in this way, such as recurring or rotta,concentration=0.01; for a list "
            "see: ctta protocols. Default: that of the recipe.",
            metavar="NAME[,KEY=VALUE]",
        ),
    ] = None,
    protocols: Annotated[
        str | None,
        typer.Option(
            help="Run the matrix on these protocols, such as continual,recurring,num_visits=5. Default: all.",
            metavar="LIST",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Let the walk of the recipe ccc have this difficulty: easy, medium or hard, relative to the network, "
            "or a mean accuracy such as 0.4. Default: easy.",
            metavar="NAME|ACCURACY",
        ),
    ] = None,
    speed: Annotated[
        int | None,
        typer.Option(
            min=1, help="Use N images at each point of that walk. Default: 200, with --data 1000.", metavar="N"
        ),
    ] = None,
    num_images: Annotated[
        int | None,
        typer.Option(
            "--images",
            min=1,
            help="Let the stream of the recipe ccc have N images. Default: 20000, with --data 100000.",
            metavar="N",
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Repeat the stream N times. Default: that of the recipe.", metavar="N")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Set a hyperparameter of a method, such as cotta.restore=0.005 or MyMethod.lr=1e-4; repeatable.",
            metavar="METHOD.NAME=VALUE",
        ),
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="Apply this policy to every method that learns, such as reset_every=1000, or to one, such as "
            "tent.reset_every=1000; repeatable. Default: none.",
            metavar="[METHOD.]NAME[=VALUE]",
        ),
    ] = None,
    preset: Annotated[
        Preset,
        typer.Option(
            help="Run CoTTA as in its reference implementation (official), or as in the text of the paper.",
            metavar="|".join(get_args(Preset)),
        ),
    ] = "official",
    model: Annotated[
        str | None,
        typer.Option(
            help="Load this network: timm:NAME, hf:NAME, torchvision:NAME or file:PATH.py:function. Default: that of "
            "the recipe.",
            metavar="SPEC",
        ),
    ] = None,
    mean: MeanOption = None,
    std: StdOption = None,
    source_stats: Annotated[
        Path | None,
        typer.Option(
            help="Read statistics of source images from this file of 'ctta source-stats', for methods that need them. "
            "Default: those of the embedded network, none for others.",
            metavar="FILE",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--data", help="Read the dataset from this folder. Default: the cache of 'ctta data get'.", metavar="DIR"
        ),
    ] = None,
    corruptions: Annotated[
        str | None,
        typer.Option(
            help="Use these corruptions, in this order, such as fog,snow; none stands for the images as they are "
            "(recipe folder). Default: the 15 of the benchmarks.",
            metavar="NAMES",
        ),
    ] = None,
    severity: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=5,
            help="Use this severity of the corruptions, 1 to 5; where images are corrupted as they are read, any "
            "number from 0 to 5, such as 2.25. Default: 5.",
            metavar="N",
        ),
    ] = None,
    size: SizeOption = None,
    classes: ClassesOption = None,
    download: Annotated[bool, typer.Option("--download", help="Download missing data and weights.")] = False,
    insecure: InsecureOption = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the run to this folder. Default: one below runs/, the same for the same options.", metavar="DIR"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per cell instead of tables.")] = False,
    device: Annotated[
        str,
        typer.Option(
            help="Run the networks on this torch device, such as cuda:0.", metavar="DEVICE", rich_help_panel=EXECUTION
        ),
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
            help="Run cells on the Ray cluster at this address; auto finds one, local starts one. Default: no cluster.",
            metavar="ADDRESS",
            rich_help_panel=EXECUTION,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Use N CPU threads per cell; results are reproducible for the same number only. Default: torch's, "
            "divided by --workers.",
            metavar="N",
            rich_help_panel=EXECUTION,
        ),
    ] = None,
    save_every: Annotated[
        float,
        typer.Option(
            min=0,
            help="Save the state of a cell at most this often.",
            metavar="SECONDS",
            rich_help_panel=EXECUTION,
        ),
    ] = 20.0,
) -> None:
    """Run methods over a benchmark stream and write the results as a resumable run folder.

    After a kill or Ctrl-C, run the same command again to resume: the results
    are identical to those of an uninterrupted run.
    """
    command = shlex.join(["ctta", *sys.argv[1:]])
    if recipe == MATRIX:
        _refuse(
            "'ctta bench matrix' does not take {}: leave it out, or run one protocol with 'ctta bench embedded'",
            orders=orders,
            batch_size=batch_size,
            protocol=protocol,
            target=target,
            speed=speed,
            images=num_images,
            rounds=rounds,
            preset=None if preset == "official" else preset,
            mean=mean,
            std=std,
            corruptions=corruptions,
            severity=severity,
            size=size,
            classes=classes,
            download=download or None,
            insecure=insecure or None,
        )
        with _execute(recipe, workers, ray) as (executor, update, start):
            matrix = benchmark.run_matrix(
                methods=None if methods is None else parse_names(methods),
                protocols=None if protocols is None else parse_protocols(protocols),
                seeds=None if seeds is None else parse_seeds(seeds),
                data=folder,
                model=model,
                source_stats=source_stats,
                limit=limit,
                settings=settings or (),
                policies=policies,
                device=device,
                folder=out,
                workers=workers,
                ray=ray,
                executor=executor,
                threads=threads,
                save_every=save_every,
                command=command,
                on_plan=start,
                on_progress=update,
                on_outcome=print_failure,
            )
        print_matrix(matrix, as_json=as_json)
        exit_on_failures([matrix])
        return
    _refuse("only 'ctta bench matrix' takes {}: give --protocol NAME", protocols=protocols)
    with _execute(recipe, workers, ray) as (executor, update, start):
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
            policies=policies,
            protocol=protocol,
            target=None if target is None else parse_target(target),
            speed=speed,
            num_images=num_images,
            corruptions=None if corruptions is None else parse_names(corruptions),
            severity=severity,
            size=size,
            classes=None if classes is None else read_class_names(classes),
            mean=None if mean is None else parse_channels(mean),
            std=None if std is None else parse_channels(std),
            source_stats=source_stats,
            device=device,
            folder=out,
            workers=workers,
            ray=ray,
            executor=executor,
            threads=threads,
            save_every=save_every,
            download=download,
            insecure=insecure,
            command=command,
            on_plan=start,
            on_progress=update,
            on_outcome=print_failure,
        )
    print_results(result, as_json=as_json)
    exit_on_failures([result])


@contextmanager
def _execute(
    title: str, workers: int, ray: str | None
) -> Iterator[
    tuple[benchmark.SerialExecutor | None, Callable[[int, int], None], Callable[[benchmark.BenchmarkRun], None]]
]:
    """Show the progress within the block, and let Ctrl-C end it after a step where cells run in this process.

    Args:
        title: Shown in front of the progress.
        workers: Number of processes that run cells.
        ray: Address of a cluster that runs them.

    Yields:
        What runs the cells in this process, None if something else does; the function to report progress to; and the
        one to call when everything is planned.
    """
    with ExitStack() as stack:
        stack.enter_context(exit_on_interrupt())
        update = stack.enter_context(progress_bar(title))
        is_serial = not workers and ray is None
        checks: list[Callable[[], None]] = []

        def start(run: benchmark.BenchmarkRun) -> None:
            _print_left_out(run)
            if is_serial:  # only now: before the first batch, Ctrl-C stops what a recipe measures at once
                checks.append(stack.enter_context(interrupt_between_steps()))

        yield benchmark.SerialExecutor(lambda _record: checks[0]()) if is_serial else None, update, start


def _refuse(message: str, **options: object) -> None:
    """Raise a ConfigError for the first option that is given but does not apply."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(message.format(f"--{name.replace('_', '-')}"))


def _print_left_out(run: benchmark.BenchmarkRun) -> None:
    if line := describe_left_out(run.left_out):
        print_notice(line)

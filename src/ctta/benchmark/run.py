"""Run a benchmark: plan its cells, execute them, and write the report."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
from typing_extensions import Doc

from ctta.benchmark.executors import (
    Executor,
    JobOutcome,
    ProcessExecutor,
    RayExecutor,
    SerialExecutor,
    execute,
    report_progress,
)
from ctta.benchmark.options import EXECUTION, BenchmarkOptions, CellOptions
from ctta.benchmark.plan import BenchmarkRun, plan
from ctta.benchmark.recipes import build_task
from ctta.benchmark.report import write_report
from ctta.core.options import Insecure, Option, resolve_device, takes_options
from ctta.data import datasets
from ctta.data.corruptions.registry import check_severity
from ctta.distributed import rank, world_size
from ctta.distributed.collectives import run_on_rank_zero
from ctta.errors import ConfigError, DataError
from ctta.evaluation.journal import read_result
from ctta.evaluation.label_maps import EXAMPLES, save_examples
from ctta.evaluation.metrics import MIOU
from ctta.evaluation.results import Result
from ctta.io.python_files import absolute_file_spec
from ctta.policies import format_policy


def _format_settings(settings: Sequence[str] | Mapping[str, object]) -> tuple[str, ...]:
    """Return settings as texts such as ``cotta.restore=0.005``."""
    if isinstance(settings, str):
        raise TypeError(f"settings must be a mapping or a list of texts, got {settings!r}: give [{settings!r}]")
    if isinstance(settings, Mapping):
        return tuple(f"{name}={value}" for name, value in settings.items())
    return tuple(settings)


#: How options are recorded where that is not how they are given.
_RECORDED: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("data", "source_stats"), lambda path: str(Path(path).absolute())),
    **dict.fromkeys(("corruptions", "classes", "mean", "std"), tuple),
    "model": absolute_file_spec,
    "severity": check_severity,
    "settings": _format_settings,
    "policies": lambda given: tuple(each if isinstance(each, str) else format_policy(each) for each in given) or None,
}


@dataclass(frozen=True, kw_only=True)
class RunOptions(BenchmarkOptions, CellOptions):
    """All options of a benchmark: its cells, what changes about the recipe, and where and how the cells run."""

    download: Annotated[bool, Option("Download missing data and weights.")] = False
    insecure: Insecure = False
    folder: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "Write the run to this folder. Default: one below runs/, the same for the same options.", "DIR", "--out"
        ),
    ] = None
    workers: Annotated[
        int, Option("Run cells in N processes; 0 runs them in this one.", "N", min=0, panel=EXECUTION)
    ] = 0
    ray: Annotated[
        str | None,
        Option(
            "Run cells on the Ray cluster at this address; auto finds one, local starts one. Default: no cluster.",
            "ADDRESS",
            panel=EXECUTION,
        ),
    ] = None
    executor: Annotated[Executor | None, Doc("Runs the cells; by default chosen by ``workers`` and ``ray``.")] = None
    threads: Annotated[
        int | None,
        Option(
            "Use N CPU threads per cell; results are reproducible for the same number only. Default: torch's, divided "
            "by --workers.",
            "N",
            min=1,
            panel=EXECUTION,
        ),
    ] = None
    save_every: Annotated[
        float, Option("Save the state of a cell at most this often.", "SECONDS", min=0, panel=EXECUTION)
    ] = 20.0
    report: Annotated[
        bool | str | os.PathLike[str],
        Doc("Whether to write a report into the run folder, or the folder to write it to."),
    ] = True
    command: Annotated[str | None, Doc("How the run was started, for the report; by default this call.")] = None
    on_plan: Annotated[
        Callable[[BenchmarkRun], None] | None, Doc("Called with the run before the first of its cells starts.")
    ] = None
    on_progress: Annotated[
        Callable[[int, int], None] | None,
        Doc("Called from another thread, several times a second, with the number of batches done and in total."),
    ] = None
    on_outcome: Annotated[Callable[[JobOutcome], None] | None, Doc("Called after every attempt to run a cell.")] = None

    @property
    def num_threads(self) -> int:
        """CPU threads of a cell; by default torch's number, divided by the number of workers."""
        return self.threads or max(1, torch.get_num_threads() // max(1, self.workers))

    @property
    def for_recipe(self) -> BenchmarkOptions:
        """What changes about the recipe, as it is recorded: absolute paths, and texts in place of objects."""
        given = {each.name: getattr(self, each.name) for each in fields(BenchmarkOptions)}
        recorded = {name: convert(given[name]) for name, convert in _RECORDED.items() if given[name] is not None}
        return BenchmarkOptions(**given | recorded)


@dataclass(frozen=True)
class BenchmarkResult:
    """The outcome of a benchmark.

    Attributes:
        run: The run folder and its cells.
        results: Results of all complete cells, in the order of the cells.
        failures: Outcomes of the cells that failed for good.
        report: Path of the HTML report, None if none was written.
    """

    run: BenchmarkRun
    results: tuple[Result, ...]
    failures: tuple[JobOutcome, ...] = ()
    report: Path | None = None


@takes_options(RunOptions)
def run(recipe: str, options: RunOptions) -> BenchmarkResult:
    """Run a benchmark: plan its cells, run those that are not complete, and write the report.

    A cell is one method, one order and one seed. Interrupted at any moment, the same call continues where it was and
    ends with identical results. A cell that fails does not stop the others.

    Args:
        recipe: A key of :data:`ctta.benchmark.RECIPES`, such as ``"demo"`` or ``"cifar10c"``.
        options: The keywords.

    Returns:
        The run, the results of its complete cells, the failures, and the path of the report.

    Raises:
        ConfigError: An argument does not fit the recipe, or the folder was made with other settings.
        DataError: A file of the dataset or of the folder is missing or damaged.

    >>> import ctta.benchmark
    >>> outcome = ctta.benchmark.run("demo", methods=["source", "cotta"], workers=2)    # doctest: +SKIP
    >>> {result.method: result.error for result in outcome.results}                     # doctest: +SKIP
    """
    check_executor(options)
    if options.protocols is not None:
        raise ConfigError("only 'ctta bench matrix' takes --protocols: give --protocol NAME (protocol= in Python)")
    if options.insecure and not options.download:
        raise ConfigError("insecure is about downloads: give download=True (--download) as well")
    changes, threads, methods, seeds = options.for_recipe, options.num_threads, options.methods, options.seeds
    if options.download:
        for name in build_task(recipe, changes, ignore_other_settings=True).downloads:
            datasets.download(name, insecure=options.insecure)
    planned = plan(
        Path(options.folder or Path("runs") / f"{recipe}-{hash_options(changes, threads)}"),
        recipe,
        changes,
        methods=methods,
        orders=options.orders,
        seeds=seeds,
        threads=threads,
        save_every=options.save_every,
        command=options.command
        or format_call("run", [recipe], changes, methods=methods, orders=options.orders, seeds=seeds),
    )
    failures = execute_cells(planned, options)
    results = tuple(result for result in planned.results() if result.is_complete)
    page = None
    if results and rank() == 0:
        write_run_examples(planned)
        if options.report:
            out = planned.folder / "report" if options.report is True else Path(options.report)
            page = write_report([planned.folder], out)
    return BenchmarkResult(planned, results, failures, page)


def execute_cells(planned: BenchmarkRun, options: RunOptions) -> tuple[JobOutcome, ...]:
    """Run the cells that are not complete where the options say; return the outcomes of those that failed for good."""
    if options.on_plan is not None:
        options.on_plan(planned)
    executor = options.executor
    if executor is None and options.ray is not None:
        device = resolve_device(options.device)
        executor = RayExecutor(None if options.ray == "local" else options.ray, options.num_threads, device)
    if executor is None:
        executor = ProcessExecutor(options.workers) if options.workers else SerialExecutor()
    with report_progress(planned, options.on_progress):
        failures = execute(planned, executor, on_outcome=options.on_outcome)
    run_on_rank_zero(lambda: None)  # wait until rank 0 has written the last batch
    return tuple(failures)


def check_executor(options: RunOptions) -> None:
    """Raise a ConfigError if options contradict each other on where cells run, before anything is planned."""
    workers, ray, executor = options.workers, options.ray, options.executor
    if (workers > 0) + (ray is not None) + (executor is not None) > 1:
        raise ConfigError("workers, ray and executor each choose where cells run: give at most one of them")
    if world_size() > 1 and (workers or ray is not None or not isinstance(executor, SerialExecutor | None)):
        raise ConfigError("under torchrun its processes share each cell: leave out workers, ray and executor")


def hash_options(options: BenchmarkOptions, threads: int) -> str:
    """Return a short hash of everything that results depend on."""
    return hashlib.sha256(json.dumps([options.to_dict(), threads]).encode()).hexdigest()[:6]


def format_call(function: str, arguments: Sequence[object], options: BenchmarkOptions, **chosen: Any) -> str:
    """Return the call of a function of this package with these arguments, without defaults."""
    given = {name: value for name, value in chosen.items() if value is not None}
    for field in fields(options):
        if (value := getattr(options, field.name)) != field.default:
            given[field.name] = value
    texts = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in given.items())]
    return f"ctta.benchmark.{function}({', '.join(texts)})"


def write_run_examples(run: BenchmarkRun) -> None:
    """Write the best and the worst change of each method into the run folder, replacing earlier ones.

    All complete cells of the folder count, also those of earlier calls. Nothing is written for results of image
    classification, or without a result of the source network on the same stream to compare with. A method with several
    orders and seeds is shown with the first.
    """
    examples = run.folder / EXAMPLES
    for earlier in examples.glob("*.npz"):  # perhaps of a seed that is not the first any more
        earlier.unlink()
    results: dict[Path, Result] = {}
    for about in (run.folder / "cells").glob("*/about.json"):
        with suppress(DataError):  # the report lists it
            result = read_result(about.parent)
            if result.is_complete and result.metric == MIOU:
                results[about.parent] = result
    found = sorted(results.items(), key=lambda pair: [pair[1].labels[name] or 0 for name in ("order", "seed")])
    sources = {(each.source, each.stream_hash): cell for cell, each in found if each.labels["row"] == "source"}
    task = build_task(run.cells[0].recipe, run.cells[0].options, ignore_other_settings=True)
    shown = {"source"}
    for cell, result in found:
        method, source = result.labels["row"], sources.get((result.source, result.stream_hash))
        if method in shown or source is None:
            continue
        stream = task.make_stream(result.labels["order"])
        if stream.hash == result.stream_hash:  # else the data have changed since the cell ran
            shown.add(method)
            save_examples(result.method, cell, source, stream, examples)

"""Run a benchmark: plan its cells, execute them, and write the report."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ctta.benchmark.examples import write_run_examples
from ctta.benchmark.execution import execute, report_progress
from ctta.benchmark.executors import Executor, JobOutcome, ProcessExecutor, SerialExecutor
from ctta.benchmark.plan import BenchmarkRun, plan
from ctta.benchmark.ray import RayExecutor
from ctta.benchmark.recipes import BenchmarkOptions, Preset, build_task
from ctta.benchmark.report import write_report
from ctta.data import datasets
from ctta.data.corruptions.registry import check_severity
from ctta.distributed import rank, world_size
from ctta.distributed.collectives import run_on_rank_zero
from ctta.errors import ConfigError
from ctta.evaluation.results import Result
from ctta.io.python_files import absolute_file_spec
from ctta.policies import Policy, format_policy


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


def run(
    recipe: str,
    *,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    orders: Sequence[int | None] | None = None,
    data: str | os.PathLike[str] | None = None,
    model: str | None = None,
    preset: Preset = "official",
    limit: int | None = None,
    batch_size: int | None = None,
    rounds: int | None = None,
    settings: Sequence[str] | Mapping[str, object] = (),
    policies: Sequence[str | Policy] | None = None,
    protocol: str | None = None,
    target: str | float | None = None,
    speed: int | None = None,
    num_images: int | None = None,
    corruptions: Sequence[str] | None = None,
    severity: float | None = None,
    size: tuple[int, int] | None = None,
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    source_stats: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    folder: str | os.PathLike[str] | None = None,
    workers: int = 0,
    ray: str | None = None,
    executor: Executor | None = None,
    threads: int | None = None,
    save_every: float = 20.0,
    download: bool = False,
    insecure: bool = False,
    report: bool | str | os.PathLike[str] = True,
    command: str | None = None,
    on_plan: Callable[[BenchmarkRun], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_outcome: Callable[[JobOutcome], None] | None = None,
) -> BenchmarkResult:
    """Run a benchmark: plan its cells, run those that are not complete, and write the report.

    A cell is one method, one order and one seed. Interrupted at any moment, the same call continues where it was and
    ends with identical results. A cell that fails does not stop the others.

    Args:
        recipe: A key of :data:`ctta.benchmark.RECIPES`, such as ``"demo"`` or ``"cifar10c"``.
        methods: Names of methods, of the recipe or of the registry, such as ``"file:mine.py:MyMethod"``; the
            recipe's own choice by default. ``"all"`` stands for every method of the library that the network can be
            adapted by, see ``BenchmarkRun.left_out``.
        seeds: Seeds of methods with randomness; the recipe's own choice by default.
        orders: Orders of domains by number, None for the standard order; the recipe's own choice by default.
        data: Folder of the dataset; by default the copy in the cache of :mod:`ctta.data.datasets`.
        model: Source network as :func:`ctta.models.load` takes it; the recipe's own by default.
        preset: CoTTA as in its reference implementation or as in the text of the paper.
        limit: Maximum number of images per segment.
        batch_size: Images per batch.
        rounds: How many times the stream is repeated.
        settings: Hyperparameters of single methods: ``{"cotta.restore": 0.005}`` or ``["cotta.restore=0.005"]``.
        policies: What happens around the updates of every method that learns: ``[ctta.policies.reset_every(1000)]`` or
            ``["reset_every=1000"]``; of one method: ``["tent.reset_every=1000"]``.
        protocol: How the corruptions arrive, with settings after commas: ``"recurring"`` or
            ``"rotta,concentration=0.01"``; see :data:`ctta.data.streams.PROTOCOLS`. The recipe's own by default.
        target: Difficulty of ``"ccc"``: "easy", "medium", "hard", or the mean accuracy, from 0 to 1.
        speed: Images of ``"ccc"`` at each point of its walk.
        num_images: Images of the whole stream of ``"ccc"``.
        corruptions: Names of corruptions, in order; the recipe's own by default. Those of ``"folder"`` may include
            ``"none"``, the images as they are.
        severity: Severity of the corruptions, 1 to 5; where images are corrupted as they are read, any number from 0 to
            5. The recipe's own by default.
        size: (height, width) that the images of ``"folder"`` are resized to.
        classes: Names of the classes in the order of the network's outputs, for the images of ``"folder"``; by default
            its sorted class folders.
        mean: Mean of each channel, if ``model`` expects normalized images; streams yield images in [0, 1].
        std: Standard deviation of each channel.
        source_stats: File of ``ctta source-stats`` or of ``ctta.source_stats(...).save``, for methods that need
            statistics of source images; the embedded network has its own.
        device: Device of the networks, such as ``"cuda:0"``.
        folder: The run folder; by default one below ``runs``, the same for the same recipe, options and threads.
        workers: Number of processes that run cells; 0 runs them in this process.
        ray: Address of a Ray cluster to run cells on, ``"auto"`` to find one, ``"local"`` to start one.
        executor: Runs the cells; by default chosen by ``workers`` and ``ray``.
        threads: CPU threads per cell; results are reproducible only with the same number. By default torch's number,
            divided by the number of workers.
        save_every: Seconds between two saves of a cell's state.
        download: Whether to download missing data and weights.
        insecure: Whether to download also files of which no SHA-256 is known, as
            :func:`ctta.data.datasets.download` does.
        report: Whether to write a report into the run folder, or the folder to write it to.
        command: How the run was started, for the report; by default this call.
        on_plan: Called with the run before the first of its cells starts.
        on_progress: Called from another thread, several times a second, with the number of batches done and in total.
        on_outcome: Called after every attempt to run a cell.

    Returns:
        The run, the results of its complete cells, the failures, and the path of the report.

    Raises:
        ConfigError: An argument does not fit the recipe, or the folder was made with other settings.
        DataError: A file of the dataset or of the folder is missing or damaged.

    >>> import ctta.benchmark
    >>> outcome = ctta.benchmark.run("demo", methods=["source", "cotta"], workers=2)    # doctest: +SKIP
    >>> {result.method: result.error for result in outcome.results}                     # doctest: +SKIP
    """
    check_executor(workers, ray, executor)
    if insecure and not download:
        raise ConfigError("insecure is about downloads: give download=True (--download) as well")
    options = BenchmarkOptions(
        data=None if data is None else str(Path(data).absolute()),
        model=None if model is None else absolute_file_spec(model),
        preset=preset,
        limit=limit,
        batch_size=batch_size,
        rounds=rounds,
        settings=format_settings(settings),
        device=device,
        corruptions=None if corruptions is None else tuple(corruptions),
        severity=None if severity is None else check_severity(severity),
        size=size,
        classes=None if classes is None else tuple(classes),
        mean=None if mean is None else tuple(mean),
        std=None if std is None else tuple(std),
        source_stats=None if source_stats is None else str(Path(source_stats).absolute()),
        policies=format_policies(policies),
        protocol=protocol,
        target=target,
        speed=speed,
        num_images=num_images,
    )
    if download:
        for name in build_task(recipe, options, ignore_other_settings=True).downloads:
            datasets.download(name, insecure=insecure)
    threads = threads or divide_threads(workers)
    planned = plan(
        Path(folder) if folder is not None else Path("runs") / f"{recipe}-{hash_options(options, threads)}",
        recipe,
        options,
        methods=methods,
        orders=orders,
        seeds=seeds,
        threads=threads,
        save_every=save_every,
        command=command or format_call("run", [recipe], options, methods=methods, orders=orders, seeds=seeds),
    )
    if on_plan is not None:
        on_plan(planned)
    executor = executor or make_executor(workers, ray, threads, device)
    with report_progress(planned, on_progress):
        failures = execute(planned, executor, on_outcome=on_outcome)
    run_on_rank_zero(lambda: None)  # wait until rank 0 has written the last batch
    results = tuple(result for result in planned.results() if result.is_complete)
    page = None
    if results and rank() == 0:
        write_run_examples(planned)
        if report:
            page = write_report([planned.folder], planned.folder / "report" if report is True else Path(report))
    return BenchmarkResult(planned, results, tuple(failures), page)


def check_executor(workers: int, ray: str | None, executor: Executor | None) -> None:
    """Raise a ConfigError if arguments contradict each other on where cells run, before anything is planned."""
    if (workers > 0) + (ray is not None) + (executor is not None) > 1:
        raise ConfigError("workers, ray and executor each choose where cells run: give at most one of them")
    if world_size() > 1 and (workers or ray is not None or not isinstance(executor, SerialExecutor | None)):
        raise ConfigError("under torchrun its processes share each cell: leave out workers, ray and executor")


def make_executor(workers: int, ray: str | None, threads: int, device: str) -> Executor:
    """Return what runs the cells: a Ray cluster, processes of this machine, or this process."""
    if ray is not None:
        return RayExecutor(None if ray == "local" else ray, threads, device)
    return ProcessExecutor(workers) if workers else SerialExecutor()


def divide_threads(workers: int) -> int:
    """Return the CPU threads of a cell: torch's number, divided by the number of workers."""
    return max(1, torch.get_num_threads() // max(1, workers))


def format_settings(settings: Sequence[str] | Mapping[str, object]) -> tuple[str, ...]:
    """Return settings as texts such as ``cotta.restore=0.005``."""
    if isinstance(settings, str):
        raise TypeError(f"settings must be a mapping or a list of texts, got {settings!r}: give [{settings!r}]")
    if isinstance(settings, Mapping):
        return tuple(f"{name}={value}" for name, value in settings.items())
    return tuple(settings)


def format_policies(policies: Sequence[str | Policy] | None) -> tuple[str, ...] | None:
    """Return policies as texts such as ``reset_every=1000``; None if there are none."""
    return tuple(each if isinstance(each, str) else format_policy(each) for each in policies or ()) or None


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

"""The robustness matrix: methods x protocols on the embedded network, one resumable run per protocol, and one page."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ctta.benchmark.execution import execute, report_progress
from ctta.benchmark.executors import Executor, JobOutcome
from ctta.benchmark.plan import BenchmarkRun, plan
from ctta.benchmark.recipes import BenchmarkOptions
from ctta.benchmark.report import Matrix, read_matrix, write_matrix
from ctta.benchmark.report.matrix import RUNS
from ctta.benchmark.run import (
    check_executor,
    divide_threads,
    format_call,
    format_policies,
    format_settings,
    hash_options,
    make_executor,
)
from ctta.core.registry import DEFAULT_METHOD
from ctta.data.streams import parse_protocol
from ctta.distributed import rank
from ctta.distributed.collectives import run_on_rank_zero
from ctta.errors import ConfigError, DataError
from ctta.io.python_files import absolute_file_spec
from ctta.policies import Policy

#: The name of the matrix on the command line, where others have the name of a recipe.
MATRIX = "matrix"
RECIPE, SOURCE = "embedded", "source"
#: What a user is likely to consider, cheap enough to run on every protocol.
DEFAULT_METHODS = (
    SOURCE,
    "bn_stats",
    "lame",
    "tent",
    "eata",
    "sar",
    "roid",
    "note",
    "rotta",
    "cotta_fast",
    DEFAULT_METHOD,
)


@dataclass(frozen=True)
class MatrixSize:
    """How much of a protocol the matrix runs.

    Attributes:
        limit: Images per corruption, in each visit.
        batch_size: Images per batch, as the protocol is defined.
        settings: Settings of the protocol that make it shorter, as typed.
    """

    limit: int
    batch_size: int
    settings: str = ""


#: The protocols of the matrix. The sizes are a compromise: all of them with the default methods take about 70 minutes
#: of one core.
SIZES: Mapping[str, MatrixSize] = {
    "continual": MatrixSize(400, 200),
    "gradual": MatrixSize(50, 50),
    "recurring": MatrixSize(64, 64),
    "rotta": MatrixSize(256, 64),
    "note": MatrixSize(256, 64),
    "sorted": MatrixSize(256, 64),
    "label-shift": MatrixSize(256, 64, "num_per_phase=25"),
    "long-tail": MatrixSize(500, 64),
    "mixed": MatrixSize(400, 200),
    "mixed-correlated": MatrixSize(256, 64),
    "single": MatrixSize(60, 1),
    "cyclic": MatrixSize(64, 64, "num_visits=5"),
    "cdc": MatrixSize(128, 64, "num_visits=3"),
    "clean": MatrixSize(2000, 200),
    "foreign": MatrixSize(256, 64),
    "no-wait": MatrixSize(400, 200),
}


@dataclass(frozen=True)
class MatrixResult:
    """The outcome of a matrix.

    Attributes:
        run: The folder, and the cells of all protocols.
        failures: Outcomes of the cells that failed for good.
        matrix: The numbers; None if Source is not complete on any protocol.
        report: Path of the HTML page, likewise.
    """

    run: BenchmarkRun
    failures: tuple[JobOutcome, ...] = ()
    matrix: Matrix | None = None
    report: Path | None = None


def run_matrix(
    *,
    methods: Sequence[str] | None = None,
    protocols: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    data: str | os.PathLike[str] | None = None,
    model: str | None = None,
    source_stats: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    settings: Sequence[str] | Mapping[str, object] = (),
    policies: Sequence[str | Policy] | None = None,
    device: str = "cpu",
    folder: str | os.PathLike[str] | None = None,
    workers: int = 0,
    ray: str | None = None,
    executor: Executor | None = None,
    threads: int | None = None,
    save_every: float = 20.0,
    command: str | None = None,
    on_plan: Callable[[BenchmarkRun], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_outcome: Callable[[JobOutcome], None] | None = None,
) -> MatrixResult:
    """Robustness matrix: methods x protocols on the embedded network, and one page that compares them with Source.

    Every protocol is a run of the recipe ``"embedded"`` of its own, below ``protocols`` in the folder; all of their
    cells share the workers. Interrupted at any moment, the same call continues where it was. The page covers everything
    that is in the folder, also of earlier calls.

    Args:
        methods: Names of methods, as for :func:`run`; :data:`DEFAULT_METHODS` by default. Source is always run.
        protocols: Protocols as :func:`ctta.data.streams.parse_protocol` takes them; those of :data:`SIZES` by default.
        seeds: Seeds of methods with randomness; 1 by default.
        data: Folder of CIFAR-10, for all of its test images; the 2,000 that ship with the library by default.
        model: Source network, as for :func:`run`; the embedded one by default.
        source_stats: As for :func:`run`.
        limit: Images per corruption and visit, in place of those of :data:`SIZES`.
        settings: As for :func:`run`.
        policies: As for :func:`run`.
        device: As for :func:`run`.
        folder: The folder; by default one below ``runs``, the same for the same options and threads.
        workers: As for :func:`run`.
        ray: As for :func:`run`.
        executor: As for :func:`run`.
        threads: As for :func:`run`.
        save_every: As for :func:`run`.
        command: How the matrix was started, for the page; by default this call.
        on_plan: Called with the cells of all protocols before the first one starts.
        on_progress: As for :func:`run`.
        on_outcome: As for :func:`run`.

    Returns:
        The cells, the failures, the numbers, and the path of the page.

    Raises:
        ConfigError: An argument does not fit, or the folder was made with other settings.
        DataError: A file of the folder is missing or damaged.

    >>> import ctta.benchmark
    >>> outcome = ctta.benchmark.run_matrix(methods=["tent", "rotta"], protocols=["rotta", "clean"])  # doctest: +SKIP
    >>> outcome.report                                                                               # doctest: +SKIP
    """
    check_executor(workers, ray, executor)
    threads = threads or divide_threads(workers)
    options = BenchmarkOptions(
        data=None if data is None else str(Path(data).absolute()),
        model=None if model is None else absolute_file_spec(model),
        limit=limit,
        settings=format_settings(settings),
        device=device,
        source_stats=None if source_stats is None else str(Path(source_stats).absolute()),
        policies=format_policies(policies),
    )
    chosen = _choose_protocols(protocols)
    folder = Path("runs") / f"{MATRIX}-{hash_options(options, threads)}" if folder is None else Path(folder)
    names = list(dict.fromkeys([SOURCE, *(DEFAULT_METHODS if methods is None else methods)]))
    command = command or format_call("run_matrix", [], options, methods=methods, protocols=protocols, seeds=seeds)
    runs = []
    for text in chosen:
        with _naming_protocol(text):
            run = plan(
                folder / RUNS / text,
                RECIPE,
                _set_protocol(options, text),
                methods=names,
                seeds=[1] if seeds is None else seeds,
                threads=threads,
                save_every=save_every,
                command=command,
            )
        runs.append(run)
    cells = tuple(cell for run in runs for cell in run.cells)
    left_out = {name: reason for run in runs for name, reason in run.left_out.items()}
    everything = BenchmarkRun(folder, cells, sum(run.num_batches for run in runs), left_out)
    if on_plan is not None:
        on_plan(everything)
    with report_progress(everything, on_progress):
        failures = execute(everything, executor or make_executor(workers, ray, threads, device), on_outcome=on_outcome)
    run_on_rank_zero(lambda: None)  # wait until rank 0 has written the last batch
    matrix, page = None, None
    if rank() == 0 and any(cell.method == SOURCE and cell.is_complete for cell in cells):
        matrix = read_matrix(folder)
        page = write_matrix(matrix, folder / "report")
    return MatrixResult(everything, tuple(failures), matrix, page)


def _choose_protocols(given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the protocols as typed, each once; raise for one that the matrix does not have."""
    if isinstance(given, str):
        raise TypeError(f"protocols must be a list, got {given!r}: give [{given!r}]")
    chosen = tuple(dict.fromkeys(SIZES if given is None else given))
    if not chosen:
        raise ConfigError("protocols is an empty list: leave it out for all, or name at least one")
    for text in chosen:
        if (name := parse_protocol(text).name) not in SIZES:
            raise ConfigError(f"the matrix does not have the protocol {name!r}; expected one of {', '.join(SIZES)}")
    return chosen


@contextmanager
def _naming_protocol(text: str) -> Iterator[None]:
    """Say which protocol of the matrix lacks data, such as a sampler that needs more images than ``limit`` leaves."""
    try:
        yield
    except DataError as error:
        raise DataError(f"the protocol {text!r} cannot be built: {error}") from error


def _set_protocol(options: BenchmarkOptions, text: str) -> BenchmarkOptions:
    """Return the options of one protocol: a bare name is shortened, with settings it is run as typed."""
    name = parse_protocol(text).name
    size = SIZES[name]
    return replace(
        options,
        protocol=f"{name},{size.settings}" if text == name and size.settings else text,
        limit=options.limit or size.limit,
        batch_size=size.batch_size,
    )

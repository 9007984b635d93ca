"""The robustness matrix: methods x protocols on the embedded network, one resumable run per protocol, and one page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ctta.benchmark.executors import JobOutcome
from ctta.benchmark.plan import BenchmarkRun, choose, plan
from ctta.benchmark.report import Matrix, read_matrix, write_matrix
from ctta.benchmark.report.matrix import RUNS
from ctta.benchmark.run import RunOptions, check_executor, execute_cells, format_call, hash_options
from ctta.core.options import refuse_options, takes_options
from ctta.core.registry import DEFAULT_METHOD
from ctta.data.streams import parse_protocol
from ctta.distributed import rank
from ctta.errors import ConfigError, DataError

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

#: Options of benchmarks that the matrix decides on itself.
REFUSED = (
    *("orders", "batch_size", "protocol", "target", "speed", "num_images", "rounds", "preset", "mean", "std"),
    *("corruptions", "severity", "size", "classes", "download", "insecure", "report"),
)


#: The protocols of the matrix, and how much of each it runs: options of the benchmark, and settings of the protocol, as
#: typed. The sizes are a compromise: all of them with the default methods take about 70 minutes of one core.
SIZES: Mapping[str, tuple[int, int, str]] = {  # images per corruption in each visit, images per batch, settings
    "continual": (400, 200, ""),
    "gradual": (50, 50, ""),
    "recurring": (64, 64, ""),
    "rotta": (256, 64, ""),
    "note": (256, 64, ""),
    "sorted": (256, 64, ""),
    "label-shift": (256, 64, "num_per_phase=25"),
    "long-tail": (500, 64, ""),
    "mixed": (400, 200, ""),
    "mixed-correlated": (256, 64, ""),
    "single": (60, 1, ""),
    "cyclic": (64, 64, "num_visits=5"),
    "cdc": (128, 64, "num_visits=3"),
    "clean": (2000, 200, ""),
    "foreign": (256, 64, ""),
    "no-wait": (400, 200, ""),
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


@takes_options(RunOptions)
def run_matrix(options: RunOptions) -> MatrixResult:
    """Robustness matrix: methods x protocols on the embedded network, and one page that compares them with Source.

    Every protocol is a run of the recipe ``"embedded"`` of its own, below ``protocols`` in the folder; all of their
    cells share the workers. Interrupted at any moment, the same call continues where it was. The page covers everything
    that is in the folder, also of earlier calls. Source is always run, with :data:`DEFAULT_METHODS` unless ``methods``
    are given, on the protocols of :data:`SIZES`, with one seed. Options that a protocol or the matrix itself decides
    on, such as ``orders`` and ``batch_size``, are refused.

    Args:
        options: The keywords.

    Returns:
        The cells, the failures, the numbers, and the path of the page.

    Raises:
        ConfigError: An argument does not fit, or the folder was made with other settings.
        DataError: A file of the folder is missing or damaged.

    >>> import ctta.benchmark
    >>> outcome = ctta.benchmark.run_matrix(methods=["tent", "rotta"], protocols=["rotta", "clean"])  # doctest: +SKIP
    >>> outcome.report                                                                               # doctest: +SKIP
    """
    check_executor(options)
    hint = "leave it out, or run one protocol with 'ctta bench embedded'"
    refuse_options(options, REFUSED, f"ctta bench {MATRIX}", hint)
    changes, threads, seeds = options.for_recipe, options.num_threads, options.seeds
    folder = Path(options.folder or Path("runs") / f"{MATRIX}-{hash_options(changes, threads)}")
    names = list(dict.fromkeys([SOURCE, *(DEFAULT_METHODS if options.methods is None else options.methods)]))
    command = options.command or format_call(
        "run_matrix", [], changes, methods=options.methods, protocols=options.protocols, seeds=seeds
    )
    runs = []
    for text in _choose_protocols(options.protocols):
        name = parse_protocol(text).name
        limit, batch_size, settings = SIZES[name]
        # A bare name is shortened, with settings it is run as typed.
        protocol = f"{name},{settings}" if text == name and settings else text
        try:
            run = plan(
                folder / RUNS / text,
                RECIPE,
                replace(changes, protocol=protocol, limit=changes.limit or limit, batch_size=batch_size),
                methods=names,
                seeds=[1] if seeds is None else seeds,
                threads=threads,
                save_every=options.save_every,
                command=command,
            )
        except DataError as error:  # such as a sampler that needs more images than ``limit`` leaves
            raise DataError(f"the protocol {text!r} cannot be built: {error}") from error
        runs.append(run)
    cells = tuple(cell for run in runs for cell in run.cells)
    left_out = {name: reason for run in runs for name, reason in run.left_out.items()}
    everything = BenchmarkRun(folder, cells, sum(run.num_batches for run in runs), left_out)
    failures = execute_cells(everything, options)
    matrix, page = None, None
    if rank() == 0 and any(cell.method == SOURCE and cell.is_complete for cell in cells):
        matrix = read_matrix(folder)
        page = write_matrix(matrix, folder / "report")
    return MatrixResult(everything, failures, matrix, page)


def _choose_protocols(given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the protocols as typed, each once; raise for one that the matrix does not have."""
    chosen = choose("protocols", given, tuple(SIZES))
    for text in chosen:
        if (name := parse_protocol(text).name) not in SIZES:
            raise ConfigError(f"the matrix does not have the protocol {name!r}; expected one of {', '.join(SIZES)}")
    return chosen

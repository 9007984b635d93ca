"""Plan a benchmark: which methods fit, and which cells to run, in a folder that a later call can continue.

A cell is one method, one order and one seed, described so that any process can run it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from ctta.benchmark.recipes import BenchmarkOptions, BenchmarkTask, build_task
from ctta.benchmark.report.runs import FORMAT, read_run_file
from ctta.core.model import AdaptiveModel
from ctta.data.streams import Stream, parse_protocol
from ctta.distributed import data_parallel, init, rank
from ctta.errors import ConfigError, first_line
from ctta.evaluation.journal import read_result
from ctta.evaluation.loop import evaluate
from ctta.evaluation.results import BatchRecord, Result
from ctta.evaluation.steps import count_step_ratio, whole_ratio
from ctta.io.atomic import atomic_write
from ctta.io.provenance import check_same_settings
from ctta.io.python_files import absolute_file_spec
from ctta.methods import METHODS
from ctta.models import to_device
from ctta.nn.surgery import fingerprint
from ctta.nn.vit import is_vit


@dataclass(frozen=True)
class BenchmarkCell:
    """Everything that the result of a cell depends on, and the folder that the result is written to.

    Attributes:
        recipe: Name of the recipe.
        options: What the user changed about the recipe.
        method: Name of the method in the recipe, or in :mod:`ctta.core.registry`.
        order: Number of the order of domains, None for the standard order.
        seed: Seed of the method, None for a method without randomness.
        threads: CPU threads of torch.
        folder: Folder of the result, see :func:`ctta.evaluate`.
        save_every: Seconds between two saves of the state.
    """

    recipe: str
    options: BenchmarkOptions
    method: str
    order: int | None
    seed: int | None
    threads: int
    folder: str
    save_every: float = 20.0

    @property
    def name(self) -> str:
        """The name of the cell's folder, such as ``cotta-standard-seed1``."""
        return Path(self.folder).name

    @property
    def is_complete(self) -> bool:
        """Whether the folder holds the result of the whole stream."""
        folder = Path(self.folder)
        return (folder / "about.json").exists() and read_result(folder).is_complete

    def to_json(self) -> str:
        """Return the cell as JSON, for another process."""
        return json.dumps(asdict(self) | {"options": self.options.to_dict()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the cell that :meth:`to_json` has written.

        Args:
            text: The JSON.

        Returns:
            An equal cell.
        """
        fields = json.loads(text)
        return cls(**fields | {"options": BenchmarkOptions.from_dict(fields["options"])})

    def run(self, on_batch: Callable[[BatchRecord], None] | None = None) -> None:
        """Evaluate the cell, or resume it, and write the result to the folder.

        Under ``torchrun`` the ranks share each batch, and rank 0 writes the folder.

        Args:
            on_batch: Called after each batch; the state is saved before an exception of it propagates.
        """
        try:
            from filelock import FileLock
        except ImportError as error:
            raise ImportError("benchmarks need the extra 'bench': pip install 'ctta[bench]'") from error
        task = build_task(self.recipe, self.options, [self.method], ignore_other_settings=True)
        spec, folder = task.methods[self.method], Path(self.folder)
        init()
        with ExitStack() as stack:
            stack.enter_context(_num_threads(self.threads))
            if rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                # An attempt that was given up may still be running on another machine.
                stack.enter_context(FileLock(folder / "lock"))
            net = to_device(task.make_network(), self.options.device)
            model, stream = data_parallel(spec.build_model(net, self.seed or 0)), task.make_stream(self.order)
            evaluate(
                model,
                stream,
                reset_at_domain=spec.reset_at_domain,
                step_ratio=self._find_step_ratio(model, stream),
                folder=folder,
                save_every=self.save_every,
                name=spec.label,
                labels={
                    "recipe": self.recipe,
                    "row": self.method,
                    "order": self.order,
                    "seed": self.seed,
                    "changed": self.options.changes,
                },
                on_batch=on_batch,
            )

    def _find_step_ratio(self, model: AdaptiveModel, stream: Stream) -> int:
        """Return every how many batches the model learns; 1 for a protocol that waits for every step."""
        protocol = None if self.options.protocol is None else parse_protocol(self.options.protocol)
        if protocol is None or protocol.definition.waits:
            return 1
        ratio, speed = protocol.all_settings["ratio"], float(protocol.all_settings["speed"])
        return whole_ratio((count_step_ratio(model, stream) if ratio is None else ratio) * speed)


@contextmanager
def _num_threads(threads: int) -> Iterator[None]:
    """Let torch use this many CPU threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


#: The name that stands for every method of the library.
ALL = "all"


def choose_methods(
    names: Sequence[str], task: BenchmarkTask, options: BenchmarkOptions, net: nn.Module
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Check that the network can be adapted by the named methods, and replace ``"all"`` by those that it can.

    Return also the methods that ``"all"`` leaves out, with the reason. Raise a ConfigError if a named method, or one
    that the user has given settings for, cannot adapt the network, or if none can.
    """
    chosen: list[str] = []
    left_out: dict[str, str] = {}
    typed = (*options.settings, *(options.policies or ()))
    changed = {text.partition("=")[0].partition(".")[0] for text in typed}
    for name in names:
        if name != ALL:
            _check_method(name, task, net)
            chosen.append(name)
            continue
        for each in (each for each in METHODS if each in task.methods and each not in names):
            spec = task.methods[each]
            if spec.method_class.info is not None and spec.method_class.info.needs_vit and not is_vit(net):
                left_out[each] = "for vision transformers only"
            elif spec.lacks_source_stats:
                left_out[each] = "without --source-stats FILE, made by 'ctta source-stats'"
            else:
                try:
                    spec.build_model(net, 0)
                    chosen.append(each)
                except ConfigError as error:
                    if each in changed or (spec.needs_source_stats and options.source_stats is not None):
                        raise
                    left_out[each] = first_line(error)
    if not chosen:
        raise ConfigError(f"no method of the library fits the network. {describe_left_out(left_out)}")
    return tuple(dict.fromkeys(chosen)), left_out


def describe_left_out(left_out: Mapping[str, str]) -> str:
    """Return one line about the methods that ``"all"`` leaves out, with the reasons; empty if there are none.

    >>> describe_left_out({"rem": "for vision transformers only", "eata": "no statistics", "rmt": "no statistics"})
    'Left out: rem (for vision transformers only); eata, rmt (no statistics).'
    """
    reasons: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        reasons.setdefault(reason, []).append(name)
    parts = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
    return f"Left out: {'; '.join(parts)}." if parts else ""


def _check_method(name: str, task: BenchmarkTask, net: nn.Module) -> None:
    """Raise unless a named method can adapt the network."""
    spec = task.methods[name]
    if spec.lacks_source_stats:
        raise ConfigError(
            f"{name} needs statistics of source images: compute them once with 'ctta source-stats --model SPEC "
            "--images DIR --output FILE', and give them with --source-stats FILE (source_stats= in Python)"
        )
    spec.build_model(net, 0)


@dataclass(frozen=True)
class BenchmarkRun:
    """A run folder and the cells that belong in it.

    Attributes:
        folder: The run folder, with ``run.json`` and a folder per cell below ``cells``.
        cells: The cells, complete or not.
        num_batches: Number of batches of all cells together.
        left_out: The methods that ``"all"`` does not include here, each with the reason.
    """

    folder: Path
    cells: tuple[BenchmarkCell, ...]
    num_batches: int
    left_out: Mapping[str, str] = field(default_factory=dict)

    def results(self) -> list[Result]:
        """Return the results on disk, complete or not, in the order of the cells."""
        folders = [Path(cell.folder) for cell in self.cells]
        return [read_result(folder) for folder in folders if (folder / "about.json").exists()]


def plan(
    folder: Path,
    recipe: str,
    options: BenchmarkOptions,
    *,
    methods: Sequence[str] | None = None,
    orders: Sequence[int | None] | None = None,
    seeds: Sequence[int] | None = None,
    threads: int,
    save_every: float = 20.0,
    command: str = "",
) -> BenchmarkRun:
    """Choose the cells of a benchmark and record them in a folder; every mistake is found before a cell starts.

    A folder that holds a run of the same recipe, options and number of threads is continued, and may get further
    methods, orders and seeds.

    Args:
        folder: The run folder; created if needed.
        recipe: A key of :data:`ctta.benchmark.RECIPES`.
        options: What the user changes about the recipe.
        methods: Names of methods; the recipe's own choice by default. ``"all"`` stands for every method of the library
            that the network can be adapted by.
        orders: Orders of domains, None for the standard order; the recipe's own choice by default.
        seeds: Seeds of methods with randomness; the recipe's own choice by default.
        threads: CPU threads per cell; results are reproducible only with the same number.
        save_every: Seconds between two saves of a cell's state.
        command: How the run was started, for the report.

    Returns:
        The run.

    Raises:
        ConfigError: An argument does not fit the recipe, or the folder was made with other options, another network or
            other data.
        DataError: A file of the folder is damaged.
    """
    if methods is not None:
        methods = [absolute_file_spec(name) for name in choose("methods", methods, ())]
    task = build_task(recipe, options, [name for name in methods or () if name != ALL])
    methods = choose("methods", methods, task.default_methods)
    orders = choose("orders", orders, task.default_orders)
    seeds = choose("seeds", seeds, task.default_seeds)
    streams = {order: task.make_stream(order) for order in orders}
    net = to_device(task.make_network(), options.device)
    if task.check_network is not None:
        task.check_network(net)
    methods, left_out = choose_methods(methods, task, options, net)
    if len(seeds) > 1 and (unseeded := [name for name in methods if task.methods[name].lacks_seed]):
        raise ConfigError(
            f"{', '.join(unseeded)} draws random numbers with self.generator but takes no seed, so {len(seeds)} seeds "
            "would give one result: add the keyword seed=0 to its constructor and pass it on, "
            "super().__init__(net, seed=seed), or give one seed"
        )
    cells = []
    for method in methods:
        for order in orders:
            for seed in seeds if task.methods[method].is_random else (None,):
                cell_folder = folder.absolute() / "cells" / _cell_name(method, order, seed)
                cells.append(BenchmarkCell(recipe, options, method, order, seed, threads, str(cell_folder), save_every))
    requested = {"format": FORMAT, "recipe": recipe, "options": options.to_dict(), "threads": threads}
    if stats_files := _hash_stats_files(options):
        requested["stats_files"] = stats_files
    recorded: dict[str, Any] = {"commands": []}
    if (folder / "run.json").exists():
        recorded = read_run_file(folder)
        check_same_settings(folder, recorded, json.loads(json.dumps(requested)))
    hashes = dict(recorded.get("method_files", {}))
    run = BenchmarkRun(folder, tuple(cells), sum(len(streams[cell.order]) for cell in cells), left_out)
    _check_results(run, fingerprint(net), {order: stream.hash for order, stream in streams.items()})
    hashes |= _hash_method_files(run, hashes)
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        commands = list(dict.fromkeys([*recorded["commands"], command]))
        with atomic_write(folder / "run.json") as path:
            files = {"method_files": hashes} if hashes else {}
            path.write_text(json.dumps({**requested, "commands": commands, **files}, indent=1))
    return run


def choose(name: str, given: Sequence[Any] | None, default: Sequence[Any]) -> tuple[Any, ...]:
    """Return the given values, or the default ones, each once."""
    if isinstance(given, str):
        raise TypeError(f"{name} must be a list, got {given!r}: give [{given!r}]")
    if given is not None and len(given) == 0:
        raise ConfigError(f"{name} is an empty list: leave it out for the default ones, or name at least one")
    return tuple(dict.fromkeys(default if given is None else given))


def _cell_name(method: str, order: int | None, seed: int | None) -> str:
    order_name = "standard" if order is None else f"order{order}"
    if method.startswith("file:"):  # two files may have classes of the same name
        method = f"{method.rpartition(':')[2]}-{hashlib.sha256(method.encode()).hexdigest()[:6]}"
    return f"{method}-{order_name}" + ("" if seed is None else f"-seed{seed}")


def _hash_method_files(run: BenchmarkRun, recorded: dict[str, str]) -> dict[str, str]:
    """Return the hash of each file that a method is defined in; raise if results are of an earlier version of it."""
    hashes = {}
    for cell in run.cells:
        if cell.method.startswith("file:"):
            file = Path(cell.method.removeprefix("file:").rpartition(":")[0])
            hashes[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
            has_results = (Path(cell.folder) / "about.json").exists()
            if has_results and recorded.get(str(file)) not in (None, hashes[str(file)]):
                raise ConfigError(
                    f"{file} has changed since {cell.folder} was written: use another run folder, or delete this one"
                )
    return hashes


def _hash_stats_files(options: BenchmarkOptions) -> dict[str, str]:
    """Return the hash of each file of statistics that the options name, so that results of two files never mix."""
    settings = (text.partition("=") for text in options.settings)
    files = [path.strip() for name, _, path in settings if name.strip().endswith((".source_stats", ".posterior"))]
    files += [str(options.source_stats)] if options.source_stats else []
    return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}


def _check_results(run: BenchmarkRun, network: str, stream_hashes: dict[int | None, str]) -> None:
    """Raise if complete cells, which do not run again, are of another network or other data than now."""
    for result in run.results():
        recorded = {"network": result.source, "data": result.stream_hash}
        requested = {"network": network, "data": stream_hashes[result.labels["order"]]}
        check_same_settings(run.folder, recorded, requested)

"""The robustness matrix: every method on every protocol against the source network, as numbers, tables and advice."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, isnan, nan
from pathlib import Path
from statistics import fmean

from ctta.benchmark.report.content import read_numbers
from ctta.benchmark.report.runs import MethodEntry, MissingCell, OnProgress, RecordedRun, group_by_method, read_runs
from ctta.benchmark.report.score_tables import average_results, rank_entries
from ctta.benchmark.report.tables import Table, TableCell, TableColumn, TableRow
from ctta.data.streams import PROTOCOLS
from ctta.errors import DataError
from ctta.evaluation.display import format_range, join_names
from ctta.evaluation.intervals import Interval, Verdict, estimate_difference, judge
from ctta.evaluation.results import compute_visit_errors, count_visits, estimate_drift, find_time_to_harm

#: The folder of the runs in the folder of a matrix, one per protocol.
RUNS = "protocols"


@dataclass(frozen=True)
class MatrixCell:
    """One method on one protocol. Errors are fractions.

    Attributes:
        error: The mean error.
        above_source: The error minus that of Source on the same batches.
        interval: The 95 % interval of ``above_source``; None if there are too few batches for one.
        visit_errors: The error of each visit; one number where domains do not come back.
        drift: The error of the last visit minus that of the first, with its interval; None with a single visit.
        time_to_harm: The first visit, from 1, that is above Source by more than noise; None if there is none.
        ms_per_image: Milliseconds of predicting and adapting per image.
        num_results: How many results, of different seeds, the numbers are means over.
        calibration_error: The expected calibration error; nan in numbers of earlier versions.
        peak_mib: The highest peak memory of a result, in MiB; None where it is not known.
    """

    error: float
    above_source: float
    interval: Interval | None
    visit_errors: tuple[float, ...]
    drift: Interval | None
    time_to_harm: int | None
    ms_per_image: float
    num_results: int
    calibration_error: float = nan
    peak_mib: int | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether the method beats Source here, harms, or neither by more than noise."""
        return judge(self.interval)


@dataclass(frozen=True)
class MatrixProtocol:
    """One protocol, and every method on it.

    Attributes:
        name: The protocol as typed on the command line.
        description: What it is, in one line.
        composition: The size of its batches, and how sorted and how mixed they are, in words.
        num_images: Images of the whole stream that are scored.
        cells: The methods by label, Source first.
        best: The label of the method with the lowest error, followed by those that are not behind by more than noise.
    """

    name: str
    description: str
    composition: str
    num_images: int
    cells: dict[str, MatrixCell]
    best: tuple[str, ...]

    @property
    def source(self) -> MatrixCell:
        """The source network."""
        return next(iter(self.cells.values()))

    @property
    def num_visits(self) -> int:
        """How many times the domains are visited."""
        return len(self.source.visit_errors)


@dataclass(frozen=True)
class Matrix:
    """Methods on protocols.

    Attributes:
        protocols: The protocols on which Source is complete.
        commands: The commands that have measured it.
        missing: Cells without a complete result.
    """

    protocols: tuple[MatrixProtocol, ...]
    commands: tuple[str, ...] = ()
    missing: tuple[MissingCell, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        """Labels of all methods but Source, the lowest mean error above Source first; incomplete rows come last."""
        labels = dict.fromkeys(label for protocol in self.protocols for label in list(protocol.cells)[1:])
        rows = {label: [cell.above_source for cell in self.row(label).values()] for label in labels}
        return tuple(sorted(rows, key=lambda label: (-len(rows[label]), fmean(rows[label]))))

    def row(self, method: str) -> dict[str, MatrixCell]:
        """Return the cells of a method by the names of the protocols.

        Args:
            method: Label of the method.

        Returns:
            The complete cells.
        """
        return {each.name: each.cells[method] for each in self.protocols if method in each.cells}


def is_matrix(path: Path) -> bool:
    """Return whether a path is the folder of a matrix, with one run per protocol, or its ``numbers.json``."""
    if path.is_file():
        return '"protocols": [' in path.read_text(encoding="utf-8", errors="replace")
    return any(path.glob(f"{RUNS}/*/run.json"))


def read_matrix(path: Path, *, on_progress: OnProgress | None = None) -> Matrix:
    """Read the runs of a matrix and measure them, or read the numbers of an earlier page.

    Args:
        path: The folder that a matrix was written to, or ``numbers.json`` of its page.
        on_progress: Called while the runs are read, with the number of cells done and in total.

    Returns:
        The matrix, with the protocols in the order of :data:`ctta.data.streams.PROTOCOLS`.

    Raises:
        DataError: The folder holds no matrix, or one that cannot be read; or the file does not.
    """
    if path.is_file():
        return read_numbers(path, Matrix)
    places = {name: place for place, name in enumerate(PROTOCOLS)}
    runs = [each.parent for each in (path / RUNS).glob("*/run.json")]
    if not runs:
        raise DataError(f"{path} has no runs in {RUNS}/: expected a folder that 'ctta bench matrix' wrote")
    runs.sort(key=lambda path: (places.get(path.name.partition(",")[0], len(places)), path.name))
    protocols: list[MatrixProtocol] = []
    missing: list[MissingCell] = []
    recorded = read_runs(runs, on_progress=on_progress)
    for run in recorded:
        if protocol := _build_protocol(run):
            protocols.append(protocol)
        else:
            missing.append(MissingCell(run.name, "all", "the protocol is left out, as Source is not complete"))
        missing += run.missing
    commands = dict.fromkeys(command for run in recorded for command in run.commands)
    return Matrix(tuple(protocols), tuple(commands), tuple(missing))


def _build_protocol(run: RecordedRun) -> MatrixProtocol | None:
    entries = group_by_method(run.results, run.name)
    if not entries or not entries[0].is_source:
        return None
    first, (best, *others) = entries[0].results[0], rank_entries(entries)
    close = [each for each in others if judge(estimate_difference(each.results, best.results)) != "worse"]
    definition = PROTOCOLS.get(run.name.partition(",")[0])
    return MatrixProtocol(
        name=run.name,
        description=definition.summary if definition else "",  # a name that this version does not have
        composition=first.composition.describe() if first.composition else "",
        num_images=first.total.num_images,
        cells={entry.label: _measure(entry, entries[0]) for entry in entries},
        best=(best.label, *(entry.label for entry in close)),
    )


def _measure(entry: MethodEntry, source: MethodEntry) -> MatrixCell:
    interval = estimate_difference(entry.results, source.results)
    has_visits = count_visits(entry.results) > 1
    return MatrixCell(
        error=average_results(entry),
        above_source=average_results(entry) - average_results(source),
        interval=interval,
        visit_errors=compute_visit_errors(entry.results),
        drift=estimate_drift(entry.results),
        time_to_harm=find_time_to_harm(entry.results, source.results) if has_visits else None,
        ms_per_image=fmean(result.ms_per_image for result in entry.results),
        num_results=len(entry.results),
        calibration_error=fmean(result.calibration_error for result in entry.results),
        peak_mib=max((result.peak_mib for result in entry.results if result.peak_mib is not None), default=None),
    )


SOURCE = "Source"


def build_difference_table(matrix: Matrix) -> Table:
    """Return the error above Source, in points, with the mean and the worst over the protocols."""

    def make_cell(_label: str, _protocol: MatrixProtocol, cell: MatrixCell) -> TableCell:
        note = format_range(cell.interval) if cell.interval else "too few batches"
        return TableCell(100 * cell.above_source, note=note, is_signed=True, verdict=cell.verdict)

    caption = "Error above Source in points, with its 95 % interval"
    note = (
        "▼ green: below Source by more than noise, ▲ red: above. Intervals are those of differences on the same "
        "batches; of twenty cells without a true difference, one is colored by chance. Rows: lowest mean first."
    )
    table = _build(matrix, matrix.methods, make_cell, caption, note)
    rows = []
    for row in table.rows:
        values = [cell.above_source for cell in matrix.row(row.label).values()]
        ends = [TableCell(100 * value, is_signed=True) for value in (fmean(values), max(values))]
        rows.append(replace(row, cells=(*row.cells, *ends)))
    columns = (*table.columns, TableColumn("mean", "mean", None), TableColumn("worst", "worst", None))
    return replace(table, columns=columns, rows=tuple(rows))


def build_error_table(matrix: Matrix) -> Table:
    """Return the error in percent; the lowest of a protocol is marked where its lead is more than noise."""

    def make_cell(label: str, protocol: MatrixProtocol, cell: MatrixCell) -> TableCell:
        return TableCell(100 * cell.error, is_best=protocol.best == (label,))

    note = (
        "Mean over the segments of the stream. Lowest in bold, where the lead over every other row is more than noise."
    )
    return _build(matrix, (SOURCE, *matrix.methods), make_cell, "Error in percent", note)


def build_time_table(matrix: Matrix) -> Table:
    """Return the milliseconds per image."""

    def make_cell(_label: str, _protocol: MatrixProtocol, cell: MatrixCell) -> TableCell:
        return TableCell(cell.ms_per_image, decimals=2)

    caption, note = "Milliseconds per image to predict and adapt", "Wall-clock time, without reading the images."
    return _build(matrix, (SOURCE, *matrix.methods), make_cell, caption, note)


def build_calibration_table(matrix: Matrix) -> Table | None:
    """Return the expected calibration error in percent; None for numbers of earlier versions."""

    def make_cell(_label: str, _protocol: MatrixProtocol, cell: MatrixCell) -> TableCell:
        return TableCell(100 * cell.calibration_error)

    caption, note = "Expected calibration error in percent", "Of fifteen bins of confidence, over the whole stream."
    return _drop_empty(_build(matrix, (SOURCE, *matrix.methods), make_cell, caption, note))


def build_memory_table(matrix: Matrix) -> Table | None:
    """Return the peak memory in MiB; None where it is not known of any cell."""

    def make_cell(_label: str, _protocol: MatrixProtocol, cell: MatrixCell) -> TableCell:
        return TableCell(nan if cell.peak_mib is None else cell.peak_mib, decimals=0)

    caption, note = "Peak memory in MiB", "Of the accelerator; on a CPU of the whole process, its libraries included."
    return _drop_empty(_build(matrix, (SOURCE, *matrix.methods), make_cell, caption, note))


def build_recurrence_table(matrix: Matrix) -> Table | None:
    """Return first and last visit, drift and time to harm where domains come back; None if they never do."""
    protocols = [protocol for protocol in matrix.protocols if protocol.num_visits > 1]
    if not protocols:
        return None
    columns = [
        TableColumn(f"{protocol.name}: {key}", f"{protocol.name}: {name}", None)
        for protocol in protocols
        for key, name in (
            ("first", "visit 1"),
            ("last", f"visit {protocol.num_visits}"),
            ("drift", "drift"),
            ("time_to_harm", "harm from visit"),
        )
    ]
    rows = []
    for label in (SOURCE, *matrix.methods):
        cells = [cell for protocol in protocols for cell in _build_visit_cells(label, protocol)]
        rows.append(TableRow(label, "", _count_results(matrix, label), tuple(cells)))
    caption = "Streams whose domains come back: error in percent, drift in points"
    note = (
        "Drift: last visit minus first, with its 95 % interval; Source drifts by chance where visits have other "
        "images. Harm: the first visit above Source in the same visit by more than noise, if the next one is so as "
        "well."
    )
    return Table(tuple(columns), tuple(rows), caption, (note,))


def _build_visit_cells(label: str, protocol: MatrixProtocol) -> list[TableCell]:
    cell = protocol.cells.get(label)
    if cell is None:
        return [TableCell(nan)] * 4
    first, last = cell.visit_errors[0], cell.visit_errors[-1]
    harm = nan if label == SOURCE else (cell.time_to_harm or inf)
    return [
        TableCell(100 * first),
        TableCell(100 * last),
        TableCell(100 * (last - first), is_signed=True, note=format_range(cell.drift) if cell.drift else ""),
        TableCell(harm, decimals=0, verdict="worse" if cell.time_to_harm else None),
    ]


def write_advice(matrix: Matrix) -> list[str]:
    """Return one sentence each on which methods are never above Source, best on average, and best where."""
    complete = [method for method in matrix.methods if len(matrix.row(method)) == len(matrix.protocols)]
    where = (
        f"on all {len(matrix.protocols)} protocols" if len(matrix.protocols) > 1 else f"on {matrix.protocols[0].name}"
    )
    if not complete:
        return [f"No method is complete {where} yet."]
    verdicts = {method: {cell.verdict for cell in matrix.row(method).values()} for method in complete}
    better = [method for method in complete if verdicts[method] == {"better"}]
    known = [method for method in complete if all(cell.interval for cell in matrix.row(method).values())]
    harmless = [method for method in known if "worse" not in verdicts[method] and method not in better]
    sentences = [f"Below Source by more than noise {where}: {join_names(better) or 'no method'}."]
    if harmless:
        sentences.append(f"Never above Source by more than noise: {join_names(harmless)}.")
    first = complete[0]
    row = matrix.row(first)
    mean, worst = fmean(cell.above_source for cell in row.values()), max(row, key=lambda name: row[name].above_source)
    if len(row) > 1:
        sentences.append(
            f"{first} has the lowest mean error over the protocols, {_describe_difference(mean)} Source; its worst is "
            f"{worst}, {_describe_difference(row[worst].above_source)} Source."
        )
    return [*sentences, _describe_best(matrix)]


def _describe_best(matrix: Matrix) -> str:
    """Return which method is best where by more than noise, such as 'EATA on continual and mixed, LAME on sorted'."""
    found: dict[str, list[str]] = {}
    for protocol in matrix.protocols:
        if len(protocol.best) == 1:
            found.setdefault(protocol.best[0], []).append(protocol.name)
    leads = "; ".join(f"{method} on {', '.join(names)}" for method, names in found.items())
    sentence = f"The lowest error by more than noise: {leads or 'no method on any protocol'}."
    num_close = len(matrix.protocols) - sum(map(len, found.values()))
    if num_close == 1:
        where = "the other protocol" if leads else "1 protocol"
    else:
        where = f"{'the other ' if leads else ''}{num_close} protocols"
    close = f" On {where}, the best ones are within noise of each other."
    return sentence + (close if num_close else "")


def _describe_difference(difference: float) -> str:
    points = round(100 * difference, 1)
    return f"{abs(points):.1f} points {'above' if points > 0 else 'below'}" if points else "equal to"


def _build(
    matrix: Matrix,
    labels: tuple[str, ...],
    make_cell: Callable[[str, MatrixProtocol, MatrixCell], TableCell],
    caption: str,
    note: str,
) -> Table:
    """Return a table with a row per method and a column per protocol."""
    rows = []
    for label in labels:
        found = [(each, each.cells.get(label)) for each in matrix.protocols]
        cells = [TableCell(nan) if cell is None else make_cell(label, each, cell) for each, cell in found]
        rows.append(TableRow(label, "", _count_results(matrix, label), tuple(cells)))
    columns = tuple(TableColumn(each.name, each.name, short_name=each.name) for each in matrix.protocols)
    return Table(columns, tuple(rows), caption, (note,))


def _drop_empty(table: Table) -> Table | None:
    return None if all(isnan(cell.value) for row in table.rows for cell in row.cells) else table


def _count_results(matrix: Matrix, label: str) -> int:
    return max(cell.num_results for cell in matrix.row(label).values())

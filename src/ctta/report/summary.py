"""The table of what a method costs, and how far it can be trusted."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from statistics import fmean

from ctta.evaluation.metrics import MIOU
from ctta.evaluation.results import Result
from ctta.report.entries import Entry
from ctta.report.layout import layout_of, spoken
from ctta.report.tables import Cell, Column, Row, Table, mark_best, measured


def summary_table_of(entries: Sequence[Entry]) -> Table:
    """What a method costs and how far its confidence can be trusted, beside its error or mIoU."""
    measure = entries[0].results[0].metric
    columns: list[tuple[Column, Callable[[Result], float], int]] = [
        (Column(measure.key, f"{measure.name} %", measure.best), lambda result: 100 * result.value, 1),
        (Column("calibration_error", "ECE %"), lambda result: 100 * result.calibration_error, 1),
        (Column("ms_per_image", "ms per image"), lambda result: 1000 * result.seconds / result.total.count, 2),
    ]
    if measure == MIOU:
        accuracy = Column("pixel_accuracy", "pixel accuracy %", "highest")
        columns.insert(1, (accuracy, lambda result: 100 * (1 - result.error), 1))
    rows = []
    for entry in entries:
        cells = [measured([figure(result) for result in entry.results], digits) for _column, figure, digits in columns]
        memory = Cell(_peak_mib(entry), decimals=0)
        skipped = sum(result.num_skipped for result in entry.results)
        num_batches = sum(result.num_batches for result in entry.results)
        updates = Cell(skipped, decimals=0, remark=f"of {num_batches}" if skipped else "")
        rows.append(Row(entry.label, entry.run, len(entry.results), (*cells, memory, _worst(entry), updates)))
    heads = (
        *(column for column, _figure, _digits in columns),
        Column("peak_mib", "peak memory MiB"),
        Column("worst", f"worst domain, {measure.name} %", measure.best),
        Column("skipped", "skipped updates", None),
    )
    return Table(heads, mark_best(rows, heads), "Calibration, cost and worst domain")


def _peak_mib(entry: Entry) -> float:
    """Return the highest peak memory of an entry; nan where no system reported it."""
    return max((result.peak_mib for result in entry.results if result.peak_mib is not None), default=nan)


def _worst(entry: Entry) -> Cell:
    """The domain with the worst figure; in a stream that repeats itself, also the round it was in."""
    layout = layout_of([entry.results[0].domains])
    gathered: dict[str, list[float]] = {}
    for result in entry.results:
        for number, (domain, value) in enumerate(zip(result.domains, result.values, strict=True)):
            gathered.setdefault(layout.place_of(number, domain), []).append(100 * value)
    pick = max if entry.results[0].metric.best == "lowest" else min
    worst = pick(gathered, key=lambda place: fmean(gathered[place]))
    return replace(measured(gathered[worst]), remark=spoken(worst), deviation=None)

"""The table of how well each class is found, where results are of pixels."""

from collections.abc import Sequence
from math import isnan
from statistics import fmean

from ctta.evaluation.metrics import MIOU
from ctta.report.entries import Entry
from ctta.report.tables import NO_NUMBER, Column, Row, Table, mark_best, measured


def class_table_of(entries: Sequence[Entry]) -> Table | None:
    """Classes across, methods down, their mean last; None where results are of images.

    The IoU of a class is that of all images together. A class can be rare in one domain and absent from the next, and
    a mean over domains would give its few pixels there the weight of many.
    """
    if entries[0].results[0].metric != MIOU:
        return None
    found = [[result.class_iou for result in entry.results] for entry in entries]
    names = tuple(dict.fromkeys(name for results in found for classes in results for name in classes))
    rows = []
    for entry, results in zip(entries, found, strict=True):
        cells = [measured([_percent(classes.get(name)) for classes in results]) for name in names]
        mean = measured([100 * fmean(iou for iou in classes.values() if iou is not None) for classes in results])
        rows.append(Row(entry.label, entry.run, len(results), (*cells, mean)))
    columns = (*(Column(name, name, MIOU.best) for name in names), Column("mean", "mean", MIOU.best))
    caption = "IoU of each class in percent, over all images together"
    if any(isnan(cell.value) for row in rows for cell in row.cells):
        caption += f"; {NO_NUMBER} where neither labels nor predictions have it"
    return Table(columns, mark_best(rows, columns), caption)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share

"""The table of streams whose domains come back: the score at each visit, its drift, and the first that does harm."""

from collections.abc import Sequence
from dataclasses import replace
from math import nan

from ctta.benchmark.report.layout import MAX_COLUMNS, infer_layout
from ctta.benchmark.report.sections import MethodEntry
from ctta.benchmark.report.tables import Table, TableCell, TableColumn, TableRow, average
from ctta.evaluation.robustness import find_time_to_harm

_DRIFT = "Drift: last visit minus first, in points"
_HARM = ". Harm: the first visit that is worse than Source by more than noise, and so is the next"


def build_visit_table(entries: Sequence[MethodEntry]) -> Table | None:
    """Return the score of each method at each visit; None if the domains come once.

    Where the table of scores has a column per visit already, only the first and the last visit are repeated.
    """
    metric = entries[0].results[0].metric
    num_visits = min(len(result.visit_values) for entry in entries for result in entry.results)
    if num_visits < 2:
        return None
    has_columns = infer_layout([entries[0].results[0].domains]).by == "round"
    num_shown = 2 if has_columns else min(num_visits, MAX_COLUMNS)
    shown = [round(place * (num_visits - 1) / (num_shown - 1)) for place in range(num_shown)]
    source = next((entry for entry in entries if entry.is_source), None)
    rows = []
    for entry in entries:
        values = [[100 * result.visit_values[visit] for result in entry.results] for visit in shown]
        drifts = [100 * result.drift for result in entry.results]
        cells = [*(average(each) for each in values), replace(average(drifts), is_signed=True)]
        if source is not None:
            cells.append(TableCell(find_time_to_harm(entry.results, source.results) or nan, decimals=0))
        rows.append(TableRow(entry.label, entry.run, len(entry.results), tuple(cells)))
    columns = [TableColumn(f"visit {visit + 1}", f"visit {visit + 1}", metric.best) for visit in shown]
    columns += [TableColumn("drift", "drift", None), *([TableColumn("harm", "harm", None)] if source else [])]
    caption = f"{metric.title} in percent at each visit of the domains. {_DRIFT}{_HARM if source else ''}"
    return Table(tuple(columns), tuple(rows), caption)

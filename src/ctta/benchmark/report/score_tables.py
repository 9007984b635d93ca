"""The tables of a report: scores per domain, per class and per visit, and calibration and cost.

A number is marked only if it leads every other row: the 95 % interval of each difference, paired over the same batches,
excludes zero (:mod:`ctta.evaluation.intervals`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isnan, nan
from statistics import fmean

from ctta.benchmark.report.published import PublishedRow, find_published_table
from ctta.benchmark.report.runs import MethodEntry, group_by_method, saw_same_batches
from ctta.benchmark.report.tables import (
    MAX_COLUMNS,
    ColumnLayout,
    Table,
    TableCell,
    TableColumn,
    TableRow,
    average,
    infer_layout,
    replace_underscores,
)
from ctta.errors import InputError
from ctta.evaluation.display import NO_NUMBER, format_percent, format_range, to_points, write_headline
from ctta.evaluation.intervals import Statistic, average_value, estimate_difference, estimate_interval
from ctta.evaluation.metrics import MIOU, BatchScore, PixelScore, Score
from ctta.evaluation.results import Result, find_time_to_harm

#: Classes of images are listed in a table up to this number.
MAX_CLASS_COLUMNS = 20


def score_table(results: Sequence[Result]) -> Table:
    """Return the table of the CoTTA paper: one row per method, one column per domain, and the mean last.

    Streams with many domains have one column per round or per corruption instead. The numbers are errors for image
    classification and mIoU for segmentation. Incomplete results are left out, with a note. The best number of a column
    is marked where its lead over every other row is more than noise (:mod:`ctta.evaluation.intervals`).

    Args:
        results: Results on the same stream; their orders may differ.

    Returns:
        The table, with published numbers where the stream is the published one.

    Raises:
        InputError: If no result is complete, or if results of the same order saw different batches.
    """
    complete = [result for result in results if result.is_complete]
    if not complete:
        raise InputError(f"a table needs at least one complete result, got {len(results)} incomplete ones")
    if not saw_same_batches(complete):
        raise InputError("these results saw different batches and are not comparable: make one table per stream")
    table = build_score_table(group_by_method(complete))
    left_out = [f"{result.method}: incomplete, left out" for result in results if not result.is_complete]
    return replace(table, notes=(*table.notes, *left_out))


def build_score_table(entries: Sequence[MethodEntry]) -> Table:
    """Return the table of scores for entries of one or more runs."""
    metric = entries[0].results[0].metric
    layout = infer_layout([result.domains for entry in entries for result in entry.results])
    columns: dict[TableColumn, Statistic] = {}
    for key in layout.columns:
        column = TableColumn(key, layout.format_heading(key), metric.best, layout.format_short_heading(key))
        columns[column] = column_statistic(layout, key)
    columns[TableColumn("mean", "mean", metric.best)] = average_value
    rows = _build_rows(entries, columns)
    published, notes = find_published_table(entries, layout)
    if published:
        rows = [
            _add_published(row, published.rows.get(entry.method), layout)
            for row, entry in zip(rows, entries, strict=True)
        ]
    caption = "; ".join(filter(None, (f"{metric.title} in percent", layout.describe())))
    return Table(tuple(columns), tuple(rows), caption, notes)


def build_class_table(entries: Sequence[MethodEntry]) -> Table | None:
    """Return the table of IoU or error per class, with the mean last; None for images of many classes.

    The value of a class is computed over all images. A class can be rare in one domain and absent from the next, and a
    mean over domains would give its few pixels there the weight of many.
    """
    metric = entries[0].results[0].metric
    results = [result for entry in entries for result in entry.results]
    names = tuple(dict.fromkeys(name for result in results for name in class_values(result)))
    if metric != MIOU and (len(names) > MAX_CLASS_COLUMNS or not all(class_values(result) for result in results)):
        return None
    columns = {TableColumn(name, name, metric.best): value for name, value in class_statistics(names).items()}
    rows = _build_rows(entries, columns)
    caption = f"{'IoU' if metric == MIOU else 'Error'} per class in percent, over all images"
    if any(isnan(cell.value) for row in rows for cell in row.cells):
        absent = "is in neither labels nor predictions" if metric == MIOU else "has no images"
        caption += f"; {NO_NUMBER} marks a class that {absent}"
    return Table(tuple(columns), tuple(rows), caption)


def build_summary_table(entries: Sequence[MethodEntry]) -> Table:
    """Return the table of calibration, cost, worst domain and worst seed, next to the mean score."""
    metric = entries[0].results[0].metric
    columns: dict[TableColumn, Statistic] = {TableColumn(metric.key, f"{metric.name} (%)", metric.best): average_value}
    if metric == MIOU:
        columns[TableColumn("pixel_accuracy", "pixel accuracy (%)", "highest")] = compute_accuracy
    columns[TableColumn("calibration_error", "ECE (%)")] = compute_calibration
    has_seeds = any(len(entry.seeds) > 1 for entry in entries)
    rows = []
    for entry, row in zip(entries, _build_rows(entries, columns), strict=True):
        interval = estimate_interval(entry.results)
        mean = replace(row.cells[0], note=format_range(interval) if interval else "")
        time = average([result.ms_per_image for result in entry.results], decimals=2)
        peaks = (result.peak_mib for result in entry.results if result.peak_mib is not None)
        memory = TableCell(max(peaks, default=nan), decimals=0)
        num_skipped = sum(result.num_skipped for result in entry.results)
        num_batches = sum(result.num_batches for result in entry.results)
        updates = TableCell(num_skipped, decimals=0, note=f"of {num_batches}" if num_skipped else "")
        shares = [result.update_share for result in entry.results if result.update_share is not None]
        learned = TableCell(100 * fmean(shares) if shares else nan, decimals=0)
        worst = (_find_worst_domain(entry), *([_find_worst_seed(entry)] if has_seeds else []))
        others = (time, memory, *worst, updates, learned, _compare_with_best(entry, entries))
        rows.append(replace(row, cells=(mean, *row.cells[1:], *others)))
    headings = {
        "ms_per_image": "ms per image",
        "peak_mib": "peak memory (MiB)",
        "worst": f"worst domain, {metric.name} (%)",
        **({"worst_seed": f"worst seed, {metric.name} (%)"} if has_seeds else {}),
        "skipped": "skipped updates",
        "learned": "learned from (% of batches)",
        "difference": "minus best (points)",
    }
    more = (TableColumn(key, heading, None) for key, heading in headings.items())
    return Table((*columns, *more), tuple(rows), "Calibration, cost and worst domain")


def _build_rows(entries: Sequence[MethodEntry], columns: Mapping[TableColumn, Statistic]) -> list[TableRow]:
    """Return a row per entry: the mean of each number over its results, in percent.

    The best number of a column is marked if it leads all others by more than noise.
    """
    rows = [
        [average([100 * compute(each, each.segments) for each in entry.results]) for compute in columns.values()]
        for entry in entries
    ]
    for number, (column, statistic) in enumerate(columns.items()):
        known = {place: cells[number].value for place, cells in enumerate(rows) if not isnan(cells[number].value)}
        if len(known) > 1:
            best = (min if column.best == "lowest" else max)(known, key=known.__getitem__)
            others = (entries[place].results for place in known if place != best)
            leads = (estimate_difference(entries[best].results, other, statistic) for other in others)
            if all(lead is not None and lead.excludes_zero for lead in leads):
                rows[best][number] = replace(rows[best][number], is_best=True)
    return [
        TableRow(entry.label, entry.run, len(entry.results), tuple(cells))
        for entry, cells in zip(entries, rows, strict=True)
    ]


def _add_published(row: TableRow, published: PublishedRow | None, layout: ColumnLayout) -> TableRow:
    """Return a row with the published numbers beside its own."""
    if published is None:
        return row
    *cells, mean = row.cells
    if layout.by.startswith("domain"):
        keys = [column if layout.is_repeating else column.split(" ")[0] for column in layout.columns]
        cells = [replace(cell, published=published.columns.get(key)) for cell, key in zip(cells, keys, strict=True)]
    mean = replace(mean, published=published.mean, published_deviation=published.deviation)
    return replace(row, cells=(*cells, mean))


def _compare_with_best(entry: MethodEntry, entries: Sequence[MethodEntry]) -> TableCell:
    """Return the difference of the mean to that of the best entry, with its interval; no number for the best one."""
    best = rank_entries(entries)[0]
    if entry is best:
        return TableCell(nan)
    value, lowest = (to_points(average_results(each)) for each in (entry, best))
    interval = estimate_difference(entry.results, best.results)
    return TableCell(value - lowest, note=format_range(interval) if interval else "")


def _find_worst_domain(entry: MethodEntry) -> TableCell:
    """Return the worst score of a domain; in a stream with several rounds, of a domain in one round."""
    layout = infer_layout([entry.results[0].domains])
    grouped: dict[str, list[float]] = {}
    for result in entry.results:
        for number, (domain, value) in enumerate(zip(result.domains, result.values, strict=True)):
            grouped.setdefault(layout.name_segment(number, domain), []).append(100 * value)
    pick = max if entry.results[0].metric.best == "lowest" else min
    worst = pick(grouped, key=lambda name: fmean(grouped[name]))
    return replace(average(grouped[worst]), note=replace_underscores(worst), deviation=None)


def _find_worst_seed(entry: MethodEntry) -> TableCell:
    """Return the worst mean score of a seed, over its orders; no number for a single seed."""
    if len(entry.seeds) < 2:
        return TableCell(nan)
    values = {
        seed: fmean(100 * result.value for result in entry.results if result.labels.get("seed") == seed)
        for seed in entry.seeds
    }
    worst = (max if entry.results[0].metric.best == "lowest" else min)(values, key=values.__getitem__)
    return TableCell(values[worst], note=f"seed {worst}")


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


def column_statistic(layout: ColumnLayout, column: str) -> Statistic:
    """Return the mean score of the segments of a column."""

    def compute(result: Result, scores: Sequence[BatchScore | None]) -> float:
        values = [
            score.value
            for number, (domain, score) in enumerate(zip(result.domains, scores, strict=True))
            if score is not None and layout.find_column(number, domain) == column
        ]
        return fmean(values) if values else nan

    return compute


def class_values(result: Result) -> dict[str, float | None]:
    """Return the IoU of each class for labels of pixels, and its error for labels of images; empty if not counted."""
    return result.class_iou if result.metric == MIOU else result.class_error


def class_statistics(names: Sequence[str]) -> dict[str, Statistic]:
    """Return the IoU or the error of each class over all images, and their mean, by name."""
    totals: dict[int, dict[str, float | None]] = {}  # by the identity of the scores, which results keep

    def compute(name: str, result: Result, scores: Sequence[BatchScore | None]) -> float:
        if id(scores) not in totals:
            total = Score.sum(filter(None, scores))
            values = total.class_iou if isinstance(total, PixelScore) else getattr(total, "class_error", ())
            named = dict(zip(class_values(result), values, strict=True))
            totals[id(scores)] = named | {"mean": fmean(value for value in values if value is not None)}
        value = totals[id(scores)].get(name)
        return nan if value is None else value

    return {name: partial(compute, name) for name in (*names, "mean")}


def compute_calibration(_result: Result, scores: Sequence[BatchScore | None]) -> float:
    """Return the expected calibration error over the whole stream."""
    return Score.sum(filter(None, scores)).calibration_error


def compute_accuracy(_result: Result, scores: Sequence[BatchScore | None]) -> float:
    """Return the mean accuracy over segments."""
    return fmean(1 - score.error for score in filter(None, scores))


def rank_entries(entries: Sequence[MethodEntry]) -> list[MethodEntry]:
    """Return the entries, the best mean first."""
    sign = 1 if entries[0].results[0].metric.best == "lowest" else -1
    return sorted(entries, key=lambda entry: sign * average_results(entry))


def average_results(entry: MethodEntry) -> float:
    """Return the mean of the metric over all results of an entry."""
    return fmean(result.value for result in entry.results)


def describe_outcome(entries: Sequence[MethodEntry]) -> str:
    """Return the outcome in a sentence: the best row, its lead over the next with an interval, and the source."""
    has_several_runs = len({entry.run for entry in entries}) > 1
    ranked = rank_entries(entries)
    names = [f"{entry.label} ({entry.run})" if has_several_runs else entry.label for entry in ranked]
    sentence = write_headline(
        entries[0].results[0].metric,
        [(name, entry.results) for name, entry in zip(names, ranked, strict=True)],
        [_describe_runs(each) for each in (ranked[:1], ranked[:2], entries)],
    )
    sources = [entry for entry in ranked[2:] if entry.is_source]
    if sources and len({format_percent(average_results(entry)) for entry in ranked}) > 1:
        sentence += f" The source network has {format_percent(average_results(sources[0]))}."
    return sentence


def _describe_runs(entries: Sequence[MethodEntry]) -> str:
    """Return what the numbers are means over, in words: 'one seed', or '3 seeds' and '10 orders'."""
    if not any("order" in result.labels for entry in entries for result in entry.results):
        return "one run" if len(entries) == 1 else "one run each"
    num_seeds = min((len(entry.seeds) for entry in entries if entry.seeds), default=0)
    num_orders = min(len(entry.orders) for entry in entries)
    parts = []
    if num_seeds:
        parts.append("one seed" if num_seeds == 1 else f"{num_seeds} seeds")
    if num_orders > 1 or not parts:
        parts.append("one order" if num_orders == 1 else f"{num_orders} orders")
    return ", ".join(parts)

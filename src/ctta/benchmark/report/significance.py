"""Which numbers of a table are best beyond noise, and the sentence that says so.

A number is marked only if it leads every other row: the 95 % interval of each difference, paired over the same batches,
excludes zero (:mod:`ctta.evaluation.intervals`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isnan, nan
from statistics import fmean

from ctta.benchmark.report.runs import MethodEntry
from ctta.benchmark.report.tables import ColumnLayout, TableColumn, TableRow
from ctta.evaluation.display import describe_best, format_percent, format_range
from ctta.evaluation.intervals import Statistic, estimate_difference, estimate_interval
from ctta.evaluation.metrics import MIOU, BatchScore, Metric, PixelScore, Score
from ctta.evaluation.results import Result


def mark_best(
    rows: Sequence[TableRow],
    columns: Sequence[TableColumn],
    entries: Sequence[MethodEntry],
    statistics: Mapping[str, Statistic],
) -> tuple[TableRow, ...]:
    """Return the rows with the best number of each column marked, if it leads all others by more than noise.

    Args:
        rows: The rows.
        columns: Their columns.
        entries: The results of each row.
        statistics: How the number of a column is computed, by its key; other columns have no marks.

    Returns:
        The rows with marks.
    """
    marked = [list(row.cells) for row in rows]
    for number, column in enumerate(columns):
        statistic = statistics.get(column.key)
        known = [place for place, row in enumerate(rows) if not isnan(row.cells[number].value)]
        if column.best is None or statistic is None or len(known) < 2:
            continue
        pick = min if column.best == "lowest" else max
        best = pick(known, key=lambda place: rows[place].cells[number].value)
        others = [place for place in known if place != best]
        if all(_is_ahead(entries[best], entries[other], statistic) for other in others):
            marked[best][number] = replace(marked[best][number], is_best=True)
    return tuple(replace(row, cells=tuple(cells)) for row, cells in zip(rows, marked, strict=True))


def _is_ahead(best: MethodEntry, other: MethodEntry, statistic: Statistic) -> bool:
    difference = estimate_difference(best.results, other.results, statistic)
    return difference is not None and difference.excludes_zero


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

    def sum_scores(result: Result, scores: Sequence[BatchScore | None]) -> dict[str, float | None]:
        if id(scores) not in totals:
            total = Score.sum(score for score in scores if score is not None)
            values = total.class_iou if isinstance(total, PixelScore) else getattr(total, "class_error", ())
            totals[id(scores)] = dict(zip(class_values(result), values, strict=True))
        return totals[id(scores)]

    def make(name: str) -> Statistic:
        def compute(result: Result, scores: Sequence[BatchScore | None]) -> float:
            value = sum_scores(result, scores).get(name)
            return nan if value is None else value

        return compute

    def compute_mean(result: Result, scores: Sequence[BatchScore | None]) -> float:
        return fmean(value for value in sum_scores(result, scores).values() if value is not None)

    return {**{name: make(name) for name in names}, "mean": compute_mean}


def compute_calibration(result: Result, scores: Sequence[BatchScore | None]) -> float:
    """Return the expected calibration error over the whole stream."""
    return Score.sum(score for score in scores if score is not None).calibration_error


def compute_accuracy(result: Result, scores: Sequence[BatchScore | None]) -> float:
    """Return the mean accuracy over segments."""
    return fmean(1 - score.error for score in scores if score is not None)


def rank_entries(entries: Sequence[MethodEntry]) -> list[MethodEntry]:
    """Return the entries, the best mean first."""
    sign = 1 if entries[0].results[0].metric.best == "lowest" else -1
    return sorted(entries, key=lambda entry: sign * average_results(entry))


def average_results(entry: MethodEntry) -> float:
    """Return the mean of the metric over all results of an entry."""
    return fmean(result.value for result in entry.results)


def write_headline(entries: Sequence[MethodEntry], metric: Metric) -> str:
    """Return the outcome in a sentence: the best row, its lead over the next with an interval, and the source."""
    has_several_runs = len({entry.run for entry in entries}) > 1

    def name(entry: MethodEntry) -> str:
        return f"{entry.label} ({entry.run})" if has_several_runs else entry.label

    first, *others = rank_entries(entries)
    value = average_results(first)
    if not others:
        interval = estimate_interval(first.results)
        text = f", 95 % interval {format_range(interval)}" if interval else ""
        return f"{name(first)} has a mean {metric.name} of {format_percent(value)}{text}; {_describe_runs([first])}."
    second = others[0]
    if all(f"{100 * average_results(other):.1f}" == f"{100 * value:.1f}" for other in others):
        return f"All rows have the same mean {metric.name}, {format_percent(value)}; {_describe_runs(entries)}."
    sentence = describe_best(
        metric,
        name(first),
        value,
        runner_up=name(second),
        runner_up_value=average_results(second),
        lead=estimate_difference(first.results, second.results),
        runs=_describe_runs([first, second]),
    )
    sources = [entry for entry in others[1:] if entry.is_source]
    if sources:
        sentence += f". The source network has {format_percent(average_results(sources[0]))}"
    return f"{sentence}."


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

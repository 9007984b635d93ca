"""Results as text, HTML and plots for people: a few lines, a small table for notebooks, scores over time."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ctta.evaluation.intervals import Interval, cut_evenly, estimate_difference, estimate_interval
from ctta.evaluation.metrics import Metric, Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ctta.evaluation.results import Result


#: Decimals kept before formatting; floating-point noise beyond them would print 21.35 as 21.3.
NUM_DIGITS = 6
NO_NUMBER = "\N{EN DASH}"
MAX_ROWS = 40  # of a table in a notebook
_CELL = "padding: .15em .7em; text-align: right; font-variant-numeric: tabular-nums"


def to_points(fraction: float) -> float:
    """Return a fraction in percent as it is printed, with one decimal, however it was computed.

    >>> to_points(0.6375), to_points(51 / 80), to_points(sum([0.6375] * 3) / 3)
    (63.8, 63.8, 63.8)
    """
    return round(round(100 * fraction, NUM_DIGITS), 1) + 0.0  # never -0.0


def format_percent(fraction: float) -> str:
    """Return a fraction as a percentage with one decimal."""
    return f"{to_points(fraction):.1f} %"


def subtract_printed(one: float, other: float) -> float:
    """Return one fraction minus another in points, from the printed numbers, so that readers can verify it.

    >>> subtract_printed(0.52004, 0.25849)
    26.2
    """
    return round(to_points(one) - to_points(other), 1)


def format_range(interval: Interval | None) -> str:
    """Return the ends of an interval in percent, such as '27.5 to 30.5'; an en dash if there is none."""
    if interval is None:
        return NO_NUMBER
    return f"{_signed(interval.low)} to {_signed(interval.high)}"


def join_names(names: Sequence[str], max_names: int = 5) -> str:
    """Return names as a list, of which only the first ``max_names`` are named.

    >>> join_names(["fog", "snow", "frost"]), join_names(["fog", "snow", "frost"], max_names=1)
    ('fog, snow, frost', 'fog and 2 more')
    """
    rest = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + rest


def write_headline(metric: Metric, ranking: Sequence[tuple[str, Sequence["Result"]]], runs: Sequence[str]) -> str:
    """Return the outcome of a comparison in a sentence: the best method, and whether its lead is more than noise.

    The best of ``ranking`` comes first. ``runs`` says what the numbers of the best method, of the best two and of all
    are means over, such as 'one seed'.
    """
    (best, results), *others = ranking
    values = [fmean(result.value for result in each) for _, each in ranking]
    if not others:
        interval = estimate_interval(results)
        text = f", 95 % interval {format_range(interval)}" if interval else ""
        return f"{best} has a mean {metric.name} of {format_percent(values[0])}{text}; {runs[0]}."
    if len({format_percent(value) for value in values}) == 1:
        return f"All rows have the same mean {metric.name}, {format_percent(values[0])}; {runs[2]}."
    second, lead = others[0][0], estimate_difference(results, others[0][1])
    points = abs(subtract_printed(values[0], values[1]))
    if points == 0 or (lead is not None and lead.low == lead.high == 0):
        both = f"{best} and {second} have the {metric.best} mean {metric.name}"
        return f"{both}, both {format_percent(values[0])}; {runs[1]}."
    gap = f"{points:.1f} points {'below' if metric.best == 'lowest' else 'above'} {second}"
    sentence = f"{best} has the {metric.best} mean {metric.name}, {format_percent(values[0])}"
    if lead is None:
        return f"{sentence}, {gap}; too few batches for an interval; {runs[1]}."
    low, high = sorted(end if metric.best == "highest" else -end for end in (lead.low, lead.high))
    doubt = "" if lead.excludes_zero else " but not beyond noise:"
    return f"{sentence},{doubt} {gap}, 95 % interval {_signed(low)} to {_signed(high)}; {runs[1]}."


def describe_result(result: "Result") -> str:
    """Return a result in three lines: what was evaluated, how well, and at what cost."""
    head = f"{result.method} on {shorten_name(strip_hashes(result.stream))}"
    if not result.is_complete:
        return f"{head}\nincomplete: {len(result.batches)} of {result.num_batches} batches\nstream {result.stream_hash}"
    counts = [
        f"{result.total.num_images:,} image{'s' if result.total.num_images > 1 else ''}",
        f"{result.num_batches:,} batch{'es' if result.num_batches > 1 else ''}",
        f"{len(result.domains)} segment{'s' if len(result.domains) > 1 else ''}",
    ]
    cost = [f"{result.ms_per_image:.2f} ms per image"]
    if result.peak_mib is not None:
        cost.append(f"{result.peak_mib:,} MiB peak memory")
    if result.update_share not in (None, 0, 1):
        cost.append(f"learned from {result.update_share:.0%} of the batches")
    if result.num_skipped:
        cost.append(f"{result.num_skipped} of {result.num_batches} updates skipped")
    cost.append(f"stream {result.stream_hash}")
    return f"{head} ({', '.join(counts)})\n{_describe_score(result)}\n{', '.join(cost)}"


def _describe_score(result: "Result") -> str:
    if not result.is_labeled:
        most = max(range(len(result.num_predicted)), key=lambda label: result.num_predicted[label])
        share = result.num_predicted[most] / (sum(result.num_predicted) or 1)
        name = result.class_names[most] if most < len(result.class_names) else f"class {most}"
        confidence = f"mean confidence {format_percent(result.confidence)}"
        return f"no labels: {confidence}, most frequent answer {name} ({format_percent(share)})"
    metric, (domain, worst) = result.metric, result.worst
    interval = f" (95 % interval {format_range(result.interval)})" if result.interval else ""
    parts = [f"{metric.name} {format_percent(result.value)}{interval}"]
    if len(result.domains) > 1:
        parts.append(f"worst {domain} with {format_percent(worst)}")
    parts.append(f"calibration error {format_percent(result.calibration_error)}")
    return ", ".join(parts)


def render_html_table(heading: str, records: Sequence[dict[str, Any]], note: str = "") -> str:
    """Return rows with the same keys as a small table for a notebook; every text is escaped."""
    head = "".join(f'<th style="{_CELL}">{escape(str(key))}</th>' for key in records[0]) if records else ""
    rows = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{_format_cell(value)}</td>' for value in record.values()) + "</tr>"
        for record in records[:MAX_ROWS]
    )
    hidden = f" {len(records) - MAX_ROWS} more rows are not shown." if len(records) > MAX_ROWS else ""
    lines = "<br>".join(escape(line) for line in heading.splitlines())
    return (
        f"<div><p>{lines}</p><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"<p>{escape(note + hidden)}</p></div>"
    )


def render_text_table(records: Sequence[dict[str, Any]]) -> str:
    """Return rows as aligned columns of text, the first to the left and the others to the right."""
    lines = [[str(key) for key in records[0]], *([str(value) for value in record.values()] for record in records)]
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    texts = []
    for name, *cells in lines:
        aligned = [text.rjust(width) for text, width in zip(cells, others, strict=True)]
        texts.append("  ".join([name.ljust(first), *aligned]).rstrip())
    return "\n".join(texts)


def make_frame(records: Sequence[dict[str, Any]]) -> Any:
    """Return rows as a pandas DataFrame; raise an ImportError that says what works without pandas."""
    import importlib

    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise ImportError("to_frame needs pandas: pip install pandas, or use to_records()") from error
    return pandas.DataFrame(list(records))


def strip_hashes(name: str) -> str:
    """Return the name of a stream without the hashes of its images, such as 'mine' for 'mine[1095f631 6aff0335]'."""
    return re.sub(r"\[[0-9a-f ]{8,}\]", "", name)


def shorten_name(name: str, length: int = 90) -> str:
    """Return a name of at most ``length`` characters."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _signed(fraction: float) -> str:
    text = f"{to_points(fraction):.1f}"
    return text.replace("-", "\N{MINUS SIGN}") if float(text) else text.lstrip("-")


def _format_cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))


MAX_POINTS = 150  # per curve: more would show noise
MIN_IMAGES = 250  # per point: the error then has a standard deviation of at most 3 percentage points
MAX_NAMES = 20  # domains that are named


def compute_points(result: "Result") -> tuple[tuple[float, ...], list[float]]:
    """Return the points of a curve: the images seen at the middle of each part of a segment, and the metric in percent.

    Segments are cut into equal parts of whole batches.
    """
    positions, values, num_seen = [], [], 0
    for scores in result.scores_by_segment:
        num_images = sum(score.num_images for score in scores)
        num_parts = max(1, min(MAX_POINTS // len(result.domains), num_images // MIN_IMAGES, len(scores)))
        for part_score in map(Score.sum, cut_evenly(scores, num_parts)):
            positions.append(num_seen + part_score.num_images / 2)
            values.append(100 * part_score.value)
            num_seen += part_score.num_images
    return tuple(positions), values


def plot_result(result: "Result", ax: "Axes | None") -> "Axes":
    """Draw the metric over the images seen, with a line at each change of domain."""
    positions, values = compute_points(result)
    ax = _get_axes(ax, (9, 3.5))
    is_first = not ax.lines
    ax.plot(positions, values, label=result.method, marker="." if len(positions) < 30 else "")
    if is_first:
        ends = list(accumulate(segment.num_images for segment in result.segments))
        for end in ends[:-1]:
            ax.axvline(end, color="0.85", linewidth=0.7, zorder=0)
        if 1 < len(ends) <= MAX_NAMES:
            middles = [(start + end) / 2 for start, end in zip([0, *ends], ends, strict=False)]
            top = ax.secondary_xaxis("top")
            top.set_xticks(middles, [domain.replace("_", " ") for domain in result.domains], rotation=35, ha="left")
            top.tick_params(length=0, labelsize=8)
        ax.set(xlabel="images seen", ylabel=f"{result.metric.name} (%)", xlim=(0, ends[-1]))
    ax.legend(frameon=False)
    return ax


def plot_methods(results: Mapping[str, "Result"], ax: "Axes | None") -> "Axes":
    """Draw one point per method with its 95 % interval."""
    ax = _get_axes(ax, (6, 0.8 + 0.35 * len(results)))
    for place, result in enumerate(results.values()):
        value, interval, errors = result.value, result.interval, None
        if interval is not None:
            errors = [[100 * (value - interval.low)], [100 * (interval.high - value)]]
        ax.errorbar([100 * value], [place], xerr=errors, fmt="o", capsize=3)
    ax.set_yticks(range(len(results)), list(results))
    ax.invert_yaxis()
    ax.set_xlabel(f"mean {next(iter(results.values())).metric.name} (%), 95 % interval")
    return ax


def _get_axes(ax: "Axes | None", size: tuple[float, float]) -> "Axes":
    """Return the given axes, or those of a new figure."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'ctta[bench]'") from error
    return pyplot.subplots(figsize=size, layout="constrained")[1]

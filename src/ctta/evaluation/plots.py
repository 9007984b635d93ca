"""Plots of results for notebooks: scores over time, and methods with their intervals."""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from ctta.evaluation.intervals import Interval
from ctta.evaluation.metrics import BatchScore, Metric, Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ctta.evaluation.results import Result

MAX_POINTS = 150  # per curve: more would show noise
MIN_IMAGES = 250  # per point: the error then has a standard deviation of at most 3 percentage points
MAX_NAMES = 20  # domains that are named


def compute_points(result: "Result") -> tuple[tuple[float, ...], list[float]]:
    """Return positions and values of the points of a curve; segments are cut into equal parts of whole batches.

    Args:
        result: A complete result with labels.

    Returns:
        The number of images seen at the middle of each part, and the metric of the part in percent.
    """
    segments: list[list[BatchScore]] = [[] for _ in result.domains]
    for batch in result.batches:
        segments[batch.segment].append(batch.score)
    positions, values, num_seen = [], [], 0
    for scores in segments:
        num_images = sum(score.num_images for score in scores)
        num_parts = max(1, min(MAX_POINTS // len(segments), num_images // MIN_IMAGES, len(scores)))
        cuts = [len(scores) * part // num_parts for part in range(num_parts + 1)]
        for first, last in pairwise(cuts):
            part_score = Score.sum(scores[first:last])
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


def plot_methods(
    values: Mapping[str, float], intervals: Mapping[str, Interval | None], metric: Metric, ax: "Axes | None"
) -> "Axes":
    """Draw one point per method with its 95 % interval."""
    ax = _get_axes(ax, (6, 0.8 + 0.35 * len(values)))
    for place, (name, value) in enumerate(values.items()):
        interval = intervals[name]
        errors: Any = None
        if interval is not None:
            errors = [[100 * (value - interval.low)], [100 * (interval.high - value)]]
        ax.errorbar([100 * value], [place], xerr=errors, fmt="o", capsize=3)
    ax.set_yticks(range(len(values)), list(values))
    ax.invert_yaxis()
    ax.set_xlabel(f"mean {metric.name} (%), 95 % interval")
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

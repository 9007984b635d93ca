"""The picture of error or mIoU against time."""

from collections.abc import Mapping
from math import log10
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from ctta.evaluation.metrics import Metric
from ctta.report.colors import FAINT, INK, Style
from ctta.report.svg import plot_style, printable, shortened
from ctta.report.tables import Table

MARKERS = "osD^vP*X"  # one for each run
LINE_HEIGHT, LETTER_WIDTH = 0.055, 0.0105  # of a name, as shares of the picture


def cost(summary: Table, measure: Metric, styles: Mapping[str, Style]) -> Figure:
    """Error, or mIoU, against milliseconds per image: lower left, or upper left, is better."""
    keys = [column.key for column in summary.columns]
    runs = summary.runs
    points = {
        (row.run, row.label): tuple(row.cells[keys.index(key)].value for key in ("ms_per_image", measure.key))
        for row in summary.rows
    }
    times = [max(time, 1e-3) for time, _value in points.values()]  # whose logarithm is drawn
    with plot_style():
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.set_xlim(min(times) / 1.5, max(times) * 3)  # room for the names
        axes.set_ylim(0, 1.12 * max(value for _time, value in points.values()) or 1)
        axes.set(xlabel="ms per image", ylabel=f"mean {measure.name} %")
        factors = (1,) if log10(max(times) / min(times)) > 2 else (1, 2, 5)
        ticks = [factor * 10.0**decade for decade in range(-4, 7) for factor in factors]
        low, high = axes.get_xlim()
        axes.set_xticks([tick for tick in ticks if low <= tick <= high])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _place: f"{time:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        shares = {}
        for ((run, label), (_time, value)), time in zip(points.items(), times, strict=True):
            axes.plot([time], [value], **_run_marker(runs.index(run), styles[label].colour))
            shares[run, label] = (log10(time / low) / log10(high / low), value / axes.get_ylim()[1])
        _names(axes, shares)
        if len(runs) > 1:
            handles = [Line2D([], [], **_run_marker(number, INK)) for number in range(len(runs))]
            figure.legend(handles, [shortened(printable(run), 60) for run in runs], loc="outside upper left")
    return figure


def _names(axes: Axes, points: Mapping[tuple[str, str], tuple[float, float]]) -> None:
    """A name to the right of each point; one that would lie on something else moves, and a line leads to it."""
    named: list[tuple[str, float, float]] = []
    # From, to, height, distance to keep: the points, and then the names.
    taken = [(x - 0.012, x + 0.012, y, 0.6 * LINE_HEIGHT) for x, y in points.values()]
    for (_run, label), (x, y) in sorted(points.items(), key=lambda item: -item[1][1]):
        name = shortened(printable(label), 30)
        if any(other == name and abs(at - x) < 0.1 and abs(height - y) < 0.1 for other, at, height in named):
            continue  # the same method of another run, right beside
        named.append((name, x, y))
        left, right = x + 0.02, x + 0.02 + LETTER_WIDTH * len(name)
        beside = [(at, distance) for start, end, at, distance in taken if start < right and left < end]
        moves = sorted((step * LINE_HEIGHT / 4 for step in range(-60, 61)), key=abs)
        free = (y + move for move in moves if all(abs(y + move - at) >= distance for at, distance in beside))
        height = next(free, y)
        taken.append((left, right, height, LINE_HEIGHT))
        leader = {"arrowstyle": "-", "color": FAINT, "shrinkA": 1, "shrinkB": 4, "relpos": (0, 0.5)}
        axes.annotate(
            name,
            (x, y),
            (left, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            arrowprops=leader if abs(height - y) > LINE_HEIGHT / 2 else None,
        )


def _run_marker(number: int, colour: str) -> dict[str, Any]:
    """The first run's points are filled, the others' hollow, so that equal ones stay visible."""
    look = {"marker": MARKERS[number % len(MARKERS)], "color": colour, "linestyle": "none", "markersize": 7 + number}
    return look | ({"markerfacecolor": "none", "markeredgewidth": 1.4} if number else {})

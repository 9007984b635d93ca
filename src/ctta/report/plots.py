"""The report's pictures, each from entries to a matplotlib figure; no state is shared, nothing is shown."""

from collections.abc import Mapping, Sequence
from math import ceil, log10
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from ctta.metrics import NUM_BINS, Score
from ctta.report.colours import FAINT, INK, Style
from ctta.report.curves import Curve, Stretch, TimeLine
from ctta.report.entries import Entry
from ctta.report.svg import plot_style
from ctta.report.tables import Table

WIDTH = 10.0  # inches
MARKERS = "osD^vP*X"  # one for each run
CROWDED = 30  # stretches; beyond, only some are named


def printable(name: str) -> str:
    """A name that a picture can hold: control characters are not allowed in XML."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)


def error_over_time(line: TimeLine, styles: Mapping[str, Style]) -> Figure:
    """One line per method with the boundaries of the domains; one panel per run."""
    runs = list(dict.fromkeys(curve.run for curve in line.curves))
    with plot_style():
        figure = Figure(figsize=(WIDTH, 1.5 + 3.1 * len(runs)), layout="constrained")
        panels = figure.subplots(len(runs), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        for number, (run, axes) in enumerate(zip(runs, panels, strict=True)):
            _boundaries(axes, line.stretches, named=number == 0)
            for curve in line.curves:
                if curve.run == run:
                    _draw(axes, curve, styles[curve.label])
            axes.set_ylabel(f"{_shortened(printable(run), 40)}\nerror %" if len(runs) > 1 else "error %")
            axes.set_xlim(0, line.end)
            axes.set_ylim(bottom=0)
        panels[-1].set_xlabel("images seen")
        panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda images, _place: f"{images:,.0f}"))
        _legend(figure, list(dict.fromkeys(curve.label for curve in line.curves)), styles)
    return figure


def _draw(axes: Axes, curve: Curve, style: Style) -> None:
    places, errors, deviations = curve.places, curve.errors, curve.deviations
    marker = ""
    if curve.round_places:
        # Every domain's own difficulty comes back in each round: faint behind what changes from round to round.
        axes.plot(places, errors, color=style.colour, linewidth=0.6, alpha=0.25)
        places, errors, deviations = curve.round_places, curve.round_errors, curve.round_deviations
        marker = "o"
    axes.plot(
        places, errors, color=style.colour, linestyle=style.dash, linewidth=style.width, marker=marker, markersize=3.5
    )
    if deviations:
        low = [error - deviation for error, deviation in zip(errors, deviations, strict=True)]
        high = [error + deviation for error, deviation in zip(errors, deviations, strict=True)]
        axes.fill_between(places, low, high, color=style.colour, alpha=0.2, linewidth=0)


def _boundaries(axes: Axes, stretches: Sequence[Stretch], *, named: bool) -> None:
    every = ceil(len(stretches) / CROWDED)
    for stretch in stretches[1:]:
        axes.axvline(stretch.start, color=FAINT, linewidth=0.7, zorder=0)
    if not named:
        return
    slanted = sum(len(stretch.name) for stretch in stretches) > 100
    for stretch in stretches[::every]:
        axes.annotate(
            _shortened(printable(stretch.name)),
            ((stretch.start + stretch.end) / 2, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            rotation=38 if slanted else 0,
            rotation_mode="anchor",
            ha="left" if slanted else "center",
            fontsize=8,
        )


def _legend(figure: Figure, labels: Sequence[str], styles: Mapping[str, Style]) -> None:
    # A leading underscore would hide a line from the legend.
    hidden = "\N{ZERO WIDTH SPACE}"
    names = [f"{hidden if label.startswith('_') else ''}{_shortened(printable(label), 60)}" for label in labels]
    handles = [
        Line2D([], [], color=styles[label].colour, linestyle=styles[label].dash, linewidth=styles[label].width)
        for label in labels
    ]
    lines = ceil(sum(48 + 5 * len(name) for name in names) / (WIDTH * 72))  # as wide as they are, in points
    columns = ceil(len(labels) / lines)
    # Matplotlib fills a legend column by column; readers go line by line.
    across = [place for column in range(columns) for place in range(column, len(labels), columns)]
    handles, names = [handles[place] for place in across], [names[place] for place in across]
    figure.legend(handles, names, loc="outside lower center", ncols=columns, handlelength=3, columnspacing=1.6)


def reliability(entries: Sequence[Entry], styles: Mapping[str, Style]) -> Figure:
    """How often a prediction is right, by how sure it is; on the diagonal, confidence can be taken at its word."""
    lines = ceil(len(entries) / 7)
    columns = ceil(len(entries) / lines)
    several_runs = len({entry.run for entry in entries}) > 1
    with plot_style():
        figure = Figure(figsize=(WIDTH, 0.4 + (1.9 if several_runs else 1.7) * lines), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flat
        for entry, axes in zip(entries, panels, strict=False):
            style, bins = styles[entry.label], Score.sum(result.total for result in entry.results).bins
            places = [(number + 0.5) / NUM_BINS for number, (count, _sum, _right) in enumerate(bins) if count]
            accuracies = [right / count for count, _sum, right in bins if count]
            confidences = [total / count for count, total, _right in bins if count]
            axes.bar(places, accuracies, width=0.9 / NUM_BINS, color=style.colour, alpha=0.75, linewidth=0)
            axes.plot(places, confidences, color=INK, marker="_", markersize=5, linestyle="none")
            axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1, zorder=0)
            names = [entry.run, entry.label] if several_runs else [entry.label]
            axes.set_title("\n".join(_shortened(printable(name), 18) for name in names), loc="left")
            axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
        for axes in list(figure.axes)[len(entries) :]:
            axes.set_visible(False)
        figure.supxlabel("confidence", fontsize=9)
        figure.supylabel("accuracy", fontsize=9)
    return figure


def _shortened(name: str, length: int = 22) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def cost(summary: Table, styles: Mapping[str, Style]) -> Figure:
    """Error against milliseconds per image: lower left is better."""
    keys = [column.key for column in summary.columns]
    runs = summary.runs
    with plot_style():
        figure = Figure(figsize=(WIDTH * 0.72, 3.4), layout="constrained")
        axes = figure.subplots()
        placed: list[tuple[str, float, float]] = []
        for row in sorted(summary.rows, key=lambda row: -row.cells[keys.index("error")].value):
            time, error = (row.cells[keys.index(key)].value for key in ("ms_per_image", "error"))
            time = max(time, 1e-3)  # whose logarithm is drawn
            look = _run_marker(runs.index(row.run), styles[row.label].colour)
            axes.plot([time], [error], **look)
            label = _shortened(printable(row.label))
            close = [name for name, at, above in placed if abs(log10(time / at)) < 0.2 and 0 <= above - error < 4]
            placed.append((label, time, error))
            if label not in close:  # of another run, right beside
                place = (7, -9 if close else 3)
                axes.annotate(label, (time, error), place, textcoords="offset points", fontsize=8)
        times = [time for _label, time, _error in placed]
        axes.set_xscale("log")
        axes.set_xlim(min(times) / 1.5, max(times) * 3)  # room for the names
        factors = (1,) if log10(max(times) / min(times)) > 2 else (1, 2, 5)
        ticks = [factor * 10.0**decade for decade in range(-4, 7) for factor in factors]
        low, high = axes.get_xlim()
        axes.set_xticks([tick for tick in ticks if low <= tick <= high])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _place: f"{time:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(bottom=0)
        axes.margins(y=0.12)
        axes.set(xlabel="ms per image", ylabel="mean error %")
        if len(runs) > 1:
            handles = [Line2D([], [], **_run_marker(number, INK)) for number in range(len(runs))]
            figure.legend(handles, [_shortened(printable(run), 60) for run in runs], loc="outside upper left")
    return figure


def _run_marker(number: int, colour: str) -> dict[str, Any]:
    """The first run's points are filled, the others' hollow, so that equal ones stay visible."""
    look = {"marker": MARKERS[number % len(MARKERS)], "color": colour, "linestyle": "none", "markersize": 7 + number}
    return look | ({"markerfacecolor": "none", "markeredgewidth": 1.4} if number else {})

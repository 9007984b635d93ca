"""The report's pictures, each from entries to a matplotlib figure; no state is shared, nothing is shown."""

from collections.abc import Mapping, Sequence
from math import ceil

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from ctta.evaluation.metrics import NUM_BINS, Score
from ctta.report.colors import FAINT, INK, Style
from ctta.report.curves import Curve, Stretch, TimeLine
from ctta.report.entries import Entry
from ctta.report.svg import plot_style, printable, shortened

WIDTH = 10.0  # inches
CROWDED = 30  # stretches; beyond, only some are named


def score_over_time(line: TimeLine, styles: Mapping[str, Style]) -> Figure:
    """One line per method with the boundaries of the domains; one panel per run."""
    runs = list(dict.fromkeys(curve.run for curve in line.curves))
    unit = f"{line.measure.name} %"
    with plot_style():
        figure = Figure(figsize=(WIDTH, 1.5 + 3.1 * len(runs)), layout="constrained")
        panels = figure.subplots(len(runs), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        for number, (run, axes) in enumerate(zip(runs, panels, strict=True)):
            _boundaries(axes, line.stretches, named=number == 0)
            for curve in line.curves:
                if curve.run == run:
                    _draw(axes, curve, styles[curve.label])
            axes.set_ylabel(f"{shortened(printable(run), 40)}\n{unit}" if len(runs) > 1 else unit)
            axes.set_xlim(0, line.end)
            if line.measure.best == "lowest":  # lines of mIoU lie close together, far from 0
                axes.set_ylim(bottom=0)
        panels[-1].set_xlabel("images seen")
        panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda images, _place: f"{images:,.0f}"))
        _legend(figure, list(dict.fromkeys(curve.label for curve in line.curves)), styles)
    return figure


def _draw(axes: Axes, curve: Curve, style: Style) -> None:
    places, values, deviations = curve.places, curve.values, curve.deviations
    marker = ""
    if curve.round_places:
        # Every domain's own difficulty comes back in each round: faint behind what changes from round to round.
        axes.plot(places, values, color=style.colour, linewidth=0.6, alpha=0.25)
        places, values, deviations = curve.round_places, curve.round_values, curve.round_deviations
        marker = "o"
    axes.plot(
        places, values, color=style.colour, linestyle=style.dash, linewidth=style.width, marker=marker, markersize=3.5
    )
    if deviations:
        low = [value - deviation for value, deviation in zip(values, deviations, strict=True)]
        high = [value + deviation for value, deviation in zip(values, deviations, strict=True)]
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
            shortened(printable(stretch.name)),
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
    names = [f"{hidden if label.startswith('_') else ''}{shortened(printable(label), 60)}" for label in labels]
    handles = [
        Line2D([], [], color=styles[label].colour, linestyle=styles[label].dash, linewidth=styles[label].width)
        for label in labels
    ]
    fitting = (count for count in range(len(names), 1, -1) if _legend_width(names, count) < WIDTH * 72)
    columns = next(fitting, 1)
    # Matplotlib fills a legend column by column; readers go line by line.
    across = [place for column in range(columns) for place in range(column, len(labels), columns)]
    handles, names = [handles[place] for place in across], [names[place] for place in across]
    figure.legend(handles, names, loc="outside lower center", ncols=columns, handlelength=3, columnspacing=1.6)


def _legend_width(names: Sequence[str], columns: int) -> float:
    """About how many points a legend takes: a handle and the longest name of each column."""
    return sum(48 + 5.2 * max(len(name) for name in names[column::columns]) for column in range(columns))


def reliability(entries: Sequence[Entry], styles: Mapping[str, Style]) -> Figure:
    """How often a prediction is right, by how sure it is; on the diagonal, confidence can be taken at its word."""
    lines = ceil(len(entries) / 7)
    columns = max(4, ceil(len(entries) / lines))  # a single method does not fill the page
    several_runs = len({entry.run for entry in entries}) > 1
    with plot_style():
        figure = Figure(figsize=(WIDTH, 0.4 + (1.9 if several_runs else 1.7) * lines), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flat
        for number, (entry, axes) in enumerate(zip(entries, panels, strict=False)):
            style, bins = styles[entry.label], Score.sum(result.total for result in entry.results).bins
            places = [(number + 0.5) / NUM_BINS for number, (count, _sum, _right) in enumerate(bins) if count]
            accuracies = [right / count for count, _sum, right in bins if count]
            confidences = [total / count for count, total, _right in bins if count]
            axes.bar(places, accuracies, width=0.9 / NUM_BINS, color=style.colour, alpha=0.75, linewidth=0)
            axes.plot(places, confidences, color=INK, marker="_", markersize=5, linestyle="none")
            axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1, zorder=0)
            names = [entry.run, entry.label] if several_runs else [entry.label]
            axes.set_title("\n".join(shortened(printable(name), 18) for name in names), loc="left")
            axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
            axes.tick_params(labelbottom=number + columns >= len(entries))  # nothing is below
        for axes in list(figure.axes)[len(entries) :]:
            axes.set_visible(False)
        figure.supxlabel("confidence", fontsize=9)
        figure.supylabel("accuracy", fontsize=9)
    return figure

"""The figures of a report: scores over time, calibration, cost, heat map of a matrix, and label maps over scenes.

Methods keep their colors in all figures, and SVG follows light and dark pages.
"""

import colorsys
import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, log10
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import NDArray

from ctta.benchmark.report.content import AxisSpan, ReportRow, ScoreCurve, Timeline
from ctta.benchmark.report.matrix import Matrix, MatrixCell
from ctta.benchmark.report.tables import PAIR, ColumnLayout, Table
from ctta.data import streets as synthetic
from ctta.data.datasets.base import IGNORE_INDEX
from ctta.data.datasets.scenes import CLASS_NAMES
from ctta.evaluation.label_maps import SceneExample
from ctta.evaluation.metrics import NUM_BINS, Metric

Dash = tuple[float, tuple[float, ...]]

#: Colors of text and axes on light pages; in SVG they become CSS variables, which dark pages redefine.
INK = "#1a1a1b"
FAINT = "#c8c8c9"
DARK_INK = "#e9e9ea"
DARK_FAINT = "#4a4a4b"

_SOLID: Dash = (0, ())
_DASHED: Dash = (0, (5, 2))
_DOTTED: Dash = (0, (1.2, 1.4))
_DASH_DOT: Dash = (0, (6, 1.6, 1.2, 1.6))
_SHORT_DASHES: Dash = (0, (2.6, 1.4))
_DASH_DOT_DOT: Dash = (0, (6, 1.4, 1.2, 1.4, 1.2, 1.4))


@dataclass(frozen=True)
class LineStyle:
    """The color and line of a method, the same in all figures."""

    color: str  # on light pages
    dark_color: str  # on dark pages
    dash: Dash
    width: float = 1.4


#: Every color has enough contrast with its page and differs from the others for color-blind readers too: where hues
#: look alike, lightness differs.
_METHOD_STYLES = {
    "Source": LineStyle("#6b6b6b", "#9a9a9a", _DOTTED),
    "BN Stats Adapt": LineStyle("#3d93d6", "#8fd0ff", _DASHED),
    "Pseudo-label": LineStyle("#958f00", "#e6d83a", _DASH_DOT),
    "TENT-online*": LineStyle("#b0409b", "#e389cf", _SHORT_DASHES),
    "TENT-continual": LineStyle("#bc3300", "#ff7a33", _SOLID),
    "Test Aug": LineStyle("#00633d", "#2fc98c", _DASH_DOT_DOT),
    "CoTTA": LineStyle("#0044b8", "#4d8dff", _SOLID),
    "CoTTA: weight-avg": LineStyle("#7b62e0", "#b39bff", _DASHED),
    "CoTTA: + aug-avg": LineStyle("#0da09f", "#54eae8", _DASH_DOT),
}
_OTHER_STYLES = (
    LineStyle("#8f2d56", "#ef8fb5", _SHORT_DASHES),
    LineStyle("#5d6b00", "#c2d14a", _DASH_DOT),
    LineStyle("#4b4f9c", "#a3a7f0", _DASHED),
    LineStyle("#8a5a44", "#d9a892", _DASH_DOT_DOT),
)

_MATPLOTLIB_SETTINGS: Any = {
    "axes.edgecolor": FAINT,
    "axes.grid": False,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 9,
    "figure.dpi": 72,
    "font.family": "sans-serif",
    "font.size": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",  # text stays selectable and searchable
    "svg.hashsalt": "ctta",  # the same figure gives the same file
    "text.color": INK,
    "text.parse_math": False,  # names come from users and may contain a dollar sign
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8,
}


def assign_styles(labels: Iterable[str]) -> dict[str, LineStyle]:
    """Return a style for every label; methods other than the paper's share a few styles in turn."""
    styles: dict[str, LineStyle] = {}
    for label in labels:
        if label not in styles:
            num_others = sum(other not in _METHOD_STYLES for other in styles)
            styles[label] = _METHOD_STYLES.get(label) or _OTHER_STYLES[num_others % len(_OTHER_STYLES)]
    return styles


def build_style_sheet() -> str:
    """Return the colors as CSS variables: light on screen and paper, dark if the reader prefers it."""
    styles = (*_METHOD_STYLES.values(), *_OTHER_STYLES)
    light = {_name_css_variable(style.color): style.color for style in styles}
    dark = {_name_css_variable(style.color): style.dark_color for style in styles}
    light |= {"--ink": INK, "--faint": FAINT}
    dark |= {"--ink": DARK_INK, "--faint": DARK_FAINT}
    return (
        f":root {_format_css_block(light)}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {_format_css_block(dark)} }}"
    )


@contextmanager
def plot_style() -> Iterator[None]:
    """Draw figures in the style of the report inside a block or a function, without changing settings outside."""
    with matplotlib.rc_context(_MATPLOTLIB_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # names in a script without a font
        yield


def shorten(name: str, length: int = 22) -> str:
    """Return a name of at most `length` characters, which tables show in full, without control characters for XML."""
    printable = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    return printable if len(printable) <= length else f"{printable[: length - 1]}…"


@dataclass(frozen=True)
class ReportFigure:
    """A figure that was saved as PNG and SVG."""

    name: str  # of the files, without extension
    title: str
    caption: str
    svg: str  # to embed in a page

    @property
    def markdown(self) -> str:
        """A reference to the PNG file, with the caption."""
        return f"![{self.title}]({self.name}.png)\n\n{self.caption}"


@plot_style()
def save_figure(figure: Figure, path: Path, title: str, caption: str) -> ReportFigure:
    """Save a figure as PNG and SVG under a path without extension."""
    figure.savefig(f"{path}.png", dpi=160, facecolor="white", metadata={"Software": None})
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = _adapt_svg(buffer.getvalue(), path.name)
    head, rest = re.split(r"(?<=>)", svg, maxsplit=1)
    file = f'<?xml version="1.0" encoding="utf-8"?>\n{head}\n<style>{build_style_sheet()}</style>{rest}'
    Path(f"{path}.svg").write_text(file, encoding="utf-8")
    return ReportFigure(path.name, title, caption, svg)


def _adapt_svg(svg: str, name: str) -> str:
    """Return matplotlib's SVG with CSS variables as colors and unique ids, without metadata and a fixed size."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(?<=[\s])(width|height)="[\d.]+pt" ?', "", svg, count=2)  # the page sets the size
    # Figures on one page must not share ids.
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return re.sub(r'style="[^"]*"', lambda style: re.sub(r"#[0-9a-f]{6}\b", _use_css_variable, style[0]), svg)


def _use_css_variable(color: re.Match[str]) -> str:
    return f"var({_name_css_variable(color[0])}, {color[0]})"


def _name_css_variable(color: str) -> str:
    return {INK: "--ink", FAINT: "--faint"}.get(color, f"--series-{color.removeprefix('#')}")


def _format_css_block(values: dict[str, str]) -> str:
    return "{ " + " ".join(f"{name}: {value};" for name, value in values.items()) + " }"


WIDTH = 10.0  # inches
BOLD = 2.8  # points, the line of the best method
MAX_SPAN_NAMES = 30  # with more spans, only some are named
MARKERS = "osD^vP*X"  # one per run
LINE_HEIGHT, LETTER_WIDTH = 0.055, 0.0105  # of a name, as fractions of the axes


@plot_style()
def plot_scores_over_time(timeline: Timeline, styles: Mapping[str, LineStyle]) -> Figure:
    """Plot one line per method, that of the best in bold, with the boundaries of the domains and one panel per run."""
    runs = list(dict.fromkeys(curve.run for curve in timeline.curves))
    unit = f"{timeline.metric.name} (%)"
    figure = Figure(figsize=(WIDTH, 1.5 + 3.1 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    labels = list(dict.fromkeys(curve.label for curve in timeline.curves))
    means = {each: fmean(fmean(curve.values) for curve in timeline.curves if curve.label == each) for each in labels}
    best = (min if timeline.metric.best == "lowest" else max)(means, key=lambda label: means[label])
    styles = {
        label: replace(style, width=BOLD, dash=_SOLID) if label == best else style for label, style in styles.items()
    }
    for number, (run, axes) in enumerate(zip(runs, panels, strict=True)):
        _draw_boundaries(axes, timeline.spans, is_named=number == 0)
        for curve in sorted(timeline.curves, key=lambda curve: curve.label == best):  # the best on top
            if curve.run == run:
                _draw_curve(axes, curve, styles[curve.label])
        axes.set_ylabel(f"{shorten(run, 40)}\n{unit}" if len(runs) > 1 else unit)
        axes.set_xlim(0, timeline.end)
        if timeline.metric.best == "lowest":  # curves of mIoU lie close together, far from 0
            axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("images seen")
    panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda images, _position: f"{images:,.0f}"))
    _draw_legend(figure, labels, styles)
    return figure


@plot_style()
def plot_reliability(rows: Sequence[ReportRow], styles: Mapping[str, LineStyle]) -> Figure:
    """Plot accuracy against confidence, one panel per row; a calibrated method lies on the diagonal."""
    num_rows = ceil(len(rows) / 7)
    num_columns = max(4, ceil(len(rows) / num_rows))  # a single method does not fill the width
    has_several_runs = len({row.run for row in rows}) > 1
    figure = Figure(figsize=(WIDTH, 0.4 + (1.9 if has_several_runs else 1.7) * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey=True).flat
    for number, (row, axes) in enumerate(zip(rows, panels, strict=False)):
        centers = [(place + 0.5) / NUM_BINS for place, (count, _sum, _right) in enumerate(row.bins) if count]
        accuracies = [right / count for count, _sum, right in row.bins if count]
        confidences = [total / count for count, total, _right in row.bins if count]
        color = styles[row.label].color
        axes.bar(centers, accuracies, width=0.9 / NUM_BINS, color=color, alpha=0.75, linewidth=0)
        axes.plot(centers, confidences, color=INK, marker="_", markersize=5, linestyle="none")
        axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1, zorder=0)
        names = [row.run, row.label] if has_several_runs else [row.label]
        axes.set_title("\n".join(shorten(name, 18) for name in names), loc="left")
        axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
        axes.tick_params(labelbottom=number + num_columns >= len(rows))  # no panel below
    for axes in list(figure.axes)[len(rows) :]:
        axes.set_visible(False)
    figure.supxlabel("confidence", fontsize=9)
    figure.supylabel("accuracy", fontsize=9)
    return figure


@plot_style()
def plot_cost(summary: Table, metric: Metric, styles: Mapping[str, LineStyle]) -> Figure:
    """Plot the mean score against milliseconds per image, one point per row of the summary table."""
    keys = [column.key for column in summary.columns]
    runs = summary.runs
    points = {
        (row.run, row.label): tuple(row.cells[keys.index(key)].value for key in ("ms_per_image", metric.key))
        for row in summary.rows
    }
    times = [max(time, 1e-3) for time, _value in points.values()]  # the axis is logarithmic
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_xlim(min(times) / 1.5, max(times) * 3)  # room for the names
    axes.set_ylim(0, 1.12 * max(value for _time, value in points.values()) or 1)
    axes.set(xlabel="ms per image", ylabel=f"mean {metric.name} (%)")
    factors = (1,) if log10(max(times) / min(times)) > 2 else (1, 2, 5)
    ticks = [factor * 10.0**decade for decade in range(-4, 7) for factor in factors]
    low, high = axes.get_xlim()
    axes.set_xticks([tick for tick in ticks if low <= tick <= high])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _position: f"{time:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    positions = {}
    for ((run, label), (_time, value)), time in zip(points.items(), times, strict=True):
        axes.plot([time], [value], **_choose_marker(runs.index(run), styles[label].color))
        positions[run, label] = (log10(time / low) / log10(high / low), value / axes.get_ylim()[1])
    _draw_names(axes, positions)
    if len(runs) > 1:
        handles = [Line2D([], [], **_choose_marker(number, INK)) for number in range(len(runs))]
        names = [shorten(run, 60) for run in runs]
        figure.legend(handles, names, loc="outside upper left")
    return figure


def _draw_curve(axes: Axes, curve: ScoreCurve, style: LineStyle) -> None:
    positions, values, deviations = curve.positions, curve.values, curve.deviations
    marker = ""
    if curve.round_positions:
        # The difficulty of each domain recurs in every round: faint, behind what changes from round to round.
        axes.plot(positions, values, color=style.color, linewidth=0.6, alpha=0.25)
        positions, values, deviations = curve.round_positions, curve.round_values, curve.round_deviations
        marker = "o"
    line: dict[str, Any] = {"linestyle": style.dash, "linewidth": style.width, "marker": marker, "markersize": 3.5}
    axes.plot(positions, values, color=style.color, **line)
    if deviations:
        low = [value - deviation for value, deviation in zip(values, deviations, strict=True)]
        high = [value + deviation for value, deviation in zip(values, deviations, strict=True)]
        axes.fill_between(positions, low, high, color=style.color, alpha=0.2, linewidth=0)


def _draw_boundaries(axes: Axes, spans: Sequence[AxisSpan], *, is_named: bool) -> None:
    for span in spans[1:]:
        axes.axvline(span.start, color=FAINT, linewidth=0.7, zorder=0)
    if not is_named:
        return
    is_slanted = sum(len(span.name) for span in spans) > 100
    for span in spans[:: ceil(len(spans) / MAX_SPAN_NAMES)]:
        axes.annotate(
            shorten(span.name, 36 if PAIR in span.name else 22),
            ((span.start + span.end) / 2, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            rotation=38 if is_slanted else 0,
            rotation_mode="anchor",
            ha="left" if is_slanted else "center",
            fontsize=8,
        )


def _draw_legend(figure: Figure, labels: Sequence[str], styles: Mapping[str, LineStyle]) -> None:
    # Matplotlib leaves labels with a leading underscore out of the legend.
    prefixes = ["\N{ZERO WIDTH SPACE}" if label.startswith("_") else "" for label in labels]
    names = [f"{prefix}{shorten(label, 60)}" for prefix, label in zip(prefixes, labels, strict=True)]
    handles = [
        Line2D([], [], color=styles[label].color, linestyle=styles[label].dash, linewidth=styles[label].width)
        for label in labels
    ]
    fitting = (count for count in range(len(names), 1, -1) if _estimate_legend_width(names, count) < WIDTH * 72)
    num_columns = next(fitting, 1)
    # Matplotlib fills a legend column by column; readers read line by line.
    order = [place for column in range(num_columns) for place in range(column, len(labels), num_columns)]
    handles, names = [handles[place] for place in order], [names[place] for place in order]
    figure.legend(handles, names, loc="outside lower center", ncols=num_columns, handlelength=3, columnspacing=1.6)


def _estimate_legend_width(names: Sequence[str], num_columns: int) -> float:
    """Return the approximate width of a legend in points: a handle and the longest name of each column."""
    return sum(48 + 5.2 * max(len(name) for name in names[column::num_columns]) for column in range(num_columns))


def _draw_names(axes: Axes, points: Mapping[tuple[str, str], tuple[float, float]]) -> None:
    """Write a name to the right of each point; one that would overlap is moved and connected with a line."""
    named: list[tuple[str, float, float]] = []
    # Left, right, height and distance to keep, of the points and then of the names.
    taken = [(x - 0.012, x + 0.012, y, 0.6 * LINE_HEIGHT) for x, y in points.values()]
    for (_run, label), (x, y) in sorted(points.items(), key=lambda item: -item[1][1]):
        name = shorten(label, 30)
        if any(other == name and abs(at - x) < 0.1 and abs(height - y) < 0.1 for other, at, height in named):
            continue  # the same method of another run is next to it
        named.append((name, x, y))
        left, right = x + 0.02, x + 0.02 + LETTER_WIDTH * len(name)
        obstacles = [(at, distance) for start, end, at, distance in taken if start < right and left < end]
        moves = sorted((step * LINE_HEIGHT / 4 for step in range(-60, 61)), key=abs)
        free = (y + move for move in moves if all(abs(y + move - at) >= distance for at, distance in obstacles))
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


def _choose_marker(number: int, color: str) -> dict[str, Any]:
    """Return a filled marker for the first run and larger hollow ones for others, so that equal points stay visible."""
    marker = {"marker": MARKERS[number % len(MARKERS)], "color": color, "linestyle": "none", "markersize": 7 + number}
    return marker | ({"markerfacecolor": "none", "markeredgewidth": 1.4} if number else {})


#: Colors of the strongest cells: bluish green and vermilion, which color-blind readers tell apart; every number has its
#: sign besides. A light cell has dark text on light and on dark pages alike.
BETTER, WORSE, UNCLEAR = "#00775a", "#bd3500", "#e9e9eb"
PALE = {BETTER: "#cfeee2", WORSE: "#ffe0d1"}
DARK_TEXT, LIGHT_TEXT = "#111112", "#fefefe"
FULL_COLOR = 0.3  # the difference, as a fraction, from which on a color gets no stronger


@plot_style()
def plot_heat_map(matrix: Matrix) -> Figure:
    """Plot the error above Source in points, one row per method, below Source itself with its error in percent."""
    names = [protocol.name for protocol in matrix.protocols]
    width, height = 1.6 + 0.56 * len(names), 1.4 + 0.27 * (1 + len(matrix.methods))
    figure = Figure(figsize=(max(5.0, width), height), layout="constrained")
    axes = figure.subplots()
    for column, protocol in enumerate(matrix.protocols):
        _draw_cell(axes, 0, column, f"{100 * protocol.source.error:.1f}", None)
        for row, method in enumerate(matrix.methods, start=1):
            cell = protocol.cells.get(method)
            if cell is not None:
                number = round(100 * cell.above_source, 1) + 0.0  # never -0.0
                _draw_cell(axes, row, column, f"{number:+.1f}".replace("-", "\N{MINUS SIGN}"), _choose_color(cell))
    labels = ["Source: error (%)", *(shorten(method) for method in matrix.methods)]
    axes.set(xlim=(0, len(names)), ylim=(len(labels), 0))
    axes.set_yticks([row + 0.5 for row in range(len(labels))], labels)
    short_names = [shorten(name) for name in names]
    axes.set_xticks([column + 0.5 for column in range(len(names))], short_names)
    axes.tick_params(length=0, labelsize=9)
    axes.tick_params(axis="x", labelrotation=38, labeltop=True, labelbottom=False)
    for label in axes.get_xticklabels():
        label.set(ha="left", rotation_mode="anchor")
    axes.spines[:].set_visible(False)
    return figure


def _draw_cell(axes: Axes, row: int, column: int, text: str, color: str | None) -> None:
    ink = INK
    if color:
        place = (column + 0.02, row + 0.03)
        axes.add_patch(Rectangle(place, 0.96, 0.94, facecolor=color, edgecolor="none", linewidth=0))
        ink = LIGHT_TEXT if _luminance(color) < 0.18 else DARK_TEXT
    axes.text(column + 0.5, row + 0.52, text, ha="center", va="center", fontsize=8.5, color=ink)


def _choose_color(cell: MatrixCell) -> str:
    """Return the color of a cell: stronger with the difference, none where noise decides."""
    if cell.verdict == "unclear":
        return UNCLEAR
    strong = BETTER if cell.verdict == "better" else WORSE
    share = min(1.0, abs(cell.above_source) / FULL_COLOR)
    red, green, blue = (
        low + share * (high - low) for low, high in zip(to_rgb(PALE[strong]), to_rgb(strong), strict=True)
    )
    return to_hex((red, green, blue))


def _luminance(color: str) -> float:
    """Return the relative luminance, by which contrast is defined; at 0.18 dark and light text have the same."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


OPACITY = 0.7  # of the colors over the image

#: The official colors of Cityscapes.
_CITYSCAPES_COLORS = (
    "804080 f423e8 464646 66669c be9999 999999 faaa1e dcdc00 6b8e23 98fb98 "
    "4682b4 dc143c ff0000 00008e 000046 003c64 005064 0000e6 770b20"
)
_GOLDEN_RATIO = 0.618034  # of a full turn between the hues of neighboring classes


@plot_style()
def plot_overlays(examples: Sequence[SceneExample], layout: ColumnLayout) -> Figure:
    """Plot one row per example: the image, and three label maps over it."""
    height, width = examples[0].image.shape[:2]
    panel_height = WIDTH / 4 * height / width
    figure = Figure(figsize=(WIDTH, 0.5 + (panel_height + 0.45) * len(examples)), layout="constrained")
    panels = figure.subplots(len(examples), 4, squeeze=False)
    for example, row in zip(examples, panels, strict=True):
        _draw_example(example, row, layout)
    _draw_class_legend(figure, examples)
    return figure


def choose_palette(class_names: tuple[str, ...], num_classes: int) -> NDArray[np.uint8]:
    """Return RGB colors (num_classes, 3): those of the dataset if it has any, otherwise colors of different hue."""
    if class_names == synthetic.CLASSES:
        return synthetic.PALETTE
    if class_names == CLASS_NAMES:
        return np.frombuffer(bytes.fromhex(_CITYSCAPES_COLORS), np.uint8).reshape(-1, 3)
    colors = [
        colorsys.hsv_to_rgb(number * _GOLDEN_RATIO % 1, 0.85 - 0.3 * (number % 2), 0.9 - 0.3 * (number % 3 == 2))
        for number in range(num_classes)
    ]
    return (255 * np.array(colors)).astype(np.uint8)


def _draw_example(example: SceneExample, row: Sequence[Axes], layout: ColumnLayout) -> None:
    palette = _choose_example_palette(example)
    segment = shorten(layout.name_segment(example.segment, example.domain), 200)
    row[0].set_title(f"{shorten(example.method, 80)}, {example.kind} change: {segment}", loc="left")
    panels = {
        "image": example.image,
        "labels": blend_classes(example.image, example.truth, palette),
        f"Source, {100 * example.accuracy_before:.1f}": blend_classes(example.image, example.before, palette),
        f"{shorten(example.method, 30)}, {100 * example.accuracy_after:.1f}": blend_classes(
            example.image, example.after, palette
        ),
    }
    for axes, (name, pixels) in zip(row, panels.items(), strict=True):
        axes.imshow(pixels, interpolation="none")
        axes.set_xlabel(name, labelpad=3)
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set_visible(False)


def _choose_example_palette(example: SceneExample) -> NDArray[np.uint8]:
    if example.class_names:
        return choose_palette(example.class_names, len(example.class_names))
    maps = (example.truth, example.before, example.after)
    highest = max(classes[classes != IGNORE_INDEX].max(initial=0) for classes in maps)
    return choose_palette((), int(highest) + 1)


def blend_classes(
    image: NDArray[np.uint8], classes: NDArray[np.unsignedinteger], palette: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Return class colors over the image in gray, so that only classes are colored; black where there is no class."""
    gray = image.astype(np.float32).mean(2, keepdims=True)
    has_class = classes < len(palette)
    colors = palette[np.where(has_class, classes, 0)]
    mixed = np.where(has_class[..., None], OPACITY * colors + (1 - OPACITY) * gray, 0)
    return mixed.round().astype(np.uint8)


def _draw_class_legend(figure: Figure, examples: Sequence[SceneExample]) -> None:
    names = examples[0].class_names
    if names:
        patches = [
            Patch(facecolor=color / 255, edgecolor=FAINT, linewidth=0.6, label=name)
            for name, color in zip(names, _choose_example_palette(examples[0]), strict=True)
        ]
        figure.legend(handles=patches, loc="outside lower center", ncols=min(len(names), 10), handlelength=1.2)

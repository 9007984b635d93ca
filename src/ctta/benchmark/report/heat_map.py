"""The heat map of the robustness matrix: methods by protocols, colored where a method beats Source or harms."""

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ctta.benchmark.report.matrix import Matrix, MatrixCell
from ctta.benchmark.report.theme import INK, plot_style, replace_control_characters, shorten

#: Colors of the strongest cells: bluish green and vermilion, which color-blind readers tell apart; every number has its
#: sign besides. A light cell has dark text on light and on dark pages alike.
BETTER, WORSE, UNCLEAR = "#00775a", "#bd3500", "#e9e9eb"
PALE = {BETTER: "#cfeee2", WORSE: "#ffe0d1"}
DARK_TEXT, LIGHT_TEXT = "#111112", "#fefefe"
FULL_COLOR = 0.3  # the difference, as a fraction, from which on a color gets no stronger


def plot_heat_map(matrix: Matrix) -> Figure:
    """Plot the error above Source in points, one row per method; above them Source itself, with its error in percent.

    Args:
        matrix: The numbers, of at least one protocol.

    Returns:
        The figure.
    """
    names = [protocol.name for protocol in matrix.protocols]
    with plot_style():
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
        labels = ["Source: error (%)", *(shorten(replace_control_characters(method)) for method in matrix.methods)]
        axes.set(xlim=(0, len(names)), ylim=(len(labels), 0))
        axes.set_yticks([row + 0.5 for row in range(len(labels))], labels)
        short_names = [shorten(replace_control_characters(name)) for name in names]
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

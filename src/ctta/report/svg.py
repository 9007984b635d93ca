"""Figures as files, and as SVG that follows the page it is on."""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ctta.report.colors import FAINT, INK, style_sheet, variable_of

SETTINGS: Any = {
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
    "svg.fonttype": "none",  # text stays text: it can be selected, searched and read aloud
    "svg.hashsalt": "ctta",  # the same picture gives the same file
    "text.color": INK,
    "text.parse_math": False,  # names come from users, and may hold a dollar
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8,
}


@contextmanager
def plot_style() -> Iterator[None]:
    """Inside, figures are drawn in the style of the report, and nothing outside changes."""
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a name in a script without a font
        yield


def printable(name: str) -> str:
    """A name that a picture can hold: control characters are not allowed in XML."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)


def shortened(name: str, length: int = 22) -> str:
    """A name that leaves room for others; tables have it in full."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def write_figure(figure: Figure, folder: Path, name: str) -> str:
    """Write ``name.png`` and ``name.svg``; the same picture as SVG for inside a page is returned."""
    with plot_style():
        figure.savefig(folder / f"{name}.png", dpi=160, facecolor="white", metadata={"Software": None})
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawing = themed(buffer.getvalue(), name)
    head, rest = re.split(r"(?<=>)", drawing, maxsplit=1)
    file = f'<?xml version="1.0" encoding="utf-8"?>\n{head}\n<style>{style_sheet()}</style>{rest}'
    (folder / f"{name}.svg").write_text(file, encoding="utf-8")
    return drawing


def themed(svg: str, name: str) -> str:
    """Matplotlib's SVG with variables for its colours and ids of its own, without what a page does not need."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(?<=[\s])(width|height)="[\d.]+pt" ?', "", svg, count=2)  # the page gives the size
    # Two pictures on one page must not share ids.
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return re.sub(r'style="[^"]*"', lambda style: re.sub(r"#[0-9a-f]{6}\b", _variable, style[0]), svg)


def _variable(colour: re.Match[str]) -> str:
    return f"var({variable_of(colour[0])}, {colour[0]})"

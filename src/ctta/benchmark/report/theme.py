"""The look of the figures: colors of methods, matplotlib settings, and SVG that follows light and dark pages."""

import io
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

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
    "TENT-continual": LineStyle("#bc3300", "#ff7a33", _SOLID, 1.6),
    "Test Aug": LineStyle("#00633d", "#2fc98c", _DASH_DOT_DOT),
    "CoTTA": LineStyle("#0044b8", "#4d8dff", _SOLID, 2.4),
    "CoTTA: weight-avg": LineStyle("#7b62e0", "#b39bff", _DASHED, 1.8),
    "CoTTA: + aug-avg": LineStyle("#0da09f", "#54eae8", _DASH_DOT, 1.8),
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
    """Draw figures in the style of the report inside the block, without changing matplotlib's settings outside."""
    with matplotlib.rc_context(_MATPLOTLIB_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # names in a script without a font
        yield


def replace_control_characters(name: str) -> str:
    """Return a name without control characters, which XML does not allow."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)


def shorten(name: str, length: int = 22) -> str:
    """Return a name of at most `length` characters; tables show it in full."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def save_figure(figure: Figure, folder: Path, name: str) -> str:
    """Save a figure as ``name.png`` and ``name.svg``, and return SVG to embed in a page."""
    with plot_style():
        figure.savefig(folder / f"{name}.png", dpi=160, facecolor="white", metadata={"Software": None})
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = _adapt_svg(buffer.getvalue(), name)
    head, rest = re.split(r"(?<=>)", svg, maxsplit=1)
    file = f'<?xml version="1.0" encoding="utf-8"?>\n{head}\n<style>{build_style_sheet()}</style>{rest}'
    (folder / f"{name}.svg").write_text(file, encoding="utf-8")
    return svg


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

"""A colour and a dash for every method, the same in all pictures, told apart by colour-blind readers and on paper."""

from collections.abc import Iterable
from dataclasses import dataclass

Dash = tuple[float, tuple[float, ...]]

#: Matplotlib writes these into its pictures; in SVG they become CSS variables that follow light and dark.
INK = "#1a1a1b"
FAINT = "#c8c8c9"
DARK_INK = "#e9e9ea"
DARK_FAINT = "#4a4a4b"

_SOLID: Dash = (0, ())
_DASHED: Dash = (0, (5, 2))
_DOTTED: Dash = (0, (1.2, 1.4))
_DASH_DOT: Dash = (0, (6, 1.6, 1.2, 1.6))
_LONG: Dash = (0, (12, 1.2))
_SHORT: Dash = (0, (2.6, 1.4))
_DASH_DOT_DOT: Dash = (0, (6, 1.4, 1.2, 1.4, 1.2, 1.4))


@dataclass(frozen=True)
class Style:
    """How a method is drawn."""

    colour: str  # on white
    dark: str  # on black
    dash: Dash
    width: float = 1.4


#: Each stands out from its page, and from the others also for readers who tell fewer colours apart: their lightness
#: differs where their hue would not.
_KNOWN = {
    "Source": Style("#6b6b6b", "#9a9a9a", _DOTTED),
    "BN Stats Adapt": Style("#3d93d6", "#8fd0ff", _DASHED),
    "Pseudo-label": Style("#958f00", "#e6d83a", _DASH_DOT),
    "TENT-online*": Style("#b0409b", "#e389cf", _SHORT),
    "TENT-continual": Style("#bc3300", "#ff7a33", _SOLID, 1.6),
    "Test Aug": Style("#00633d", "#2fc98c", _DASH_DOT_DOT),
    "CoTTA": Style("#0044b8", "#4d8dff", _SOLID, 2.4),
    "CoTTA: weight-avg": Style("#7b62e0", "#b39bff", _DASHED, 1.8),
    "CoTTA: + aug-avg": Style("#0da09f", "#54eae8", _DASH_DOT, 1.8),
}
_OTHERS = (
    Style("#8f2d56", "#ef8fb5", _SHORT),
    Style("#5d6b00", "#c2d14a", _DASH_DOT),
    Style("#4b4f9c", "#a3a7f0", _DASHED),
    Style("#8a5a44", "#d9a892", _DASH_DOT_DOT),
)


def styles_of(labels: Iterable[str]) -> dict[str, Style]:
    """A style for every label; rows the paper does not have take what is left, and share it when there are many."""
    styles: dict[str, Style] = {}
    for label in labels:
        if label not in styles:
            num_unknown = sum(other not in _KNOWN for other in styles)
            styles[label] = _KNOWN.get(label) or _OTHERS[num_unknown % len(_OTHERS)]
    return styles


def style_sheet() -> str:
    """The colours as CSS variables: light on screen and on paper, dark where the reader asks for it."""
    every = (*_KNOWN.values(), *_OTHERS)
    light = {variable_of(style.colour): style.colour for style in every}
    dark = {variable_of(style.colour): style.dark for style in every}
    light |= {"--ink": INK, "--faint": FAINT}
    dark |= {"--ink": DARK_INK, "--faint": DARK_FAINT}
    return f":root {_block(light)}\n@media screen and (prefers-color-scheme: dark) {{ :root {_block(dark)} }}"


def variable_of(colour: str) -> str:
    """The name of the CSS variable that stands for a colour of a picture."""
    return {INK: "--ink", FAINT: "--faint"}.get(colour, f"--series-{colour.removeprefix('#')}")


def _block(values: dict[str, str]) -> str:
    return "{ " + " ".join(f"{name}: {value};" for name, value in values.items()) + " }"

"""Small tables of facts in HTML, for notebooks."""

from collections.abc import Mapping
from html import escape

_STYLE = "padding: .15em .7em; text-align: left; vertical-align: top"


def render_facts(title: str, facts: Mapping[str, object]) -> str:
    """Return a table in HTML with a row per fact, in which nothing of the title or the facts is markup.

    >>> render_facts("a < b", {"loss": 0.123456}).count("&lt;"), "0.1235" in render_facts("", {"loss": 0.123456})
    (1, True)
    """
    rows = "".join(
        f'<tr><th style="{_STYLE}">{escape(name)}</th><td style="{_STYLE}">{escape(_format(value))}</td></tr>'
        for name, value in facts.items()
    )
    return f'<table><caption style="{_STYLE}"><b>{escape(title)}</b></caption>{rows}</table>'


def _format(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""Draw docs/figures/speed.svg from benchmarks/speed/results.json: every measured ratio against its limit.

python -m benchmarks.draw.speed
"""

from html import escape
from pathlib import Path

from benchmarks.speed.measurements import Measurement, read_results

RESULTS = Path(__file__).parents[1] / "speed" / "results.json"
FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "speed.svg"
#: Pixels: the figure, the names on its left, the numbers on its right, and a row.
WIDTH, NAMES, NUMBERS, ROW, TOP = 1000, 520, 110, 22, 46
#: The end of the axis, as a multiple of the limit; longer bars are cut.
END = 1.3
STYLE = """
 text { font: 13px system-ui, sans-serif; fill: #1f2328 }
 .number { text-anchor: end }
 .met { fill: #4c956c } .missed { fill: #c2410c }
 .limit { stroke: #1f2328; stroke-width: 1.5 } .interval { stroke: #1f2328; stroke-width: 1 }
 @media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .limit, .interval { stroke: #e6edf3 }
  .met { fill: #5fb583 } .missed { fill: #e0703a }
 }
"""


def position(share: float) -> float:
    """Return the horizontal position of a multiple of the limit."""
    return NAMES + (WIDTH - NAMES - NUMBERS) * min(share, END) / END


def draw_row(row: Measurement, top: int) -> list[str]:
    """Return the elements of one row: its name, a bar, the interval if pairs were repeated, and the numbers."""
    share, middle = row.ratio / row.target, top + ROW / 2
    kind = "met" if row.is_met else "missed"
    length = position(share) - NAMES
    found = [
        f'<text x="0" y="{middle + 4:g}">{escape(row.name)}</text>',
        f'<rect class="{kind}" x="{NAMES}" y="{top + 4}" width="{length:.1f}" height="{ROW - 8}" />',
        f'<text class="number" x="{WIDTH}" y="{middle + 4:g}">{row.ratio:.3f} of {row.target:g}</text>',
    ]
    if row.low is not None and row.high is not None:
        ends = f'x1="{position(row.low / row.target):.1f}" x2="{position(row.high / row.target):.1f}"'
        found.append(f'<line class="interval" {ends} y1="{middle:g}" y2="{middle:g}" />')
    return found


def draw(rows: list[Measurement]) -> str:
    """Return the figure as SVG."""
    height, limit = TOP + ROW * len(rows) + 6, position(1)
    elements = [element for number, row in enumerate(rows) for element in draw_row(row, TOP + ROW * number)]
    missed = sum(not row.is_met for row in rows)
    met = f"{len(rows) - missed} of {len(rows)} ratios are within their limit"
    heading = f"{met}; thin lines are 95 % intervals of repeated pairs"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{heading}</title>",
            f"<style>{STYLE}</style>",
            f'<text x="0" y="16">{heading}</text>',
            f'<text x="{limit:.1f}" y="36" text-anchor="middle">limit</text>',
            *elements,
            f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{TOP - 6}" y2="{height}" />',
            "</svg>\n",
        ]
    )


def main() -> None:
    """Write the figure."""
    FIGURE.write_text(draw(read_results(RESULTS)))


if __name__ == "__main__":
    main()

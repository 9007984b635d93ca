"""Draw docs/figures/cotta-light.svg and cotta-dark.svg: what happens to a batch in one step of CoTTA.

python -m benchmarks.draw.cotta
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "figures"
WIDTH, HEIGHT, FONT_SIZE = 1000, 440, 15


@dataclass(frozen=True)
class Theme:
    """Colors of one version of the figure."""

    text: str
    line: str
    source: str
    teacher: str
    student: str
    paper: str


THEMES = {
    "light": Theme("#1f2328", "#57606a", "#dfe7f1", "#d5ecd8", "#fde3c8", "#f6f8fa"),
    "dark": Theme("#e6edf3", "#9da7b3", "#2b3a4f", "#244a2d", "#5a3a17", "#1c2128"),
}


class Drawing:
    """Collects the elements of a figure.

    Args:
        theme: The colors.
    """

    def __init__(self, theme: Theme) -> None:
        self.theme = theme
        self.elements: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, *lines: str) -> None:
        """Draw a box with centered lines of text, the first one in bold."""
        self.elements.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{self.theme.line}"/>'
        )
        top = y + height / 2 - (len(lines) - 1) * 9.5 + 5
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 19 * number, line, weight="bold" if number == 0 else "normal")

    def text(self, x: float, y: float, line: str, *, weight: str = "normal", anchor: str = "middle") -> None:
        """Draw a line of text."""
        self.elements.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="{self.theme.text}">'
            f"{escape(line)}</text>"
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """Draw an arrow along points; dashed for what happens after the prediction."""
        path = " ".join(f"{'M' if number == 0 else 'L'}{x} {y}" for number, (x, y) in enumerate(points))
        style = ' stroke-dasharray="6 4"' if dashed else ""
        self.elements.append(
            f'<path d="{path}" fill="none" stroke="{self.theme.line}" stroke-width="1.8"{style} '
            'marker-end="url(#head)"/>'
        )

    def render(self, title: str) -> str:
        """Return the figure as SVG."""
        head = (
            '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{self.theme.line}"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="{FONT_SIZE}">\n'
            f"<title>{escape(title)}</title>\n<defs>{head}</defs>\n" + "\n".join(self.elements) + "\n</svg>\n"
        )


def draw(theme: Theme) -> str:
    """Return the figure in the colors of a theme."""
    figure = Drawing(theme)
    figure.box(20, 180, 110, 60, theme.paper, "batch x", "no labels")
    # Row of the source: how sure it is decides whether views are averaged.
    figure.box(230, 20, 150, 66, theme.source, "source \u03b8\u2080", "frozen")
    figure.box(470, 20, 210, 66, theme.paper, "is it sure?", "confidence \u2265 threshold")
    # Row of the teacher.
    figure.box(180, 177, 150, 66, theme.paper, "32 views", "color, shift, flip")
    figure.box(405, 177, 180, 66, theme.teacher, "teacher \u03b8\u2032", "average of students")
    figure.box(650, 177, 160, 66, theme.paper, "target y\u2032", "mean over views")
    figure.box(870, 177, 110, 66, theme.teacher, "prediction")
    # Row of the student.
    figure.box(405, 334, 180, 66, theme.student, "student \u03b8", "learns")
    figure.box(650, 334, 160, 66, theme.paper, "cross-entropy")
    figure.arrow((75, 180), (75, 53), (230, 53))
    figure.arrow((380, 53), (470, 53))
    figure.arrow((130, 210), (180, 210))
    figure.arrow((330, 210), (405, 210))
    figure.arrow((585, 210), (650, 210))
    figure.arrow((810, 210), (870, 210))
    figure.arrow((75, 240), (75, 367), (405, 367))
    figure.arrow((585, 367), (650, 367))
    figure.arrow((730, 243), (730, 334))
    figure.arrow((575, 86), (575, 125), (700, 125), (700, 177))
    figure.text(714, 130, "no: average the views", anchor="start")
    figure.text(714, 149, "yes: the image as it is", anchor="start")
    # What happens after the prediction.
    figure.arrow((730, 400), (730, 420), (495, 420), (495, 400), dashed=True)
    figure.text(742, 424, "1. gradient step", anchor="start")
    figure.arrow((495, 334), (495, 243), dashed=True)
    figure.text(505, 294, "2. moving average", anchor="start")
    figure.arrow((362, 86), (362, 348), (405, 348), dashed=True)
    figure.text(352, 122, "3. restore random", anchor="end")
    figure.text(352, 141, "weights", anchor="end")
    return figure.render("One step of CoTTA: source, teacher and student")


def main() -> None:
    """Write both versions."""
    for name, theme in THEMES.items():
        path = FOLDER / f"cotta-{name}.svg"
        path.write_text(draw(theme))
        print(path)


if __name__ == "__main__":
    main()

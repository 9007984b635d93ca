"""The rooms of the package: the order in which they import each other, and the table of them in the docs.

    python scripts/layout.py            write the table in docs/explanation/architecture.md

``tests/test_layout.py`` compares the imports with :data:`ROWS`, and the page with the docstrings.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ctta"
PAGE = ROOT / "docs" / "explanation" / "architecture.md"

#: A room imports only from rows above its own, and from rooms to its left in the same row. The rooms are the packages;
#: of ``core`` and ``data``, whose modules build on other rooms in turn, their modules.
ROWS = [
    ["errors", "io", "core.parallel", "core.state", "core.options", "functional", "optim", "nn"],
    ["views", "core.validation", "source_stats"],
    ["core.networks", "core.updates", "core.hyperparameters", "core.model", "core.transaction"],
    ["policies", "methods", "core.registry"],
    ["data.corruptions", "data.streets", "models", "data.datasets"],
    ["detection", "checkpoint", "guard", "core.config", "distributed", "data.streams"],
    ["testing", "evaluation"],
    ["benchmark", "advise", "adapt", "integrations", "serve"],
    ["cli"],
    ["__main__"],
]
_BLOCK = re.compile(r"(<!-- rooms -->\n).*?(<!-- end of rooms -->)", re.DOTALL)
_ROLE = re.compile(r":\w+:`~?([^`]+)`")


def read_subject(room: str) -> str:
    """Return the first line of a room's docstring, in Markdown."""
    path = PACKAGE / room / "__init__.py" if (PACKAGE / room).is_dir() else PACKAGE / f"{room}.py"
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = docstring.partition("\n")[0].removesuffix(".")
    return _ROLE.sub(r"`\1`", line).replace("``", "`")


def render_table() -> str:
    """Return the table of the rooms in the order of the imports."""
    numbers: dict[str, list[int]] = {}
    for number, row in enumerate(ROWS, start=1):
        for name in row:
            numbers.setdefault(name.partition(".")[0], []).append(number)
    lines = ["| room | subject | row |", "|---|---|---|"]
    for room, rows in numbers.items():
        path = f"{room}/" if (PACKAGE / room).is_dir() else f"{room}.py"
        where = f"{rows[0]}" if rows[0] == rows[-1] else f"{rows[0]} to {rows[-1]}"
        lines.append(f"| [`{path}`](../../src/ctta/{path}) | {read_subject(room)} | {where} |")
    return "\n".join(lines) + "\n"


def fill_table(page: str) -> str:
    """Return the text of a page with the present table."""
    return _BLOCK.sub(lambda block: f"{block[1]}{render_table()}{block[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(fill_table(PAGE.read_text()))

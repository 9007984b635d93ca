"""The report's tables in a terminal."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as TerminalTable
from rich.text import Text

from ctta.report.tables import Cell, Column, Table

WIDEST_HEAD = 5


def print_table(table: Table, console: Console) -> None:
    """Methods down as in the paper; turned over where the terminal is too narrow for that, and never cut off."""
    drawn = methods_down(table)
    needed = Measurement.get(console, console.options.update(max_width=1000), drawn).maximum
    if needed > console.width:
        if console.is_terminal:
            drawn = methods_across(table)
        else:
            console.width = needed
    console.print(table.caption, drawn, "", sep="\n")


def methods_down(table: Table) -> TerminalTable:
    """A row per method, heads shortened as the paper does (gaussian noise is gau)."""
    drawn = TerminalTable(box=None, padding=(0, 1, 0, 0))
    drawn.add_column("", no_wrap=True)
    for column in table.columns:
        drawn.add_column(_head(column), justify="right", no_wrap=True)
    if table.has_published:
        drawn.add_column("paper", justify="right", no_wrap=True)
    for row in table.rows:
        published = [row.cells[-1].published_text] if table.has_published else []
        drawn.add_row(row.label, *_texts(row.cells), *published)
    return drawn


def methods_across(table: Table) -> TerminalTable:
    """A column per method, whose head may break."""
    drawn = TerminalTable(box=None, padding=(0, 1, 0, 0))
    drawn.add_column("", no_wrap=True)
    for row in table.rows:
        drawn.add_column(row.label, justify="right")
    texts = [_texts(row.cells) for row in table.rows]
    for place, column in enumerate(table.columns):
        drawn.add_row(column.name, *(row[place] for row in texts))
    if table.has_published:
        drawn.add_row("paper", *(row.cells[-1].published_text for row in table.rows))
    return drawn


def _head(column: Column) -> str:
    if column.short_name or len(column.name) <= WIDEST_HEAD or column.name[-1].isdigit():
        return column.short_name or column.name
    return column.name[:3]


def _texts(cells: tuple[Cell, ...]) -> list[Text]:
    """Best numbers bold; the mean, which comes last, with its deviation."""
    texts = [Text(cell.text, style="bold" if cell.best else "") for cell in cells]
    if cells[-1].deviation is not None:
        texts[-1].append(f" ±{cells[-1].deviation_text}")
    return texts

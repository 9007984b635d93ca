"""Tables as CSV, LaTeX and Markdown, each with what a name may hold made harmless."""

import csv
import io
import re
from collections.abc import Sequence
from math import isnan

from ctta.report.tables import NUM_DIGITS, Cell, Row, Table

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}

_CSV_NUMBERS = ("value", "deviation", "published", "published_deviation", "difference")


def one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def latex_escaped(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in one_line(text))


def markdown_escaped(text: str) -> str:
    """As text anywhere in Markdown; HTML in it stays text too."""
    return re.sub(r"([\\`*_{}\[\]()#+!|<>&~$])", r"\\\1", one_line(text))


def csv_escaped(text: str) -> str:
    """A name that a spreadsheet would take for a formula is marked as text."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def to_csv(tables: Sequence[tuple[str, Table]]) -> str:
    """One line per number, so that tables with different columns fit in one file; pivot it as you like."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["section", "run", "method", "n", "column", *_CSV_NUMBERS, "best"])
    for section, table in tables:
        for row in table.rows:
            for column, cell in zip(table.columns, row.cells, strict=True):
                names = [csv_escaped(name) for name in (section, row.run, row.label)]
                numbers = [getattr(cell, name) for name in _CSV_NUMBERS]
                known = [None if number is None or isnan(number) else round(number, NUM_DIGITS) for number in numbers]
                shown = ["" if number is None else str(number) for number in known]
                writer.writerow([*names, row.count, csv_escaped(column.key), *shown, "yes" if cell.best else ""])
    return buffer.getvalue()


def to_latex(table: Table, caption: str) -> str:
    """A booktabs table that fits a page: deviations beside the mean only, as in the paper."""
    columns = [rf"\rotatebox{{70}}{{{latex_escaped(column.name)}}}" for column in table.columns]
    heads = ["method", *columns, *(["published", "difference"] if table.has_published else [])]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_escaped(caption)}}}",
        r"\resizebox{\linewidth}{!}{%",
        rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
        r"\toprule",
        " & ".join(heads) + r" \\",
    ]
    for run in table.runs:
        lines.append(r"\midrule")
        if len(table.runs) > 1:
            lines.append(rf"\multicolumn{{{len(heads)}}}{{l}}{{\emph{{{latex_escaped(run)}}}}} \\")
        lines += [_latex_row(row, table) for row in table.rows if row.run == run]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}", r"\end{table}", ""])


def _latex_row(row: Row, table: Table) -> str:
    *cells, mean = row.cells
    deviation = rf" $\pm$ {mean.deviation_text}" if mean.deviation is not None else ""
    fields = [latex_escaped(row.label), *(_latex_number(cell) for cell in cells), _latex_number(mean) + deviation]
    if table.has_published:
        fields += [mean.published_text, f"${mean.difference_text}$" if mean.difference_text else ""]
    return " & ".join(fields) + r" \\"


def _latex_number(cell: Cell) -> str:
    return rf"\textbf{{{cell.text}}}" if cell.best else cell.text


def to_markdown(table: Table) -> str:
    """A pipe table; the run is a column where there are several."""
    several_runs = len(table.runs) > 1
    heads = [*(["run"] if several_runs else []), "method", "n", *(column.name for column in table.columns)]
    heads += ["published", "difference"] if table.has_published else []
    lines = [_pipes([markdown_escaped(head) for head in heads])]
    lines.append(_pipes(["---"] * (2 if several_runs else 1) + ["---:"] * (len(heads) - (2 if several_runs else 1))))
    for row in table.rows:
        names = [*([row.run] if several_runs else []), row.label]
        fields = [*(markdown_escaped(name) for name in names), str(row.count)]
        fields += [_markdown_cell(cell) for cell in row.cells]
        fields += [row.cells[-1].published_text, row.cells[-1].difference_text] if table.has_published else []
        lines.append(_pipes(fields))
    return "\n".join(lines)


def published_markdown(table: Table) -> str:
    """Published number and difference, column by column."""
    lines = [_pipes(["method", *(markdown_escaped(column.name) for column in table.columns)])]
    lines.append(_pipes(["---", *["---:"] * len(table.columns)]))
    for row in table.rows:
        if row.cells[-1].published is not None:
            fields = [f"{cell.published_text} ({cell.difference_text})" if cell.published else "" for cell in row.cells]
            lines.append(_pipes([markdown_escaped(row.label), *fields]))
    return "\n".join(lines)


def _markdown_cell(cell: Cell) -> str:
    text = f"**{cell.text}**" if cell.best else cell.text
    deviation = f" ± {cell.deviation_text}" if cell.deviation is not None else ""
    return f"{text}{deviation} {markdown_escaped(cell.remark)}".rstrip()


def _pipes(fields: Sequence[str]) -> str:
    return f"| {' | '.join(fields)} |"

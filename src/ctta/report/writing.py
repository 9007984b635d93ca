"""From folders of runs to the files of a report."""

from collections.abc import Sequence
from pathlib import Path

from ctta.report.document import document_of
from ctta.report.page import to_html, to_markdown_page
from ctta.report.plain import to_csv, to_latex
from ctta.report.runs import read_runs


def write(runs: Sequence[Path], out: Path) -> Path:
    """See :func:`ctta.report.write_report`."""
    loaded = read_runs(runs)
    out.mkdir(parents=True, exist_ok=True)
    document = document_of(loaded, out)
    tables, latex = [], []
    for chapter in document.chapters:
        protocol = chapter.section.protocol
        tables.append((f"{chapter.number}. {protocol}", chapter.scores))
        if chapter.classes:
            tables.append((f"{chapter.number}. {protocol}: classes", chapter.classes))
        latex += [
            to_latex(table, f"{protocol}. {table.caption}.") for table in (chapter.scores, chapter.classes) if table
        ]
    files = {
        "table.csv": to_csv(tables),
        "table.tex": "\n".join(["% needs the packages booktabs and graphicx", *latex]),
        "report.md": to_markdown_page(document),
        "report.html": to_html(document),
    }
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
    return out / "report.html"

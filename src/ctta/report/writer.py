"""Write the files of a report."""

from collections.abc import Sequence
from pathlib import Path

from ctta.report.runs import OnProgress, read_runs


def write_report(runs: Sequence[Path], out: Path, *, on_progress: OnProgress | None = None) -> Path:
    """Write report.html, report.md, table.tex, table.csv and the figures of one or more runs.

    Runs of the same protocol share a table, with a group of rows each. Results that saw different batches never share
    a table. Incomplete cells are listed and left out of the tables. Needs the extra ``bench``.

    Args:
        runs: Folders that a benchmark, :func:`ctta.evaluate` or :func:`ctta.compare` wrote.
        out: Folder to write to; created if it does not exist.
        on_progress: Called while the runs are read, with the number of cells done and in total.

    Returns:
        Path of the HTML page.

    Raises:
        ConfigError: If there is no run.
        DataError: If a folder holds no run, or one that cannot be read.
        ImportError: If the extra ``bench`` is not installed.
    """
    try:
        from ctta.report.document import build_document
        from ctta.report.renderers import render_csv, render_html, render_latex, render_markdown_report
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ctta"):
            raise
        raise ImportError("reports need the extra 'bench': pip install 'ctta[bench]'") from error
    recorded = read_runs(runs, on_progress=on_progress)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    document = build_document(recorded, out)
    tables, latex = [], ["% needs the packages booktabs and graphicx"]
    for report in document.sections:
        protocol = report.section.protocol
        tables.append((f"{report.number}. {protocol}", report.scores))
        latex.append(render_latex(report.scores, f"{protocol}. {report.scores.caption}."))
        if report.classes:
            tables.append((f"{report.number}. {protocol}: classes", report.classes))
            latex.append(render_latex(report.classes, f"{protocol}. {report.classes.caption}."))
    contents = {
        "table.csv": render_csv(tables),
        "table.tex": "\n".join(latex),
        "report.md": render_markdown_report(document),
        "report.html": render_html(document),
    }
    for name, text in contents.items():
        (out / name).write_text(text, encoding="utf-8")
    return out / "report.html"

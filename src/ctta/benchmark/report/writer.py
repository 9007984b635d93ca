"""Write the files of a report."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ctta.benchmark.report.content import ReportContent, build_content, format_numbers, parse_numbers, read_numbers
from ctta.benchmark.report.matrix import Matrix
from ctta.benchmark.report.runs import OnProgress, read_runs
from ctta.errors import DataError


def write_report(runs: Sequence[Path], out: Path, *, on_progress: OnProgress | None = None) -> Path:
    """Write report.html, report.md, table.tex, table.csv, numbers.json and the figures of one or more runs.

    Runs of the same protocol share a table, with a group of rows each. Results that saw different batches never share
    a table. Incomplete cells are listed and left out of the tables. ``numbers.json`` is a small file from which the
    report can be written again, except for images of scenes. Needs the extra ``bench``.

    Args:
        runs: Folders that a benchmark, :func:`ctta.evaluate` or :func:`ctta.compare` wrote, or files ``numbers.json``
            of earlier reports.
        out: Folder to write to; created if it does not exist.
        on_progress: Called while the runs are read, with the number of cells done and in total.

    Returns:
        Path of the HTML page.

    Raises:
        ConfigError: If there is no run.
        DataError: If a folder holds no run, or one that cannot be read.
        ImportError: If the extra ``bench`` is not installed.
    """
    with _name_extra():
        from ctta.benchmark.report import pages
    files = [] if isinstance(runs, str | Path) else [Path(path) for path in runs if Path(path).is_file()]
    folders = runs if not files else [path for path in runs if not Path(path).is_file()]
    recorded = read_runs(folders, on_progress=on_progress) if folders or not files else []
    contents = [build_content(recorded), *(read_numbers(path, ReportContent) for path in files)]
    numbers = format_numbers(
        ReportContent(
            sections=tuple(section for each in contents for section in each.sections),
            runs=tuple(run for each in contents for run in each.runs),
            missing=tuple(cell for each in contents for cell in each.missing),
        )
    )
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    # From the rounded numbers, so that a report that is written again is the same to the last byte.
    content = parse_numbers(numbers, ReportContent)
    reports = pages.draw_sections(content, out, recorded)
    tables, latex = [], ["% needs the packages booktabs and graphicx"]
    for report in reports:
        section = report.content
        named = {"": section.scores, ": visits": section.visits, ": classes": section.classes}
        tables += [(f"{report.number}. {section.protocol}{name}", table) for name, table in named.items() if table]
        printed = [table for table in (section.scores, section.classes) if table]
        latex += [pages.render_latex(table, f"{section.protocol}. {table.caption}.") for table in printed]
    texts = {
        "numbers.json": numbers,
        "table.csv": pages.render_csv(tables),
        "table.tex": "\n".join(latex),
        "report.md": pages.render_markdown_report(content, reports),
        "report.html": pages.render_template("page.html", content=content, reports=reports),
    }
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    return out / "report.html"


def write_matrix(matrix: Matrix, out: Path) -> Path:
    """Write matrix.html, matrix.md, matrix.csv, numbers.json and the heat map of a matrix. Needs the extra ``bench``.

    Args:
        matrix: The numbers, see :func:`read_matrix`.
        out: Folder to write to; created if it does not exist.

    Returns:
        Path of the HTML page.

    Raises:
        DataError: If there is no protocol on which Source is complete.
        ImportError: If the extra ``bench`` is not installed.
    """
    with _name_extra():
        from ctta.benchmark.report import pages
    if not matrix.protocols:
        raise DataError("Source is not complete on any protocol of the matrix: run 'ctta bench matrix' again")
    return pages.write_matrix_page(matrix, Path(out))


@contextmanager
def _name_extra() -> Iterator[None]:
    """Let the error of a missing package name the extra that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ctta"):
            raise
        raise ImportError("reports need the extra 'bench': pip install 'ctta[bench]'") from error

"""Pages and tables of docs/results, drawn from the numbers that are stored there.

    python -m benchmarks.results.pages            write the page of each result, and the tables in README.md and docs
    python -m benchmarks.results.pages --check    only compare them with the numbers

A table between ``<!-- results: NAME KIND -->`` and ``<!-- end of results -->`` in a Markdown file is written from
``docs/results/NAME``; kinds are those of :data:`KINDS`. Blocks of results that are not measured yet say so.
"""

import argparse
import json
import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from statistics import mean

from rich.console import Console

from benchmarks.results.guard_pages import format_table as format_guard_table
from benchmarks.results.planned import PLANNED
from ctta.benchmark.report.content import ReportContent, SectionContent, parse_numbers
from ctta.benchmark.report.pages import (
    SectionReport,
    draw_sections,
    escape_markdown,
    render_markdown,
    render_markdown_report,
)
from ctta.benchmark.report.plots import ReportFigure
from ctta.cli.bench import print_table
from ctta.cli.demo import describe_demo

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
_BLOCK = re.compile(r"(<!-- results: (\S+) (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def read_content(name: str) -> ReportContent:
    """Return the numbers of a result."""
    return parse_numbers((RESULTS / name / "numbers.json").read_text(), ReportContent)


def write_page(name: str, folder: Path) -> None:
    """Write README.md and the picture of a result into a folder."""
    content = read_content(name)
    with tempfile.TemporaryDirectory() as temporary:
        for report in draw_sections(content, Path(temporary)):
            if found := report.figures.get("scores_over_time"):
                picture = f"{found.name}.png"
                shutil.copy(Path(temporary, picture), folder / picture)
    (folder / "README.md").write_text(render_page(content))


def render_page(content: ReportContent) -> str:
    """Return the report in Markdown with one picture per section, that of the score over time."""
    sections = []
    for number, section in enumerate(content.sections, start=1):
        # Also of version 0.2, whose curves are not stored, but their picture is.
        name = f"{section.metric.key}-over-time{'' if number == 1 else f'-{number}'}"
        picture = ReportFigure(name, f"{section.metric.title} over time", section.timeline_caption, "")
        sections.append(SectionReport(number, section, {"scores_over_time": picture}))
    return render_markdown_report(content, sections)


def render_means(section: SectionContent) -> str:
    """Return the mean of each method, in one row of a Markdown table."""
    cells = [(escape_markdown(row.label), row.cells[-1]) for row in section.scores.rows]
    values = [cell.text + (f" ± {cell.deviation_text}" if cell.deviation is not None else "") for _, cell in cells]
    names = [name for name, _ in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in (names, ["---:"] * len(cells), values))


def render_text(section: SectionContent) -> str:
    """Return the table as the terminal shows it."""
    file = StringIO()
    print_table(section.scores, Console(file=file, width=200, color_system=None))
    lines = [line.rstrip() for line in file.getvalue().rstrip().splitlines()]
    return "\n".join(["```", *lines, "```"])


def render_guards() -> str:
    """Return the table of the guard's measurements."""
    return format_guard_table(json.loads((RESULTS / "guards" / "results.json").read_text())).rstrip()


def render_views() -> str:
    """Return CoTTA's error by the number of its views."""
    names = {"cotta": "reference", "cotta_fast": "`CoTTA.fast`"}
    lines = ["| views | error, seeds 1, 2, 3 | mean |", "|---|---|---|"]
    for method, by_number in json.loads((RESULTS / "views" / "errors.json").read_text()).items():
        for number, errors in by_number.items():
            seeds = ", ".join(f"{error:.2f}" for error in errors)
            lines.append(f"| {number}, {names[method]} | {seeds} | {mean(errors):.2f} |")
    return "\n".join(lines)


def render_list() -> str:
    """Return the table of all results with their commands."""
    lines = ["| result | shows | core hours | commands |", "|---|---|---:|---|"]
    for name, plan in PLANNED.items():
        link = f"[{name}]({name}/)" if (RESULTS / name).is_dir() else f"{name} (not measured yet)"
        commands = "<br>".join(f"`{command}`" for command in plan.commands)
        lines.append(f"| {link} | {plan.about} | {plan.core_hours:g} | {commands} |")
    return "\n".join(lines)


#: What a block in a Markdown file shows of the first section of a result.
KINDS: dict[str, Callable[[SectionContent], str]] = {
    "table": lambda section: render_markdown(section.scores),
    "means": render_means,
    "text": render_text,
    "headline": lambda section: textwrap.fill(escape_markdown(section.headline), 140),
    "curves": lambda section: (
        f"![{section.metric.title} over time]({section.runs[0]}/{section.metric.key}-over-time.png)"
    ),
    "words": lambda section: textwrap.fill(describe_demo(section), 140),
}
#: Tables that are not of a report: the list of all results, and those with numbers in another form.
OWN_TABLES: dict[str, Callable[[], str]] = {"list": render_list, "guards": render_guards, "views": render_views}


def render_block(name: str, kind: str) -> str:
    """Return what belongs between the marks of a block."""
    if name in OWN_TABLES:
        return OWN_TABLES[name]()
    if kind not in KINDS:
        raise ValueError(f"there is no kind {kind!r} of tables: expected one of {', '.join(KINDS)}")
    if name in PLANNED and not (RESULTS / name).exists():
        return f"Not measured yet: `make results ONLY={name}`, about {PLANNED[name].core_hours:g} core hours."
    return KINDS[kind](read_content(name).sections[0])


def fill_blocks(text: str) -> str:
    """Return a Markdown text with its blocks written anew."""
    return _BLOCK.sub(lambda match: f"{match[1]}{render_block(match[2], match[3])}\n{match[4]}", text)


def find_pages() -> list[Path]:
    """Return the Markdown files that may have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fill_pages() -> None:
    """Write the blocks of all Markdown files anew."""
    for path in find_pages():
        text = path.read_text()
        if (filled := fill_blocks(text)) != text:
            path.write_text(filled)


def find_reports() -> list[str]:
    """Return the names of the results whose numbers have the form of a report."""
    return [
        name for name, plan in PLANNED.items() if plan.run is not None and (RESULTS / name / "numbers.json").exists()
    ]


def find_differences() -> Iterator[str]:
    """Yield the files that are not what the numbers say."""
    for name in find_reports():
        if (RESULTS / name / "README.md").read_text() != render_page(read_content(name)):
            yield f"docs/results/{name}/README.md"
    for path in find_pages():
        if fill_blocks(path.read_text()) != path.read_text():
            yield str(path.relative_to(ROOT))


def main() -> None:
    """Write or check all pages and tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if something would change")
    if parser.parse_args().check:
        if differing := list(find_differences()):
            raise SystemExit(f"run python -m benchmarks.results.pages: {', '.join(differing)}")
        return
    for name in find_reports():
        write_page(name, RESULTS / name)
    fill_pages()


if __name__ == "__main__":
    main()

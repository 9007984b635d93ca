"""The tables and pages of the docs are those of the numbers in docs/results, and every result has its command."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.results import all_methods
from benchmarks.results import matrix as matrix_results
from benchmarks.results import pages as result_pages
from benchmarks.results import run as results
from benchmarks.results.planned import PLANNED
from ctta import models
from ctta.benchmark import RECIPES, build_task
from ctta.benchmark.matrix import MATRIX
from ctta.benchmark.recipes import BenchmarkOptions
from ctta.benchmark.report.content import ReportContent, parse_numbers
from ctta.benchmark.report.pages import render_markdown

RESULTS = result_pages.RESULTS


def test_pages_and_tables_are_those_of_the_numbers() -> None:
    """If it fails: python -m benchmarks.results.pages."""
    assert list(result_pages.find_differences()) == []


def test_another_number_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (result_pages.ROOT / "README.md").read_text()
    block = "<!-- results: demo text -->\n"
    assert page.count(block) == 1
    (tmp_path / "demo").mkdir()
    numbers = json.loads((RESULTS / "demo" / "numbers.json").read_text())
    numbers["sections"][0]["scores"]["rows"][0]["cells"][0]["value"] += 1
    (tmp_path / "demo" / "numbers.json").write_text(json.dumps(numbers))
    assert result_pages.fill_blocks(page) == page
    monkeypatch.setattr(result_pages, "RESULTS", tmp_path)
    assert result_pages.fill_blocks(page) != page


def test_blocks_of_every_kind() -> None:
    kinds = {name: result_pages.render_block("demo", name) for name in result_pages.KINDS}
    section = result_pages.read_content("demo").sections[0]
    assert kinds["table"] == render_markdown(section.scores)
    assert kinds["text"].startswith("```\nError in percent") and kinds["means"].startswith("| Source |")
    assert (RESULTS / kinds["curves"].partition("(")[2].rstrip(")")).is_file()
    with pytest.raises(ValueError, match="tabel"):
        result_pages.render_block("demo", "tabel")


def test_a_block_of_a_result_that_is_not_measured_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(result_pages, "RESULTS", tmp_path)
    assert result_pages.render_block("full", "means").startswith("Not measured yet: `make results ONLY=full`, about")
    with pytest.raises(FileNotFoundError):
        result_pages.render_block("fool", "means")


def test_the_words_about_the_demo_are_true() -> None:
    section = result_pages.read_content("demo").sections[0]
    words = " ".join(result_pages.render_block("demo", "words").split())
    assert words.count(". ") == 2 and words.endswith(".")  # three sentences
    means = {row.label: row.cells[-1].value for row in section.scores.rows}
    for label, value in means.items():
        assert f"{value:.1f} %" in words, label
    assert means["BN Stats Adapt"] < means["Source"]
    learned = [value for label, value in means.items() if label not in ("Source", "BN Stats Adapt")]
    assert ("do better still" in words) == (max(learned) < means["BN Stats Adapt"])


def test_the_table_of_all_methods_is_that_of_its_numbers() -> None:
    page = (RESULTS / "all-methods" / "README.md").read_text()
    table = page.partition(all_methods.START)[2].partition(all_methods.END)[0]
    numbers = json.loads((RESULTS / "all-methods" / "numbers.json").read_text())
    assert table.strip() == all_methods.format_table(numbers)


@pytest.mark.parametrize("name", result_pages.find_reports())
def test_the_numbers_of_a_result_have_its_command(name: str) -> None:
    content = parse_numbers((RESULTS / name / "numbers.json").read_text(), ReportContent)
    assert content.runs[0].commands == PLANNED[name].commands
    assert not content.missing
    for section in content.sections:
        assert section.streams and section.networks and dict(section.environment)["torch"]


@pytest.mark.parametrize("name", PLANNED)
def test_planned_commands_can_be_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(result_pages.ROOT)  # networks of the repository are named by their path below it
    for command in PLANNED[name].commands:
        words = results.complete_command(command, Path("out"), Path("cifar"), workers=2)
        assert "RUN" not in words and "CIFAR" not in words
        if words[2] != "ctta":
            assert (result_pages.ROOT / words[2].replace(".", "/")).with_suffix(".py").is_file()
            continue
        assert words[words.index("--out") + 1] == "out"
        if words[3:5] == ["bench", MATRIX]:
            assert "--methods" not in words and "--protocols" not in words  # the default ones, which have a test
        elif words[3] == "bench":
            assert words[4] in RECIPES
            model = words[words.index("--model") + 1] if "--model" in words else "embedded"
            models.load(model)
            rows = words[words.index("--methods") + 1].split(",") if "--methods" in words else []
            task = build_task(words[4], BenchmarkOptions(), [row for row in rows if row != "all"])
            assert set(rows) - {"all"} <= task.methods.keys()


def test_results_in_git_are_small() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file() and path.parent.name in PLANNED]
    assert [path.name for path in files if path.stat().st_size > 1_000_000 or path.suffix == ".html"] == []
    pictures = [path for path in files if path.suffix == ".png" and path.parent.name in result_pages.find_reports()]
    assert len(pictures) == len({path.parent for path in pictures})  # one each


def test_links_of_the_list_exist() -> None:
    text = result_pages.render_list()
    for name in re.findall(r"\]\((\S+?)\)", text):
        assert (RESULTS / name).is_dir()
    assert all(f"[{name}](" in text or f"{name} (not measured yet)" in text for name in PLANNED)


def test_the_page_of_the_matrix_is_that_of_its_numbers(tmp_path: Path) -> None:
    """If it fails: python -m benchmarks.results.matrix docs/results/matrix/numbers.json."""
    folder = RESULTS / "matrix"
    matrix_results.write_results(folder / "numbers.json", tmp_path)
    for name in ("README.md", "numbers.json"):
        assert (tmp_path / name).read_text() == (folder / name).read_text()

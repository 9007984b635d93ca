"""Whole reports: the same numbers in every format, escaped names, and incomplete or incomparable runs."""

import csv
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from report_runs import (
    CONTINUAL,
    METHODS,
    ParsedPage,
    format_row,
    read_results,
    write_all_methods,
    write_cell,
    write_run,
)

from ctta.benchmark.report import read_runs, score_table, write_report
from ctta.benchmark.report.published import PUBLISHED
from ctta.benchmark.report.runs import group_into_sections
from ctta.errors import ConfigError, DataError, InputError

HOSTILE = '<script>alert("x")</script> | & $\\frac{ $ %_x #1 ~ ^ `c` **b** [a](http://evil.example/) \x07'


def test_every_format_has_the_same_numbers(tmp_path: Path) -> None:
    run = write_all_methods(write_run(tmp_path / "run"), CONTINUAL)
    table = score_table(read_results(run))
    page = write_report([run], tmp_path / "out")
    assert page == tmp_path / "out" / "report.html"
    shown = ParsedPage(page.read_text()).tables[0]
    lines = [line.split(" & ") for line in (page.parent / "table.tex").read_text().splitlines() if " & " in line]
    markdown = [line.strip("| ").split(" | ") for line in (page.parent / "report.md").read_text().splitlines()]
    records = list(csv.DictReader((page.parent / "table.csv").read_text().splitlines()))
    assert len(records) == len(METHODS) * 16
    for number, method in enumerate(METHODS, start=1):
        expected = list(format_row(table, method).values())
        assert shown[number][0] == lines[number][0] == method
        assert [text.split("|")[0] for text in shown[number][2:18]] == expected
        assert [re.sub(r"\\textbf{(.*)}", r"\1", text).split(" ")[0] for text in lines[number][1:17]] == expected
        found = next(fields for fields in markdown if fields[0].replace("\\", "") == method)
        assert [text.split(" ")[0].strip("*") for text in found[2:18]] == expected
        values = [record for record in records if record["method"] == method]
        assert [f"{float(record['value']):.1f}" for record in values] == expected
        best = [cell.is_best for row in table.rows if row.label == method for cell in row.cells]
        assert [record["best"] == "yes" for record in values] == best
        assert [text.startswith(r"\textbf") for text in lines[number][1:17]] == best
        published = PUBLISHED["cifar10c"].rows.get(method)
        if published:
            assert float(shown[number][18].split("|")[0]) == published.mean == float(values[-1]["published"])
            difference = float(expected[-1]) - published.mean
            assert float(shown[number][19].replace("\N{MINUS SIGN}", "-")) == pytest.approx(difference)
            assert float(lines[number][18].strip("$ \\")) == pytest.approx(difference)
            assert float(values[-1]["difference"]) == pytest.approx(difference)


def test_reports_are_deterministic(tmp_path: Path) -> None:
    run = write_all_methods(write_run(tmp_path / "run"), CONTINUAL, num_batches=2, seeds=[0])
    first, second = write_report([run], tmp_path / "a").parent, write_report([run], tmp_path / "b").parent
    names = sorted(path.name for path in first.iterdir())
    figures = [f"{name}.{ending}" for name in ("cost", "error-over-time", "reliability") for ending in ("png", "svg")]
    assert names == sorted([*figures, "numbers.json", "report.html", "report.md", "table.csv", "table.tex"])
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_unusable_cells_are_listed_and_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="mine")
    write_cell(run, "whole", [[20], [20]], domains=["fog", "snow"])
    folder = write_cell(run, "half", [[20], [20]], domains=["fog", "snow"])
    text = (folder / "batches.jsonl").read_text()
    (folder / "batches.jsonl").write_text(text[:-9])  # killed while it wrote
    (run / "cells" / "begun").mkdir()
    damaged = write_cell(run, "damaged", [[20], [20]], domains=["fog", "snow"])
    (damaged / "about.json").write_text("{")
    page = write_report([run], tmp_path / "out")
    tables = ParsedPage(page.read_text()).tables
    assert [fields[0] for fields in tables[0]] == ["method", "whole"]
    missing = {fields[1]: fields[2] for fields in tables[-1][1:]}
    assert missing[folder.name] == "1 of 2 batches done" and missing["begun"] == "not started"
    assert "cannot be read" in missing[damaged.name]
    assert "half" not in (page.parent / "table.csv").read_text()
    assert "1 of 2 batches done" in (page.parent / "report.md").read_text()


def test_a_run_without_complete_cells_has_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_cell(run, "CoTTA", [[20]], domains=CONTINUAL, num_batches=15)
    page = write_report([run], tmp_path / "out")
    assert "No cell is complete yet" in page.read_text()
    with pytest.raises(InputError):
        score_table([])


def test_different_batches_never_share_a_table(tmp_path: Path) -> None:
    domains = ["fog", "snow"]
    first, second = write_run(tmp_path / "first", recipe="mine"), write_run(tmp_path / "second", recipe="mine")
    for run in (first, second):
        write_cell(run, "Source", [[20], [20]], domains=domains)
    write_cell(first, "CoTTA", [[10], [10]], domains=domains)
    both = group_into_sections(read_runs([first, second]))
    assert [section.runs for section in both] == [("first", "second")] and not both[0].warnings
    page = write_report([first, second], tmp_path / "same")
    assert [fields[0] for fields in ParsedPage(page.read_text()).tables[0][1:]] == [
        "first",
        "Source",
        "CoTTA",
        "second",
        "Source",
    ]
    write_cell(second, "CoTTA", [[10], [10]], domains=domains, stream_hash="another")
    with pytest.raises(InputError):
        score_table(read_results(second))
    split = group_into_sections(read_runs([first, second]))
    assert [[entry.label for entry in section.entries] for section in split] == [
        ["Source", "CoTTA", "Source"],
        ["CoTTA"],
    ]
    page = write_report([first, second], tmp_path / "split")
    assert page.read_text().count("Not comparable") == 2
    assert (page.parent / "report.md").read_text().count("Not comparable") == 2
    assert (page.parent / "error-over-time-2.png").is_file()


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run <b>", recipe=HOSTILE, command=HOSTILE)
    names: dict[str, Any] = {
        "settings": {HOSTILE: HOSTILE},
        "source": HOSTILE,
        "stream": HOSTILE,
        "environment": {HOSTILE: HOSTILE},
    }
    for method in (HOSTILE, "_hidden", "=1+1", "模型"):
        write_cell(run, method, [[20], [30]], domains=[HOSTILE, "$x$"], **names)
    (run / "cells" / "half<i>").mkdir()
    page = write_report([run], tmp_path / "out")
    parsed = ParsedPage(page.read_text())
    assert not {"script", "b", "i", "img"} & {tag for tag, _attributes in parsed.elements}
    assert any('<script>alert("x")</script>' in fields[0] for fields in parsed.tables[0])
    for figure in page.parent.glob("*.svg"):
        assert "script" not in {element.tag.split("}")[-1] for element in ElementTree.parse(figure).iter()}
    assert "alert" in (page.parent / "error-over-time.svg").read_text()
    lines = [line for line in (page.parent / "report.md").read_text().splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines[:6]} == {6}
    assert not any(re.search(r"(?<!\\)[<*`](?!\*)(?!\d)", line.replace("**", "")) for line in lines)
    tex = (page.parent / "table.tex").read_text()
    assert r"\textbackslash{}frac\{ \$ \%\_x \#1" in tex and tex.count("&") == tex.count(r"\&") + 5 * 3
    records = list(csv.DictReader((page.parent / "table.csv").read_text().splitlines()))
    assert {record["method"] for record in records} >= {"'=1+1", "_hidden", "模型"}


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = write_report([write_all_methods(write_run(tmp_path / "run"), CONTINUAL, num_batches=1)], tmp_path / "out")
    text = page.read_text()
    for tag, attributes in ParsedPage(text).elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "image", "base")
        assert "src" not in attributes and not [name for name in attributes if name.startswith("on")]
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    targets = re.findall(r'(?:href="#|url\(#)([^")]*)', text)
    assert set(targets) <= set(ids)


def test_unusable_folders_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        write_report([tmp_path], tmp_path / "out")
    with pytest.raises(TypeError, match="sequence of folders"):
        write_report(tmp_path, tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        write_report([], tmp_path / "out")
    run = write_run(tmp_path / "run")
    (run / "run.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match="another version"):
        write_report([run], tmp_path / "out")
    (run / "run.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        write_report([run], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_runs_with_the_same_name_get_distinct_names(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / day / "cifar10c") for day in ("monday", "tuesday")]
    assert [run.name for run in read_runs([*folders, folders[0]])] == ["monday/cifar10c", "tuesday/cifar10c"]


def test_tables_need_no_extra_and_reports_name_theirs(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["matplotlib"] = None
from ctta.benchmark.report import score_table, write_report
try:
    write_report([], ".")
except ImportError as error:
    print(error)
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output == "reports need the extra 'bench': pip install 'ctta[bench]'\n"

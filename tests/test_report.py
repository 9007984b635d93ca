"""The report's numbers against arithmetic done here, and the same numbers in every format."""

import csv
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev
from xml.etree import ElementTree

import numpy as np
import pytest
from report_runs import CONTINUAL, GRADUAL, METHODS, ROUNDS, STANDARD, write_cell, write_run, write_story

from ctta.evaluation.results import Result
from ctta.report import Table, score_table, write_report
from ctta.report.colors import styles_of
from ctta.report.curves import stretches_of, time_line
from ctta.report.entries import entries_of
from ctta.report.published import PUBLISHED
from ctta.report.runs import read_run, read_runs
from ctta.report.sections import sections_of
from ctta.report.summary import summary_table_of

HOSTILE = '<script>alert("x")</script> | & $\\frac{ $ %_x #1 ~ ^ `c` **b** [a](http://evil.example/) \x07'


def results_of(run: Path) -> list[Result]:
    return list(read_run(run).results)


def row(table: Table, label: str) -> dict[str, str]:
    (found,) = [row for row in table.rows if row.label == label]
    return {column.key: cell.text for column, cell in zip(table.columns, found.cells, strict=True)}


class Cells(HTMLParser):
    """The first table of a page as lists of texts, and everything that could load something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open) and data.strip():
            space = "|" if self.tables[-1][-1][-1] else ""
            self.tables[-1][-1][-1] += space + data.strip()


def test_the_table_is_plain_arithmetic(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    wrong = {
        ("Source", None): [[80 + place, 70] for place in range(15)],
        ("CoTTA", 0): [[30, 20 + place] for place in range(15)],
        ("CoTTA", 1): [[34, 21 + 2 * place] for place in range(15)],
    }
    for (method, seed), counts in wrong.items():
        write_cell(run, method, counts, domains=CONTINUAL, seed=seed)
    table = score_table(results_of(run))
    assert [column.name for column in table.columns] == [*(name.replace("_", " ") for name in STANDARD), "mean"]
    source, cotta = table.rows
    assert (source.label, source.count, cotta.label, cotta.count) == ("Source", 1, "CoTTA", 2)
    per_seed = [[100 * sum(counts) / 400 for counts in wrong["CoTTA", seed]] for seed in (0, 1)]
    for place, cell in enumerate(cotta.cells[:-1]):
        values = [errors[place] for errors in per_seed]
        assert cell.value == pytest.approx(mean(values))
        assert cell.deviation == pytest.approx(stdev(values))
        assert source.cells[place].value == pytest.approx(100 * (150 + place) / 400)
        assert source.cells[place].deviation is None
        assert cell.best and not source.cells[place].best
    means = [mean(errors) for errors in per_seed]
    assert cotta.cells[-1].value == pytest.approx(mean(means))
    assert cotta.cells[-1].deviation == pytest.approx(stdev(means))
    assert (cotta.cells[0].published, cotta.cells[-1].published, source.cells[-1].published) == (24.3, 16.2, 43.5)
    assert cotta.cells[-1].difference == pytest.approx(round(mean(means), 1) - 16.2)
    assert any("400 images" in note and "10,000" in note for note in table.notes)


def test_ties_are_both_best_and_equal_columns_have_no_best(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="mine")
    for method, first in (("a", 20), ("b", 20), ("c", 30)):
        write_cell(run, method, [[first], [40]], domains=["fog", "snow"])
    table = score_table(results_of(run))
    by_key = {column.key: [row.cells[place].best for row in table.rows] for place, column in enumerate(table.columns)}
    assert by_key == {"snow": [False] * 3, "fog": [True, True, False], "mean": [True, True, False]}
    assert not table.has_published


def test_every_format_has_the_same_numbers(tmp_path: Path) -> None:
    run = write_story(write_run(tmp_path / "run"), CONTINUAL)
    table = score_table(results_of(run))
    page = write_report([run], tmp_path / "out")
    assert page == tmp_path / "out" / "report.html"
    shown = Cells(page.read_text()).tables[0]
    lines = [line.split(" & ") for line in (page.parent / "table.tex").read_text().splitlines() if " & " in line]
    markdown = [line.strip("| ").split(" | ") for line in (page.parent / "report.md").read_text().splitlines()]
    records = list(csv.DictReader((page.parent / "table.csv").read_text().splitlines()))
    assert len(records) == len(METHODS) * 16
    for number, method in enumerate(METHODS, start=1):
        expected = list(row(table, method).values())
        assert shown[number][0] == lines[number][0] == method
        assert [text.split("|")[0] for text in shown[number][2:18]] == expected
        assert [re.sub(r"\\textbf{(.*)}", r"\1", text).split(" ")[0] for text in lines[number][1:17]] == expected
        found = next(fields for fields in markdown if fields[0].replace("\\", "") == method)
        assert [text.split(" ")[0].strip("*") for text in found[2:18]] == expected
        values = [record for record in records if record["method"] == method]
        assert [f"{float(record['value']):.1f}" for record in values] == expected
        best = [cell.best for row in table.rows if row.label == method for cell in row.cells]
        assert [record["best"] == "yes" for record in values] == best
        assert [text.startswith(r"\textbf") for text in lines[number][1:17]] == best
        published = PUBLISHED["cifar10c"].rows.get(method)
        if published:
            assert float(shown[number][18].split("|")[0]) == published.mean == float(values[-1]["published"])
            difference = float(expected[-1]) - published.mean
            assert float(shown[number][19].replace("\N{MINUS SIGN}", "-")) == pytest.approx(difference)
            assert float(lines[number][18].strip("$ \\")) == pytest.approx(difference)
            assert float(values[-1]["difference"]) == pytest.approx(difference)


def test_files_of_a_report_are_the_same_each_time(tmp_path: Path) -> None:
    run = write_story(write_run(tmp_path / "run"), CONTINUAL, batches=2, seeds=[0])
    first, second = write_report([run], tmp_path / "a").parent, write_report([run], tmp_path / "b").parent
    names = sorted(path.name for path in first.iterdir())
    pictures = [f"{name}.{ending}" for name in ("cost", "error-over-time", "reliability") for ending in ("png", "svg")]
    assert names == sorted([*pictures, "report.html", "report.md", "table.csv", "table.tex"])
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_rounds_have_a_column_each(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="embedded")
    wrong = [[10 + place] for place in range(150)]
    write_cell(run, "CoTTA", wrong, domains=ROUNDS, stream="embedded continual order=standard rounds=10")
    (result,) = results_of(run)
    table = score_table([result])
    assert [column.name for column in table.columns] == [*(f"round {number}" for number in range(1, 11)), "mean"]
    assert table.rows[0].cells[3].value == pytest.approx(mean((10 + place) / 2 for place in range(45, 60)))
    assert table.rows[0].cells[-1].value == pytest.approx(mean((10 + place) / 2 for place in range(150)))
    assert [stretch.name for stretch in stretches_of(result)] == [f"round {number}" for number in range(1, 11)]
    (curve,) = time_line(entries_of([result])).curves
    assert curve.round_values == pytest.approx([cell.value for cell in table.rows[0].cells[:-1]])


def test_a_few_domains_have_a_column_each_in_some_rounds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="mine")
    wrong = [[place] for place in range(14)]
    write_cell(run, "CoTTA", wrong, domains=["glass_blur 5", "snow 5"] * 7)
    table = score_table(results_of(run))
    expected = [f"{domain}, round {number}" for number in (1, 3, 5, 7) for domain in ("glass blur", "snow")]
    assert [column.name for column in table.columns] == [*expected, "mean"]
    values = [cell.value for cell in table.rows[0].cells]
    assert values == pytest.approx([place / 2 for place in (0, 1, 4, 5, 8, 9, 12, 13)] + [6.5 / 2])
    assert "in rounds 1, 3, 5 and 7, and the mean of all 7 rounds" in table.caption
    write_cell(run, "again and again", [[1]] * 3, domains=["fog"] * 3)
    again = score_table(results_of(run)[1:])
    assert [column.name for column in again.columns] == ["round 1", "round 2", "round 3", "mean"]


def test_gradual_streams_have_a_column_for_each_kind(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="cifar10c-gradual")
    wrong = [[place] for place in range(len(GRADUAL))]
    write_cell(run, "CoTTA", wrong, domains=GRADUAL, order=0)
    (result,) = results_of(run)
    table = score_table([result])
    assert [column.key for column in table.columns] == [*STANDARD, "mean"]
    assert table.rows[0].cells[0].value == pytest.approx(mean(place / 2 for place in range(5)))  # 5, 4, 3, 2, 1
    assert table.rows[0].cells[1].value == pytest.approx(mean(place / 2 for place in range(5, 14)))
    # The mean is that of all segments, not of the columns: the first kind has fewer.
    assert table.rows[0].cells[-1].value == pytest.approx(mean(place / 2 for place in range(131)))
    assert table.rows[0].cells[-1].published == 10.4 and table.rows[0].cells[0].published is None
    assert any("10 orders" in note for note in table.notes)
    assert len(stretches_of(result)) == 15


def test_orders_are_averaged_by_domain(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="imagenetc")
    write_cell(run, "CoTTA", [[20]] * 14 + [[60]], domains=CONTINUAL, order=0)
    write_cell(run, "CoTTA", [[60]] + [[20]] * 14, domains=[CONTINUAL[-1], *CONTINUAL[:-1]], order=1)
    write_cell(run, "Source", [[30]] * 15, domains=CONTINUAL, order=0)
    table = score_table(results_of(run))
    assert row(table, "CoTTA")["jpeg_compression 5"] == "30.0"
    assert row(table, "CoTTA")["gaussian_noise 5"] == "10.0"
    (section,) = sections_of(read_runs([run]))
    assert any("different orders" in warning for warning in section.warnings)
    assert section.protocol == "imagenetc continual severity=5"


@pytest.mark.parametrize(
    ("domains", "order", "reason"),
    [
        (CONTINUAL, 3, "standard order"),
        ([f"{name} 3" for name in STANDARD], None, "severity 5"),
        (CONTINUAL[:4], None, "fifteen"),
        (ROUNDS, None, "repeats"),
    ],
)
def test_published_numbers_stand_only_beside_their_stream(
    tmp_path: Path, domains: list[str], order: int | None, reason: str
) -> None:
    run = write_run(tmp_path / "run")
    write_cell(run, "CoTTA", [[20]] * len(domains), domains=domains, order=order)
    table = score_table(results_of(run))
    assert not table.has_published and reason in table.notes[0]


def test_published_rows_are_free_of_slips() -> None:
    assert sorted(PUBLISHED) == ["acdc", "cifar100c", "cifar10c", "cifar10c-gradual", "imagenetc"]
    for recipe, table in PUBLISHED.items():
        for published in table.rows.values():
            assert len(published.columns) in ((16,) if recipe == "acdc" else (0, 15))
            if published.columns:
                assert mean(published.columns.values()) == pytest.approx(published.mean, abs=0.1)


def test_calibration_cost_and_the_worst_domain(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="mine")
    folder = write_cell(run, "a", [[20, 30], [90, 70]], domains=["fog", "snow"], seconds=0.5)
    lines = (folder / "batches.jsonl").read_text()
    (folder / "batches.jsonl").write_text(lines.replace('"skipped": false', '"skipped": true', 1))
    write_cell(run, "b", [[20, 30], [10, 10]], domains=["fog", "snow"], seconds=0.25)
    results = results_of(run)
    table = summary_table_of(entries_of(results))
    first, second = row(table, "a"), row(table, "b")
    assert (first["ms_per_image"], second["ms_per_image"]) == ("2.50", "1.25")
    assert (first["worst"], second["worst"]) == ("40.0", "12.5")
    assert [row.cells[4].remark for row in table.rows] == ["snow", "fog"]
    assert (first["skipped"], second["skipped"], table.rows[0].cells[5].remark) == ("1", "0", "of 4")
    assert first["peak_mib"] == "901"
    bins = [batch.score.bins for batch in results[0].batches]
    gaps = [sum(b[number][1] for b in bins) - sum(b[number][2] for b in bins) for number in range(15)]
    assert first["calibration_error"] == f"{100 * sum(abs(gap) for gap in gaps) / 800:.1f}"


def test_a_line_is_never_averaged_across_a_boundary(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="mine")
    write_cell(run, "a", [[10] * 7, [90] * 7], domains=["fog", "snow"])
    (curve,) = time_line(entries_of(results_of(run))).curves
    assert set(curve.values) == {5.0, 45.0}
    assert [error for place, error in zip(curve.places, curve.values, strict=True) if place < 1400] == [5.0] * 5


def test_cells_that_cannot_be_used_are_listed_and_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="mine")
    write_cell(run, "whole", [[20], [20]], domains=["fog", "snow"])
    folder = write_cell(run, "half", [[20], [20]], domains=["fog", "snow"])
    text = (folder / "batches.jsonl").read_text()
    (folder / "batches.jsonl").write_text(text[:-9])  # killed while it wrote
    (run / "cells" / "begun").mkdir()
    damaged = write_cell(run, "damaged", [[20], [20]], domains=["fog", "snow"])
    (damaged / "about.json").write_text("{")
    page = write_report([run], tmp_path / "out")
    tables = Cells(page.read_text()).tables
    assert [fields[0] for fields in tables[0]] == ["method", "whole"]
    missing = {fields[1]: fields[2] for fields in tables[-1][1:]}
    assert missing[folder.name] == "1 of 2 batches done" and missing["begun"] == "not started"
    assert "cannot be read" in missing[damaged.name]
    assert "half" not in (page.parent / "table.csv").read_text()
    assert "1 of 2 batches done" in (page.parent / "report.md").read_text()


def test_a_run_without_complete_cells_still_has_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_cell(run, "CoTTA", [[20]], domains=CONTINUAL, num_batches=15)
    page = write_report([run], tmp_path / "out")
    assert "No cell is complete yet" in page.read_text()
    with pytest.raises(ValueError, match="at least one complete result"):
        score_table([])


def test_different_batches_never_share_a_table(tmp_path: Path) -> None:
    domains = ["fog", "snow"]
    first, second = write_run(tmp_path / "first", recipe="mine"), write_run(tmp_path / "second", recipe="mine")
    for run in (first, second):
        write_cell(run, "Source", [[20], [20]], domains=domains)
    write_cell(first, "CoTTA", [[10], [10]], domains=domains)
    both = sections_of(read_runs([first, second]))
    assert [section.runs for section in both] == [("first", "second")] and not both[0].warnings
    page = write_report([first, second], tmp_path / "same")
    assert [fields[0] for fields in Cells(page.read_text()).tables[0][1:]] == [
        "first",
        "Source",
        "CoTTA",
        "second",
        "Source",
    ]
    write_cell(second, "CoTTA", [[10], [10]], domains=domains, stream_hash="another")
    with pytest.raises(ValueError, match="not comparable"):
        score_table(results_of(second))
    split = sections_of(read_runs([first, second]))
    assert [[entry.label for entry in section.entries] for section in split] == [
        ["Source", "CoTTA", "Source"],
        ["CoTTA"],
    ]
    page = write_report([first, second], tmp_path / "split")
    assert page.read_text().count("Not comparable") == 2
    assert (page.parent / "report.md").read_text().count("Not comparable") == 2
    assert (page.parent / "error-over-time-2.png").is_file()


def test_one_method_with_two_settings_has_two_rows(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="mine")
    for restore in ("0.01", "0.1"):
        settings = {"decay": "0.999", "restore": restore}
        write_cell(run, "CoTTA", [[20]], domains=["fog"], seed=1, settings=settings | {"seed": "1"})
    assert [row.label for row in score_table(results_of(run)).rows] == ["CoTTA [restore=0.01]", "CoTTA [restore=0.1]"]


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run <b>", recipe=HOSTILE, command=HOSTILE)
    names = {"settings": {HOSTILE: HOSTILE}, "source": HOSTILE, "stream": HOSTILE, "environment": {HOSTILE: HOSTILE}}
    for method in (HOSTILE, "_hidden", "=1+1", "模型"):
        write_cell(run, method, [[20], [30]], domains=[HOSTILE, "$x$"], **names)
    (run / "cells" / "half<i>").mkdir()
    page = write_report([run], tmp_path / "out")
    parsed = Cells(page.read_text())
    assert not {"script", "b", "i", "img"} & {tag for tag, _attributes in parsed.elements}
    assert any('<script>alert("x")</script>' in fields[0] for fields in parsed.tables[0])
    for picture in page.parent.glob("*.svg"):
        assert "script" not in {element.tag.split("}")[-1] for element in ElementTree.parse(picture).iter()}
    assert "alert" in (page.parent / "error-over-time.svg").read_text()
    lines = [line for line in (page.parent / "report.md").read_text().splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines[:6]} == {6}
    assert not any(re.search(r"(?<!\\)[<*`](?!\*)(?!\d)", line.replace("**", "")) for line in lines)
    tex = (page.parent / "table.tex").read_text()
    assert r"\textbackslash{}frac\{ \$ \%\_x \#1" in tex and tex.count("&") == tex.count(r"\&") + 5 * 3
    records = list(csv.DictReader((page.parent / "table.csv").read_text().splitlines()))
    assert {record["method"] for record in records} >= {"'=1+1", "_hidden", "模型"}


def test_a_page_loads_nothing(tmp_path: Path) -> None:
    page = write_report([write_story(write_run(tmp_path / "run"), CONTINUAL, batches=1)], tmp_path / "out")
    text = page.read_text()
    for tag, attributes in Cells(text).elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "image", "base")
        assert "src" not in attributes and not [name for name in attributes if name.startswith("on")]
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    targets = re.findall(r'(?:href="#|url\(#)([^")]*)', text)
    assert set(targets) <= set(ids)


def test_styles_differ_and_stand_out() -> None:
    styles = styles_of([*METHODS, "CoTTA: weight-avg", "CoTTA: + aug-avg", "mine", "yours"])
    assert len({(style.colour, style.dash) for style in styles.values()}) == len(styles)
    assert styles["CoTTA"] == styles_of(["CoTTA"])["CoTTA"]
    for style in styles.values():
        assert contrast(style.colour, "#ffffff") >= 3 and contrast(style.dark, "#141416") >= 3


#: What is left of linear red, green and blue for readers without one kind of cone (Machado et al., 2009).
COLOUR_BLIND = {
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


@pytest.mark.parametrize("reader", COLOUR_BLIND)
@pytest.mark.parametrize("theme", ["colour", "dark"])
def test_colours_differ_for_colour_blind_readers(reader: str, theme: str) -> None:
    styles = styles_of([*METHODS, "CoTTA: weight-avg", "CoTTA: + aug-avg"])
    seen = [lab(np.array(COLOUR_BLIND[reader]) @ linear(getattr(style, theme))) for style in styles.values()]
    distances = [np.linalg.norm(one - other) for one, other in combinations(seen, 2)]
    assert min(distances) > 8  # a difference of 2 is just noticeable side by side


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear red, green and blue, white point D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ light.clip(0, 1) / np.array([0.9505, 1, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(first: str, second: str) -> float:
    """As WCAG defines it."""
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (first, second))
    return (high + 0.05) / (low + 0.05)


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run\.json"):
        write_report([tmp_path], tmp_path / "out")
    with pytest.raises(TypeError, match="sequence of folders"):
        write_report(tmp_path, tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no run was given"):
        write_report([], tmp_path / "out")
    run = write_run(tmp_path / "run")
    (run / "run.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="another version"):
        write_report([run], tmp_path / "out")
    (run / "run.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        write_report([run], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / day / "cifar10c") for day in ("monday", "tuesday")]
    assert [run.name for run in read_runs([*folders, folders[0]])] == ["monday/cifar10c", "tuesday/cifar10c"]


def test_tables_need_no_extra_and_reports_say_which(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["matplotlib"] = None
from ctta.report import score_table, write_report
try:
    write_report([], ".")
except ImportError as error:
    print(error)
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output == "reports need the extra 'bench': pip install 'ctta[bench]'\n"

"""numbers.json: the numbers of a report in a small file, from which the report is written again."""

import json
from math import isnan
from pathlib import Path

import pytest
from command_line import output
from report_runs import CONTINUAL, STANDARD, read_results, write_all_methods, write_cell, write_run

from ctta.benchmark.report import read_runs, write_report
from ctta.benchmark.report.content import ReportContent, build_content, format_numbers, parse_numbers
from ctta.cli.bench import report
from ctta.errors import DataError


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "run", command="ctta bench x")
    write_all_methods(folder, CONTINUAL, num_batches=2, seeds=[0, 1])
    (folder / "cells" / "begun").mkdir()
    return folder


@pytest.fixture(scope="module")
def written(run: Path) -> Path:
    """The folder of a report on the run."""
    return write_report([run], run / "report").parent


def test_a_report_is_written_again_from_its_numbers(written: Path, tmp_path: Path) -> None:
    again = write_report([written / "numbers.json"], tmp_path).parent
    assert read_files(written) == read_files(again)
    assert (written / "numbers.json").stat().st_size < 100_000


def test_the_numbers_are_those_of_every_seed_and_domain(run: Path, written: Path) -> None:
    text = (written / "numbers.json").read_text()
    content = parse_numbers(text, ReportContent)
    assert content.runs[0].commands == ("ctta bench x",)
    assert [cell.reason for cell in content.missing] == ["not started"]
    (section,) = content.sections
    results = {(each.method, each.labels["seed"]): each for each in read_results(run)}
    found = {(row.label, result.seed): result for row in section.rows for result in row.results}
    assert found.keys() == results.keys()
    for key, result in results.items():
        assert found[key].values == pytest.approx([100 * error for error in result.errors], abs=1e-6)
        assert found[key].stream_hash == result.stream_hash == section.streams[0].hash
    assert list(section.streams[0].domains) == CONTINUAL
    assert json.loads(text)["sections"][0]["rows"][0]["settings"] == section.rows[0].settings
    assert max(len(line) for line in text.splitlines()) < 5000


def test_a_report_opens_with_the_result(written: Path) -> None:
    body = (written / "report.html").read_text().partition("<body>")[2]
    assert body.index("has the lowest mean error") < body.index("<table") < body.index("Stream: ")
    markdown = (written / "report.md").read_text().split("\n\n")
    assert "has the lowest mean error" in markdown[1] and STANDARD[0].split("_")[0] in markdown[2]


def test_a_missing_number_stays_missing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_cell(run, "Source", [[1], [2]], domains=["fog", "snow"])
    text = format_numbers(build_content(read_runs([run])))
    summary = parse_numbers(text, ReportContent).sections[0].summary
    assert summary
    assert isnan(summary.rows[0].cells[-1].value)  # the best row has no difference to the best
    assert "NaN" not in text


def test_files_and_folders_share_a_page(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_cell(write_run(tmp_path / name, recipe=name), "Source", [[1], [2]], domains=["fog", "snow"])
    (tmp_path / "numbers.json").write_text(format_numbers(build_content(read_runs([tmp_path / "one"]))))
    output(report, tmp_path / "numbers.json", tmp_path / "other")
    page = (tmp_path / "report" / "report.md").read_text()
    assert page.index("## 1. other") < page.index("## 2. one")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "sections": [{}], "runs": []}', '{"format": 1, "x": 1}']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "numbers.json").write_text(text)
    with pytest.raises(DataError):
        write_report([tmp_path / "numbers.json"], tmp_path / "out")

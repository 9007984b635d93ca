"""The robustness matrix: measured from runs, written as a page, and run from the command line."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import write_network
from command_line import output, user_error
from report_runs import ParsedPage, write_cell, write_run

from benchmarks.results import matrix as matrix_results
from ctta.benchmark import run_matrix
from ctta.benchmark.matrix import DEFAULT_METHODS, SIZES
from ctta.benchmark.report import Matrix, MatrixCell, MatrixProtocol, read_matrix, write_matrix
from ctta.benchmark.report.matrix import (
    build_calibration_table,
    build_difference_table,
    build_error_table,
    build_memory_table,
    build_recurrence_table,
    write_advice,
)
from ctta.benchmark.report.runs import MissingCell
from ctta.cli.bench import bench, report
from ctta.data.streams import PROTOCOLS, parse_protocol
from ctta.errors import ConfigError, DataError
from ctta.evaluation.intervals import Interval
from ctta.methods import METHODS

DOMAINS = ("fog 5", "snow 5", "frost 5", "contrast 5", "pixelate 5", "brightness 5")


def make_cell(error: float, source: float, *, half: float = 0.02, visits: tuple[float, ...] = ()) -> MatrixCell:
    """Return a cell whose difference to Source has this half width."""
    above = error - source
    is_source = error == source and not visits
    return MatrixCell(
        error=error,
        above_source=above,
        interval=Interval(above, above - (0 if is_source else half), above + (0 if is_source else half), 10),
        visit_errors=visits or (error,),
        drift=Interval(visits[-1] - visits[0], 0.1, 0.3, 10) if visits else None,
        time_to_harm=next((place for place, each in enumerate(visits, start=1) if each > source), None),
        ms_per_image=2.5,
        num_results=1,
    )


def make_protocol(name: str, source: float, best: tuple[str, ...], **errors: float) -> MatrixProtocol:
    cells = {label: make_cell(error, source) for label, error in {"Source": source, **errors}.items()}
    return MatrixProtocol(name, f"What {name} is.", "batches of 64: 3.0 of 10 classes", 3840, cells, best)


@pytest.fixture
def matrix() -> Matrix:
    recurring = replace(
        make_protocol("recurring", 0.4, ("LAME",)),
        cells={
            "Source": make_cell(0.4, 0.4, visits=(0.4, 0.4, 0.4)),
            "LAME": make_cell(0.3, 0.4, visits=(0.3, 0.3, 0.3)),
            "TENT": make_cell(0.5, 0.4, visits=(0.3, 0.5, 0.7)),
        },
    )
    protocols = (
        make_protocol("continual", 0.5, ("TENT",), LAME=0.51, TENT=0.29),
        recurring,
        make_protocol("clean", 0.1, ("Source", "TENT"), LAME=0.1, TENT=0.11),
    )
    return Matrix(protocols, ("ctta bench matrix",), (MissingCell("single", "tent-standard", "not started"),))


def test_methods_are_sorted_by_their_mean_and_incomplete_ones_come_last(matrix: Matrix) -> None:
    assert matrix.methods == ("TENT", "LAME")
    without = dict(matrix.protocols[0].cells)
    del without["TENT"]
    shorter = replace(matrix, protocols=(replace(matrix.protocols[0], cells=without), *matrix.protocols[1:]))
    assert shorter.methods == ("LAME", "TENT")


def test_tables_say_what_beats_source_and_what_harms(matrix: Matrix) -> None:
    (tent, lame) = build_difference_table(matrix).rows
    assert [cell.text for cell in tent.cells] == ["−21.0", "+10.0", "+1.0", "−3.3", "+10.0"]  # noqa: RUF001
    assert [cell.verdict for cell in tent.cells] == ["better", "worse", "unclear", None, None]
    assert [cell.mark for cell in lame.cells[:3]] == ["", "▼", ""]
    errors = {row.label: row.cells for row in build_error_table(matrix).rows}
    assert [cell.text for cell in errors["Source"]] == ["50.0", "40.0", "10.0"]
    assert [cell.is_best for cell in errors["TENT"]] == [True, False, False]  # within noise on clean
    visits = build_recurrence_table(matrix)
    assert visits is not None and visits.columns[0].name == "recurring: visit 1"
    texts = {row.label: [cell.text for cell in row.cells] for row in visits.rows}
    assert texts["TENT"] == ["30.0", "70.0", "+40.0", "2"]
    assert texts["LAME"][-1] == "never" and texts["Source"][-1] == "–"  # noqa: RUF001
    assert build_recurrence_table(replace(matrix, protocols=matrix.protocols[::2])) is None


def test_calibration_and_memory_are_shown_where_they_are_known(matrix: Matrix) -> None:
    assert build_calibration_table(matrix) is None and build_memory_table(matrix) is None  # of an earlier version
    first, *others = matrix.protocols
    cells = first.cells | {"TENT": replace(first.cells["TENT"], calibration_error=0.125, peak_mib=512)}
    known = replace(matrix, protocols=(replace(first, cells=cells), *others))
    calibration, memory = build_calibration_table(known), build_memory_table(known)
    assert calibration is not None and memory is not None
    for table, text in ((calibration, "12.5"), (memory, "512")):
        rows = {row.label: [cell.text for cell in row.cells] for row in table.rows}
        assert rows["TENT"] == [text, "\N{EN DASH}", "\N{EN DASH}"]
        assert rows["Source"] == ["\N{EN DASH}"] * 3


def test_advice_follows_from_the_numbers(matrix: Matrix) -> None:
    assert write_advice(matrix) == [
        "Below Source by more than noise on all 3 protocols: no method.",
        "Never above Source by more than noise: LAME.",
        "TENT has the lowest mean error over the protocols, 3.3 points below Source; its worst is recurring, 10.0 "
        "points above Source.",
        "The lowest error by more than noise: TENT on continual; LAME on recurring. On the other protocol, the best "
        "ones are within noise of each other.",
    ]
    one = replace(matrix, protocols=matrix.protocols[:1])
    assert write_advice(one) == [
        "Below Source by more than noise on continual: TENT.",
        "Never above Source by more than noise: LAME.",
        "The lowest error by more than noise: TENT on continual.",
    ]


def test_advice_counts_only_cells_with_an_interval_as_harmless(matrix: Matrix) -> None:
    clean = matrix.protocols[-1]
    cells = clean.cells | {"LAME": replace(clean.cells["LAME"], interval=None)}
    short = replace(matrix, protocols=(*matrix.protocols[:-1], replace(clean, cells=cells)))
    assert not any(sentence.startswith("Never above Source") for sentence in write_advice(short))
    (*_, last) = write_advice(replace(matrix, protocols=(clean, replace(clean, name="single"))))
    assert last.endswith("no method on any protocol. On 2 protocols, the best ones are within noise of each other.")


def test_every_format_has_the_same_numbers(matrix: Matrix, tmp_path: Path) -> None:
    page = write_matrix(matrix, tmp_path / "out")
    names = {"heat-map.png", "heat-map.svg", "matrix.csv", "matrix.html", "matrix.md", "numbers.json"}
    assert {path.name for path in page.parent.iterdir()} == names
    guide, differences, errors, visits, times, missing = ParsedPage(page.read_text()).tables
    assert guide[1][0] == "continual|What continual is." and guide[1][1] == "TENT 29.0 %"
    assert guide[2][1:5] == ["LAME 30.0 %", "none", "TENT", "40.0 %"]
    assert guide[1][5] == "3,840 images in batches of 64: 3.0 of 10 classes"
    assert differences[1][:4] == ["TENT", "1", "▼|−21.0|−23.0 to −19.0", "▲|+10.0|8.0 to 12.0"]  # noqa: RUF001
    assert errors[1] == ["Source", "1", "50.0", "40.0", "10.0"] and times[1][2] == "2.50"
    assert visits[2][-1] == "▲|2" and missing[1] == ["single", "tent-standard", "not started"]
    markdown = (page.parent / "matrix.md").read_text()
    assert "| TENT | 1 | ▼ −21.0 (−23.0 to −19.0) | ▲ +10.0 (8.0 to 12.0) |" in markdown  # noqa: RUF001
    assert "- single · tent-standard · not started" in markdown and "    ctta bench matrix\n" in markdown
    records = list(csv.DictReader((page.parent / "matrix.csv").read_text().splitlines()))
    tent = records[5]
    assert (tent["protocol"], tent["method"], tent["verdict"]) == ("recurring", "TENT", "worse")
    assert (tent["above_source"], tent["time_to_harm"], tent["last_visit"]) == ("0.100000", "2", "0.700000")
    again = write_matrix(read_matrix(page.parent / "numbers.json"), tmp_path / "again").parent
    assert all((again / name).read_bytes() == (page.parent / name).read_bytes() for name in names)
    picture = (page.parent / "heat-map.svg").read_text()
    assert all(text in picture for text in ("−21.0", "+10.0", "continual", "LAME"))  # noqa: RUF001


def write_protocol(folder: Path, name: str, wrong: dict[str, list[int]], **about: Any) -> None:
    """Write the run of a protocol, with these wrong images of 100 in every domain."""
    run = write_run(folder / "protocols" / name, recipe="embedded", command="ctta bench matrix")
    for method, counts in wrong.items():
        write_cell(run, method, [[count] for count in counts], domains=DOMAINS, batch_size=100, seconds=0.3, **about)


def test_runs_are_measured_against_source(tmp_path: Path) -> None:
    source = [30, 40, 50, 45, 35, 40]
    better, noisy = [20, 31, 42, 35, 24, 29], [31, 39, 52, 42, 36, 40]
    write_protocol(tmp_path, "rotta", {"Source": source, "better": better, "noisy": noisy})
    write_protocol(tmp_path, "continual", {"better": better})  # without Source there is nothing to compare with
    (tmp_path / "protocols" / "continual" / "cells" / "source-standard").mkdir()
    matrix = read_matrix(tmp_path)
    (protocol,) = matrix.protocols
    assert protocol.name == "rotta" and protocol.description == PROTOCOLS["rotta"].summary
    assert (protocol.num_images, protocol.num_visits) == (600, 1)
    assert {label: cell.verdict for label, cell in protocol.cells.items()} == {
        "Source": "unclear",
        "better": "better",
        "noisy": "unclear",
    }
    assert protocol.best == ("better",)
    assert protocol.cells["better"].above_source == pytest.approx(-59 / 600)
    assert protocol.cells["better"].ms_per_image == pytest.approx(3.0)
    assert [(cell.run, cell.cell) for cell in matrix.missing] == [
        ("continual", "all"),
        ("continual", "source-standard"),
    ]


def test_a_run_of_some_protocols_replaces_only_these(matrix: Matrix) -> None:
    again = make_protocol("continual", 0.5, ("TENT",), LAME=0.4, TENT=0.25)
    single = make_protocol("single", 0.5, ("Source",), TENT=0.9)
    merged = matrix_results.merge(matrix, Matrix((single, again), ("later",)))
    assert merged.protocols == (again, *matrix.protocols[1:2], single, *matrix.protocols[2:])
    assert merged.missing == ()  # what was missing of "single" has been measured
    assert matrix_results.merge(merged, matrix).protocols[0] == matrix.protocols[0]


@pytest.mark.parametrize(("error", "best"), [(0.25, ("VANE", "TENT")), (0.3, ("TENT",))])
def test_a_run_of_some_methods_replaces_only_these(matrix: Matrix, error: float, best: tuple[str, ...]) -> None:
    again = make_protocol("continual", 0.5, ("VANE",), VANE=error)
    merged = matrix_results.merge(matrix, Matrix((again,)))
    assert merged.protocols == (
        make_protocol("continual", 0.5, best, LAME=0.51, TENT=0.29, VANE=error),
        *matrix.protocols[1:],
    )
    other = make_protocol("continual", 0.51, ("VANE",), VANE=error)
    with pytest.raises(ValueError, match="continual differ"):
        matrix_results.merge(matrix, Matrix((other,)))


def test_a_folder_without_a_matrix_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read_matrix(tmp_path)
    write_protocol(tmp_path, "rotta", {"TENT": [10] * 6})
    with pytest.raises(DataError):
        write_matrix(read_matrix(tmp_path), tmp_path / "report")


def test_the_command_runs_resumes_and_reports(tmp_path: Path) -> None:
    network, folder = f"file:{write_network(tmp_path)}:tiny", tmp_path / "matrix"
    common = ["matrix", "--methods", "tent", "--model", network, "--limit", 4, "--threads", 1, "--out", folder]
    printed = output(bench, *common, "--protocols", "single,clean,recurring,num_visits=2")
    assert "TENT-continual" in printed and "Source by more than noise" in printed
    page = folder / "report" / "matrix.html"
    assert page.is_file() and str(page) in printed.replace("\n", "")
    matrix = read_matrix(folder)
    assert [protocol.name for protocol in matrix.protocols] == ["recurring,num_visits=2", "single", "clean"]
    assert [protocol.num_visits for protocol in matrix.protocols] == [2, 1, 1]
    assert [protocol.composition.partition(":")[0] for protocol in matrix.protocols] == [
        "batches of 64", "batches of 1", "batches of 200",
    ]  # fmt: skip
    assert all(list(protocol.cells) == ["Source", "TENT-continual"] for protocol in matrix.protocols)
    cell = folder / "protocols" / "clean" / "cells" / "tent-standard" / "batches.jsonl"
    before = cell.stat().st_mtime_ns
    lines = output(bench, *common, "--protocols", "clean,single", "--json").splitlines()
    assert cell.stat().st_mtime_ns == before
    found = [(record["protocol"], record["method"]) for record in map(json.loads, lines)]
    assert found[:2] == [("recurring,num_visits=2", "Source"), ("recurring,num_visits=2", "TENT-continual")]
    assert "matrix.html" in output(report, folder)
    assert "report.html" in output(report, folder / "protocols" / "clean")
    with pytest.raises(ConfigError):
        output(report, folder / "protocols" / "clean", folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["matrix", "--rounds", 2], "does not take --rounds"),
        (["matrix", "--protocol", "rotta"], "does not take --protocol"),
        (["matrix", "--protocols", "rota"], "there is no protocol 'rota'.*rotta"),
        (["embedded", "--protocols", "rotta"], "only 'ctta bench matrix' takes --protocols"),
    ],
)
def test_options_that_do_not_apply_are_refused(arguments: list[object], message: str) -> None:
    assert re.search(message, user_error(bench, *arguments))


def test_error_names_the_protocol_that_lacks_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'note'"):
        run_matrix(protocols=["note"], methods=["source"], limit=20, folder=tmp_path)


def test_protocols_are_a_list() -> None:
    with pytest.raises(TypeError, match=r"give \['rotta'\]"):
        run_matrix(protocols="rotta")
    with pytest.raises(ConfigError):
        run_matrix(protocols=[])


def test_every_protocol_has_a_size() -> None:
    assert set(SIZES) == set(PROTOCOLS)
    for name, (_limit, _batch_size, settings) in SIZES.items():
        parse_protocol(",".join(filter(None, [name, settings])))
    assert set(DEFAULT_METHODS) - {"cotta_fast"} <= set(METHODS)

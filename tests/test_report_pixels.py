"""Reports on segmentation: mIoU, for which higher is better, against plain arithmetic, in every format."""

import csv
import re
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
from report_runs import (
    ParsedPage,
    format_row,
    make_pixel_score,
    read_results,
    write_cell,
    write_run,
    write_weather,
)

from ctta.benchmark.report import score_table, write_report
from ctta.benchmark.report.content import build_timeline
from ctta.benchmark.report.plots import assign_styles, plot_cost
from ctta.benchmark.report.runs import group_by_method
from ctta.benchmark.report.score_tables import build_class_table, build_summary_table
from ctta.data.datasets.scenes import CLASS_NAMES
from ctta.evaluation.metrics import MIOU

#: Right pixels of each class, by method, seed and segment.
Counts = dict[tuple[str, int | None], list[list[int]]]
WEATHER = ["fog", "night", "rain", "snow"]


def iou(right: int, wrong: int, taken: int) -> float:
    return 100 * right / (right + wrong + taken)


def miou(right: list[int]) -> float:
    """Return the mIoU of classes of 1000 pixels, whose wrong pixels are predicted as the next class."""
    return mean(iou(right[place], 1000 - right[place], 1000 - right[place - 1]) for place in range(len(right)))


def write_acdc_run(folder: Path, right: Counts, *, num_batches: int = 1) -> Path:
    run = write_run(folder, recipe="acdc")
    for (method, seed), segments in right.items():
        scores = [[make_pixel_score(counts)] * num_batches for counts in segments]
        write_cell(run, method, scores, domains=WEATHER * (len(scores) // 4), seed=seed)
    return run


def test_score_table_matches_plain_arithmetic(tmp_path: Path) -> None:
    right = {
        ("Source", None): [[500 + 3 * place, 700, 600] for place in range(40)],
        ("CoTTA", 0): [[600 + 4 * place, 800, 700 - 15 * place] for place in range(40)],
        ("CoTTA", 1): [[610 + 2 * place, 790, 720 - 15 * place] for place in range(40)],
    }
    table = score_table(read_results(write_acdc_run(tmp_path / "run", right, num_batches=5)))
    assert [column.name for column in table.columns] == [
        *(f"{condition}, round {number}" for number in (1, 4, 7, 10) for condition in WEATHER),
        "mean",
    ]
    assert table.caption == ("mIoU in percent; each domain in rounds 1, 4, 7 and 10, and the mean of all 10 rounds")
    source, cotta = table.rows
    assert (source.label, source.num_results, cotta.label, cotta.num_results) == ("Source", 1, "CoTTA", 2)
    shown = [4 * (number - 1) + place for number in (1, 4, 7, 10) for place in range(4)]
    for segment, cell, baseline in zip(shown, cotta.cells, source.cells, strict=False):
        values = [miou(right["CoTTA", seed][segment]) for seed in (0, 1)]
        assert cell.value == pytest.approx(mean(values)) and cell.deviation == pytest.approx(stdev(values))
        assert baseline.value == pytest.approx(miou(right["Source", None][segment]))
        assert not cell.is_best or cell.value > baseline.value
        assert not baseline.is_best or baseline.value > cell.value
    assert {cell.is_best for cell in cotta.cells} == {True, False}  # so both ways were tried
    means = [mean(miou(counts) for counts in right["CoTTA", seed]) for seed in (0, 1)]
    assert cotta.cells[-1].value == pytest.approx(mean(means))
    assert [cell.published for cell in cotta.cells] == [
        *(70.9, 41.2, 62.4, 59.7, 70.9, 41.0, 62.7, 59.7, 70.9, 41.0, 62.8, 59.7, 70.8, 41.0, 62.8, 59.7),
        58.6,
    ]
    assert [cell.published for cell in source.cells] == [*[69.1, 40.3, 59.7, 57.8] * 4, 56.7]
    assert cotta.cells[1].difference == pytest.approx(round(cotta.cells[1].value, 1) - 41.2)
    assert any("5 images per domain" in note and "400 images in batches of 1" in note for note in table.notes)


@pytest.mark.parametrize(
    ("domains", "scores", "reason"),
    [
        (WEATHER * 3, make_pixel_score([500, 600]), "they are for fog, night, rain, snow, 10 rounds"),
        (WEATHER, make_pixel_score([500, 600]), "they are for fog, night, rain, snow, 10 rounds"),
        (WEATHER[::-1] * 10, make_pixel_score([500, 600]), "they are for fog, night, rain, snow, 10 rounds"),
        (WEATHER * 10, 20, "they are mIoU, and these are error"),
    ],
)
def test_published_numbers_are_shown_only_for_their_stream(
    tmp_path: Path, domains: list[str], scores: Any, reason: str
) -> None:
    run = write_run(tmp_path / "run", recipe="acdc")
    write_cell(run, "CoTTA", [[scores]] * len(domains), domains=domains)
    table = score_table(read_results(run))
    assert not table.has_published and reason in table.notes[0]


def test_every_format_has_the_same_numbers(tmp_path: Path) -> None:
    run = write_weather(write_run(tmp_path / "run", recipe="acdc"))
    results = read_results(run)
    classes = build_class_table(group_by_method(results))
    assert classes
    page = write_report([run], tmp_path / "out")
    _scores, published, shown_classes = ParsedPage(page.read_text()).tables[:3]
    latex = [line.split(" & ") for line in (page.parent / "table.tex").read_text().splitlines() if " & " in line]
    markdown = [line.strip("| ").split(" | ") for line in (page.parent / "report.md").read_text().splitlines()]
    records = list(csv.DictReader((page.parent / "table.csv").read_text().splitlines()))
    assert [text.split("|")[0] for text in published[1][1:]] == ["69.1", "40.3", "59.7", "57.8"] * 4 + ["56.7"]
    for table, first, ending in ((score_table(results), 0, ""), (classes, 5, ": classes")):
        for number, method in enumerate(("Source", "BN Stats Adapt", "TENT-continual", "CoTTA"), start=1):
            expected = list(format_row(table, method).values())
            best = [cell.is_best for row in table.rows if row.label == method for cell in row.cells]
            parsed = ParsedPage(page.read_text()).tables[0] if table is not classes else shown_classes
            assert [text.split("|")[0] for text in parsed[number][2 : 2 + len(expected)]] == expected
            fields = [text.removesuffix(r" \\") for text in latex[first + number][1 : 1 + len(expected)]]
            assert [re.sub(r"\\textbf{(.*)}", r"\1", text) for text in fields] == expected
            assert [text.startswith(r"\textbf") for text in fields] == best
            lines = [line for line in markdown if line[0] == method and len(line) >= 2 + len(expected)]
            assert any([text.strip("*") for text in line[2 : 2 + len(expected)]] == expected for line in lines)
            values = [
                record
                for record in records
                if record["method"] == method and record["section"] == f"1. acdc train rounds{ending}"
            ]
            assert [f"{float(record['value']):.1f}" for record in values] == expected
            assert [record["best"] == "yes" for record in values] == best
    assert "CoTTA has the highest mean mIoU" in page.read_text()
    assert "Highest in bold" in page.read_text() and "Upper left is better" in page.read_text()
    assert (page.parent / "miou-over-time.png").is_file() and not (page.parent / "error-over-time.png").exists()
    assert "mIoU (%)" in (page.parent / "miou-over-time.svg").read_text()
    assert "mean mIoU (%)" in (page.parent / "cost.svg").read_text()


def test_class_iou_is_computed_over_all_images(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="mine")
    right = {"a": ([900, 500, 100], [300, 700, 200]), "b": ([100, 900, 300], [200, 400, 300])}
    for method, segments in right.items():
        scores = [[make_pixel_score(counts)] * 5 for counts in segments]
        write_cell(run, method, scores, domains=["fog", "snow"], class_names=["road", "sky", "car"])
    table = build_class_table(group_by_method(read_results(run)))
    assert table and [column.name for column in table.columns] == ["road", "sky", "car", "mean"]
    expected = []
    for segments in right.values():
        sums = [sum(counts) for counts in zip(*segments, strict=True)]
        ious = [iou(sums[place], 2000 - sums[place], 2000 - sums[place - 1]) for place in range(3)]
        expected.append([*ious, mean(ious)])
    first, second = (method.cells for method in table.rows)
    assert [cell.value for cell in first] == pytest.approx(expected[0])
    assert [cell.value for cell in second] == pytest.approx(expected[1])
    assert [cell.is_best for cell in first] == [one > other for one, other in zip(*expected, strict=True)]
    assert [cell.is_best for cell in first] == [not cell.is_best for cell in second]
    assert {cell.is_best for cell in first} == {True, False}
    assert (
        format_row(table, "a")["mean"] != format_row(score_table(read_results(run)), "a")["mean"]
    )  # that is the mean of segments


def test_an_absent_class_has_no_number(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="mine")
    for method, predicted in (("a", 0), ("b", 40)):
        score = make_pixel_score([900, 800])
        score |= {name: [*score[name], 0] for name in ("labelled", "right")}
        score["predicted"] = [score["predicted"][0] - predicted, score["predicted"][1], predicted]
        write_cell(run, method, [[score]], domains=["fog"])
    results = read_results(run)
    assert [list(result.class_iou.values())[2] for result in results] == [None, 0]
    table = build_class_table(group_by_method(results))
    assert table and [row.cells[2].text for row in table.rows] == ["\N{EN DASH}", "0.0"]
    assert not any(row.cells[2].is_best for row in table.rows)
    assert "marks a class that is in neither labels nor predictions" in table.caption
    page = write_report([run], tmp_path / "out")
    records = list(csv.DictReader((page.parent / "table.csv").read_text().splitlines()))
    assert [record["value"] for record in records if record["column"] == "class 2"] == ["", "0.0"]


def test_nineteen_classes_get_the_names_of_cityscapes(tmp_path: Path) -> None:
    run = write_weather(write_run(tmp_path / "run", recipe="mine"), rounds=1)
    table = build_class_table(group_by_method(read_results(run)))
    assert table and tuple(column.name for column in table.columns[:-1]) == CLASS_NAMES


def test_classification_has_no_class_table(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="mine")
    write_cell(run, "a", [[20]], domains=["fog"])
    assert build_class_table(group_by_method(read_results(run))) is None


def test_summary_table(tmp_path: Path) -> None:
    right: Counts = {("a", None): [[900, 800], [500, 400], [700, 700], [600, 800]] * 3}
    right["a", None][5] = [400, 400]
    right["b", None] = [[900, 800], [500, 400], [700, 700], [600, 300]] * 3
    results = read_results(write_acdc_run(tmp_path / "run", right, num_batches=5))
    table = build_summary_table(group_by_method(results))
    assert [column.name for column in table.columns[:3]] == ["mIoU (%)", "pixel accuracy (%)", "ECE (%)"]
    accuracy = mean(sum(counts) / 2000 for counts in right["a", None])
    assert format_row(table, "a")["pixel_accuracy"] == f"{100 * accuracy:.1f}"
    worst = [column.key for column in table.columns].index("worst")
    assert table.rows[0].cells[worst].note == "night, round 2"
    assert format_row(table, "a")["worst"] == f"{miou([400, 400]):.1f}"
    assert table.rows[0].cells[0].is_best and not table.rows[1].cells[0].is_best  # the higher mIoU
    assert table.rows[0].cells[1].is_best and not table.rows[1].cells[1].is_best


def test_cost_plot_shows_miou(tmp_path: Path) -> None:
    right: Counts = {("a", None): [[900, 800]] * 4, ("b", None): [[500, 400]] * 4}
    summary = build_summary_table(group_by_method(read_results(write_acdc_run(tmp_path / "run", right))))
    (axes,) = plot_cost(summary, MIOU, assign_styles("ab")).axes
    heights = [float(np.asarray(line.get_ydata())[0]) for line in axes.lines]
    assert heights == pytest.approx([miou([900, 800]), miou([500, 400])])


def test_curves_show_miou(tmp_path: Path) -> None:
    right: Counts = {("a", None): [[900 - place, 800] for place in range(40)]}
    timeline = build_timeline(group_by_method(read_results(write_acdc_run(tmp_path / "run", right))))
    (curve,) = timeline.curves
    assert timeline.metric.name == "mIoU"
    assert curve.values == pytest.approx([miou(counts) for counts in right["a", None]])
    rounds = [mean(miou(right["a", None][4 * number + place]) for place in range(4)) for number in range(10)]
    assert curve.round_values == pytest.approx(rounds)
    assert [span.name for span in timeline.spans] == [f"round {number}" for number in range(1, 11)]

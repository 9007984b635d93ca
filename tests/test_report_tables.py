"""The tables and curves of a report against plain arithmetic."""

from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest
from hand_made_results import make_result
from report_runs import CONTINUAL, GRADUAL, ROUNDS, STANDARD, format_row, read_results, write_cell, write_run

from ctta.benchmark.report import read_runs, score_table
from ctta.benchmark.report.content import build_timeline, find_spans
from ctta.benchmark.report.published import PUBLISHED
from ctta.benchmark.report.runs import group_by_method, group_into_sections
from ctta.benchmark.report.score_tables import build_summary_table


def test_score_table_matches_plain_arithmetic(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    wrong = {
        ("Source", None): [[80 + place, 70] * 3 for place in range(15)],
        ("CoTTA", 0): [[30, 20 + place] * 3 for place in range(15)],
        ("CoTTA", 1): [[34, 21 + 2 * place] * 3 for place in range(15)],
    }
    for (method, seed), counts in wrong.items():
        write_cell(run, method, counts, domains=CONTINUAL, seed=seed)
    table = score_table(read_results(run))
    assert [column.name for column in table.columns] == [*(name.replace("_", " ") for name in STANDARD), "mean"]
    source, cotta = table.rows
    assert (source.label, source.num_results, cotta.label, cotta.num_results) == ("Source", 1, "CoTTA", 2)
    per_seed = [[100 * sum(counts) / 1200 for counts in wrong["CoTTA", seed]] for seed in (0, 1)]
    for place, cell in enumerate(cotta.cells[:-1]):
        values = [errors[place] for errors in per_seed]
        assert cell.value == pytest.approx(mean(values))
        assert cell.deviation == pytest.approx(stdev(values))
        assert source.cells[place].value == pytest.approx(100 * (450 + 3 * place) / 1200)
        assert source.cells[place].deviation is None
        assert not source.cells[place].is_best
    assert cotta.cells[0].is_best  # seeds differ by little in the first column, and by much in the last
    means = [mean(errors) for errors in per_seed]
    assert cotta.cells[-1].value == pytest.approx(mean(means))
    assert cotta.cells[-1].deviation == pytest.approx(stdev(means))
    assert (cotta.cells[0].published, cotta.cells[-1].published, source.cells[-1].published) == (24.3, 16.2, 43.5)
    assert cotta.cells[-1].difference == pytest.approx(round(mean(means), 1) - 16.2)
    assert any("1,200 images" in note and "10,000" in note for note in table.notes)


def find_best(run: Path) -> dict[str, list[bool]]:
    table = score_table(read_results(run))
    assert not table.has_published
    return {column.key: [row.cells[place].is_best for row in table.rows] for place, column in enumerate(table.columns)}


def test_only_a_lead_beyond_noise_is_best(tmp_path: Path) -> None:
    domains, steady = ["fog", "snow"], [40] * 6
    ahead = write_run(tmp_path / "ahead", recipe="mine")
    for method, first in (("a", [20] * 6), ("b", [30] * 6), ("c", [30, 31] * 3)):
        write_cell(ahead, method, [first, steady], domains=domains)
    assert find_best(ahead) == {"snow": [False] * 3, "fog": [True, False, False], "mean": [True, False, False]}
    tied = write_run(tmp_path / "tied", recipe="mine")
    for method, first in (("a", [20] * 6), ("b", [20] * 6), ("c", [30] * 6)):
        write_cell(tied, method, [first, steady], domains=domains)
    assert find_best(tied) == {key: [False] * 3 for key in ("fog", "snow", "mean")}
    # A leads b clearly, but not c, whose errors jump.
    noisy = write_run(tmp_path / "noisy", recipe="mine")
    for method, first in (("a", [20] * 6), ("b", [30] * 6), ("c", [5, 70, 5, 70, 5, 70])):
        write_cell(noisy, method, [first, steady], domains=domains)
    assert find_best(noisy) == {key: [False] * 3 for key in ("fog", "snow", "mean")}
    short = write_run(tmp_path / "short", recipe="mine")
    for method, first in (("a", [1]), ("b", [199])):
        write_cell(short, method, [first, [40]], domains=domains)
    assert find_best(short) == {key: [False] * 2 for key in ("fog", "snow", "mean")}  # too few batches to tell


def test_rounds_have_a_column_each(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="embedded")
    wrong = [[10 + place] for place in range(150)]
    write_cell(run, "CoTTA", wrong, domains=ROUNDS, stream="embedded continual order=standard rounds=10")
    (result,) = read_results(run)
    table = score_table([result])
    assert [column.name for column in table.columns] == [*(f"round {number}" for number in range(1, 11)), "mean"]
    assert table.rows[0].cells[3].value == pytest.approx(mean((10 + place) / 2 for place in range(45, 60)))
    assert table.rows[0].cells[-1].value == pytest.approx(mean((10 + place) / 2 for place in range(150)))
    assert [span.name for span in find_spans(result)] == [f"round {number}" for number in range(1, 11)]
    (curve,) = build_timeline(group_by_method([result])).curves
    assert curve.round_values == pytest.approx([cell.value for cell in table.rows[0].cells[:-1]])


def test_few_domains_have_a_column_each_in_selected_rounds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="mine")
    wrong = [[place] for place in range(14)]
    write_cell(run, "CoTTA", wrong, domains=["glass_blur 5", "snow 5"] * 7)
    table = score_table(read_results(run))
    expected = [f"{domain}, round {number}" for number in (1, 3, 5, 7) for domain in ("glass blur", "snow")]
    assert [column.name for column in table.columns] == [*expected, "mean"]
    values = [cell.value for cell in table.rows[0].cells]
    assert values == pytest.approx([place / 2 for place in (0, 1, 4, 5, 8, 9, 12, 13)] + [6.5 / 2])
    assert "in rounds 1, 3, 5 and 7, and the mean of all 7 rounds" in table.caption
    write_cell(run, "again and again", [[1]] * 3, domains=["fog"] * 3)
    again = score_table(read_results(run)[1:])
    assert [column.name for column in again.columns] == ["round 1", "round 2", "round 3", "mean"]


def test_gradual_streams_have_a_column_per_corruption(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="cifar10c-gradual")
    wrong = [[place] for place in range(len(GRADUAL))]
    write_cell(run, "CoTTA", wrong, domains=GRADUAL, order=0)
    (result,) = read_results(run)
    table = score_table([result])
    assert [column.key for column in table.columns] == [*STANDARD, "mean"]
    assert table.rows[0].cells[0].value == pytest.approx(mean(place / 2 for place in range(5)))  # 5, 4, 3, 2, 1
    assert table.rows[0].cells[1].value == pytest.approx(mean(place / 2 for place in range(5, 14)))
    # The mean is that of all segments, not of the columns: the first corruption has fewer.
    assert table.rows[0].cells[-1].value == pytest.approx(mean(place / 2 for place in range(131)))
    assert table.rows[0].cells[-1].published == 10.4 and table.rows[0].cells[0].published is None
    assert any("10 orders" in note for note in table.notes)
    assert len(find_spans(result)) == 15


def test_orders_are_averaged_by_domain(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="imagenetc")
    write_cell(run, "CoTTA", [[20]] * 14 + [[60]], domains=CONTINUAL, order=0)
    write_cell(run, "CoTTA", [[60]] + [[20]] * 14, domains=[CONTINUAL[-1], *CONTINUAL[:-1]], order=1)
    write_cell(run, "Source", [[30]] * 15, domains=CONTINUAL, order=0)
    table = score_table(read_results(run))
    assert format_row(table, "CoTTA")["jpeg_compression 5"] == "30.0"
    assert format_row(table, "CoTTA")["gaussian_noise 5"] == "10.0"
    (section,) = group_into_sections(read_runs([run]))
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
def test_published_numbers_are_shown_only_for_their_stream(
    tmp_path: Path, domains: list[str], order: int | None, reason: str
) -> None:
    run = write_run(tmp_path / "run")
    write_cell(run, "CoTTA", [[20]] * len(domains), domains=domains, order=order)
    table = score_table(read_results(run))
    assert not table.has_published and reason in table.notes[0]


def test_published_means_match_published_columns() -> None:
    assert sorted(PUBLISHED) == ["acdc", "cifar100c", "cifar10c", "cifar10c-gradual", "imagenetc"]
    for recipe, table in PUBLISHED.items():
        for published in table.rows.values():
            assert len(published.columns) in ((16,) if recipe == "acdc" else (0, 15))
            if published.columns:
                assert mean(published.columns.values()) == pytest.approx(published.mean, abs=0.1)


def test_summary_table(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="mine")
    folder = write_cell(run, "a", [[20, 30], [90, 70]], domains=["fog", "snow"], seconds=0.5)
    lines = (folder / "batches.jsonl").read_text()
    (folder / "batches.jsonl").write_text(lines.replace('"skipped": false', '"skipped": true', 1))
    write_cell(run, "b", [[20, 30], [10, 10]], domains=["fog", "snow"], seconds=0.25)
    results = read_results(run)
    table = build_summary_table(group_by_method(results))
    first, second = format_row(table, "a"), format_row(table, "b")
    assert (first["ms_per_image"], second["ms_per_image"]) == ("2.50", "1.25")
    assert (first["worst"], second["worst"]) == ("40.0", "12.5")
    assert [row.cells[4].note for row in table.rows] == ["snow", "fog"]
    assert (first["skipped"], second["skipped"], table.rows[0].cells[5].note) == ("1", "0", "of 4")
    assert first["peak_mib"] == "901"
    bins = [batch.score.bins for batch in results[0].batches]
    gaps = [sum(b[number][1] for b in bins) - sum(b[number][2] for b in bins) for number in range(15)]
    assert first["calibration_error"] == f"{100 * sum(abs(gap) for gap in gaps) / 800:.1f}"


def test_summary_table_names_the_worst_seed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="mine")
    for order, seed, wrong in ((0, 1, 20), (1, 1, 40), (0, 2, 30), (1, 2, 32)):
        write_cell(run, "a", [[wrong]], domains=["fog"], order=order, seed=seed)
        write_cell(run, "b", [[wrong]], domains=["fog"], order=order, seed=None)
    table = build_summary_table(group_by_method(read_results(run)))
    place = [column.key for column in table.columns].index("worst_seed")
    cells = {row.label: row.cells[place] for row in table.rows}
    assert (cells["a"].text, cells["a"].note, cells["b"].text) == ("15.5", "seed 2", "\N{EN DASH}")
    one_seed = [result for result in read_results(run) if result.labels.get("seed") != 2]
    assert "worst_seed" not in {column.key for column in build_summary_table(group_by_method(one_seed)).columns}


def test_curves_are_not_averaged_across_boundaries(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="mine")
    write_cell(run, "a", [[10] * 7, [90] * 7], domains=["fog", "snow"])
    (curve,) = build_timeline(group_by_method(read_results(run))).curves
    assert set(curve.values) == {5.0, 45.0}
    assert [error for place, error in zip(curve.positions, curve.values, strict=True) if place < 1400] == [5.0] * 5


def test_one_method_with_two_settings_has_two_rows(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="mine")
    for restore in ("0.01", "0.1"):
        settings = {"decay": "0.999", "restore": restore}
        write_cell(run, "CoTTA", [[20]], domains=["fog"], seed=1, settings=settings | {"seed": "1"})
    assert [row.label for row in score_table(read_results(run)).rows] == ["CoTTA [restore=0.01]", "CoTTA [restore=0.1]"]


def test_methods_come_in_the_order_of_the_paper_and_then_by_name() -> None:
    expected = ["Source", "TENT-continual", "CoTTA", "CoTTA fast", "VANE"]
    for order in ([4, 3, 2, 1, 0], [3, 4, 0, 2, 1]):
        results = [replace(make_result([[10, 20]]), method=expected[place]) for place in order]
        assert [entry.method for entry in group_by_method(results)] == expected

"""The table of all methods: results of several runs join, and every seed counts once."""

import pytest

from benchmarks.results.method_numbers import MergeError, add_errors, add_results
from ctta.evaluation import Result
from ctta.evaluation.metrics import ImageScore
from ctta.evaluation.results import BatchRecord


def make_result(seed: int, *num_wrong: int, lr: float = 0.1, name: str = "roid") -> Result:
    """Return a result with ten images per corruption, all predicted with a confidence of 0.5."""
    scores = [ImageScore(10, wrong, ((10, 5.0, 10 - wrong),)) for wrong in num_wrong]
    return Result(
        method=name.upper(),
        settings={"lr": str(lr), "seed": str(seed)},
        source="a",
        stream="s",
        stream_hash="b",
        domains=tuple(f"corruption{number} 5" for number in range(len(scores))),
        num_batches=len(scores),
        reset_at_domain=False,
        labels={"row": name, "seed": seed},
        environment={"ctta": "0.2.0"},
        batches=tuple(BatchRecord(number, score, 1.0, None) for number, score in enumerate(scores)),
    )


def test_seeds_of_several_runs_are_averaged_once() -> None:
    results = [make_result(1, 1, 3), make_result(2, 2, 6), make_result(3, 3, 3)]
    together = add_results({}, results)
    row = together["roid"]
    assert row["seeds"] == row["detailed_seeds"] == [1, 2, 3]
    assert row["error_by_seed"] == [20.0, 40.0, 30.0]
    assert row["error"] == 30 and row["deviation"] == 10
    assert row["error_by_corruption"] == {"corruption0 5": 20.0, "corruption1 5": 40.0}
    assert row["calibration_error"] == pytest.approx((30 + 10 + 20) / 3)
    one_by_one = add_results(add_results(add_results({}, results[2:]), results[:1]), results[1:2])
    assert one_by_one["roid"] | {"settings": {}} == row | {"settings": {}}
    assert add_results(one_by_one, results) == one_by_one


def test_rows_of_before_the_details_were_listed() -> None:
    row = add_results({}, [make_result(1, 1, 3)])["roid"]
    del row["detailed_seeds"]
    assert add_results({"roid": row}, [make_result(1, 1, 3)])["roid"] == row
    assert add_results({"roid": row}, [make_result(2, 3, 3)])["roid"]["error_by_corruption"]["corruption0 5"] == 20


def test_all_images_replace_a_sample_and_not_the_reverse() -> None:
    sample = add_results({}, [make_result(1, 2, 2)], limit=10)
    assert sample["roid"]["limit"] == 10
    full = add_results(sample, [make_result(1, 1, 1)])
    assert "limit" not in full["roid"] and full["roid"]["error"] == 10
    with pytest.raises(MergeError, match=r"^roid has seen all images of each corruption, and a result 10$"):
        add_results(full, [make_result(2, 1, 1)], limit=10)


def test_results_that_do_not_belong_to_a_row() -> None:
    rows = add_results({}, [make_result(1, 1, 3)])
    with pytest.raises(MergeError, match="settings"):
        add_results(rows, [make_result(2, 1, 3, lr=0.2)])
    rows["roid"] = add_errors("roid", rows["roid"], {1: 20.0, 2: 26.0})
    with pytest.raises(MergeError, match=r"error of 26\.0 with seed 2, and a result 20\.0"):
        add_results(rows, [make_result(2, 1, 3)])


def test_errors_of_seeds_without_details() -> None:
    rows = add_results({}, [make_result(1, 1, 3)])
    row = add_errors("roid", rows["roid"], {1: 20.0, 2: 26.0, 3: 23.0})
    assert (row["seeds"], row["error"], row["deviation"]) == ([1, 2, 3], 23.0, 3.0)
    assert row["detailed_seeds"] == [1] and row["error_by_corruption"] == rows["roid"]["error_by_corruption"]
    assert add_errors("roid", row, {1: 20.0, 2: 26.0, 3: 23.0}) == row
    for other in ({1: 21.0, 2: 26.0}, {2: 26.0}):
        with pytest.raises(MergeError, match="another stream"):
            add_errors("roid", rows["roid"], other)

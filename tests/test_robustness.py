"""Measures of robustness on results made by hand: verdicts, visits, drift and time to harm."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hand_made_results import make_result

from ctta.evaluation import Result
from ctta.evaluation.intervals import Interval, estimate_difference, judge
from ctta.evaluation.metrics import MIOU
from ctta.evaluation.results import (
    compute_visit_errors,
    count_visits,
    estimate_drift,
    find_time_to_harm,
    select_visits,
)

#: Numbers of wrong images of 100, which differ between the six domains of a visit.
LEVELS = (10, 30, 20, 40, 15, 25)


def make_visits(added: Sequence[int], *, noise: Sequence[int] = (0, 1, 0, 1, 1, 0), **labels: Any) -> Result:
    """Return a result with one batch per domain; `added` wrong images in every domain of a visit."""
    wrong = [[level + more + jitter] for more in added for level, jitter in zip(LEVELS, noise, strict=True)]
    result = make_result(wrong, **labels)
    return replace(result, visits=tuple(visit for visit in range(len(added)) for _ in LEVELS))


SOURCE = make_visits([0, 0, 0, 0], noise=(0,) * 6)


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [
        (Interval(-0.1, -0.2, -0.01, 10), "better"),
        (Interval(0.1, 0.01, 0.2, 10), "worse"),
        (Interval(-0.1, -0.3, 0.1, 10), "unclear"),
        (Interval(0.0, 0.0, 0.0, 10), "unclear"),
        (None, "unclear"),
    ],
)
def test_a_verdict_needs_more_than_noise(difference: Interval | None, verdict: str) -> None:
    assert judge(difference) == verdict
    opposite = {"better": "worse", "worse": "better", "unclear": "unclear"}
    assert judge(difference, MIOU) == opposite[verdict], "a higher mIoU is better"


def test_a_visit_is_a_result_of_its_own() -> None:
    result = make_visits([0, 10, 20, 30], noise=(0,) * 6)
    visit = select_visits(result, [2])
    assert visit.errors == tuple((level + 20) / 100 for level in LEVELS)
    assert visit.is_complete and visit.num_batches == 6 and visit.domains == result.domains[12:18]
    assert compute_visit_errors([result, result]) == pytest.approx([0.2333, 0.3333, 0.4333, 0.5333], abs=1e-4)
    assert count_visits([result]) == 4 and count_visits([visit]) == 1
    with pytest.raises(IndexError, match=r"got \[4\]"):
        select_visits(result, [4])


def test_drift_is_the_last_visit_minus_the_first() -> None:
    drift = estimate_drift([make_visits([5, 0, 0, 25])])
    assert drift is not None and (drift.estimate, drift.low, drift.high) == pytest.approx((0.2, 0.2, 0.2))
    falling = estimate_drift([make_visits([25, 0, 0, 5])])
    assert falling is not None and falling.estimate == pytest.approx(-0.2)
    assert estimate_drift([select_visits(SOURCE, [0])]) is None


def test_seeds_widen_the_interval_of_the_drift() -> None:
    seeds = [make_visits([0, 0, last], seed=seed) for seed, last in enumerate((10, 20, 30))]
    drift = estimate_drift(seeds)
    assert drift is not None and drift.estimate == pytest.approx(0.2) and drift.low < 0.1 < 0.3 < drift.high


@pytest.mark.parametrize(
    ("added", "visit"),
    [
        ([-5, -5, 5, 5], 3),
        ([5, 5, 5, 5], 1),
        ([-5, 5, -5, 5], 4),  # visit 2 alone may be chance; nothing follows the last one
        ([-5, 5, -5, -5], None),
        ([-5, -5, -5, -5], None),
        ([0, 0, 0, 0], None),  # half of the domains are above by one image of a hundred
    ],
)
def test_time_to_harm(added: list[int], visit: int | None) -> None:
    assert find_time_to_harm([make_visits(added)], [SOURCE]) == visit
    assert make_visits(added).time_to_harm(SOURCE) == visit


def test_a_difference_within_noise_is_no_harm() -> None:
    noisy = make_visits([2, 2, 2, 2], noise=(9, -9, 8, -8, 9, -9))
    assert compute_visit_errors([noisy]) > compute_visit_errors([SOURCE])
    assert find_time_to_harm([noisy], [SOURCE]) is None


def test_harm_is_judged_within_the_visit_and_not_overall() -> None:
    """A method that helps most of the time harms nevertheless."""
    method = make_visits([-9, -9, 3, 3])
    overall = estimate_difference([method], [SOURCE])
    assert overall is not None and overall.estimate < 0
    assert find_time_to_harm([method], [SOURCE]) == 3

"""Intervals of results: against plain arithmetic, and their coverage where batches of a stream are correlated."""

from math import sqrt
from statistics import fmean, stdev

import numpy as np
import pytest
from hand_made_results import make_result

from ctta.evaluation.intervals import T_QUANTILES, estimate_difference, estimate_interval


def test_one_segment_gives_students_interval_of_the_mean() -> None:
    counts = [10, 30, 20, 25, 15]
    interval = make_result([counts]).interval
    assert interval is not None and interval.num_blocks == 5
    half = T_QUANTILES[3] * stdev(counts) / 100 / sqrt(5)
    assert interval.estimate == pytest.approx(fmean(counts) / 100)
    assert (interval.low, interval.high) == pytest.approx((interval.estimate - half, interval.estimate + half))


def test_blocks_of_all_segments_are_left_out_together() -> None:
    """Where one batch of every segment shows the same images, they are one observation."""
    counts = [10, 30, 20, 25, 15]
    alone, repeated = make_result([counts]).interval, make_result([counts] * 8).interval
    assert alone is not None and repeated is not None
    assert (repeated.low, repeated.high) == pytest.approx((alone.low, alone.high))


@pytest.mark.parametrize(("lengths", "num_blocks"), [((39, 57), 5), ((57, 57), 7), ((80, 90), 10), ((300, 81), 10)])
def test_blocks_have_at_least_eight_batches_where_there_are_enough(lengths: tuple[int, int], num_blocks: int) -> None:
    interval = make_result([np.arange(length) % 90 for length in lengths]).interval
    assert interval is not None and interval.num_blocks == num_blocks


def test_short_segments_are_blocks_themselves() -> None:
    interval = make_result([[place % 7, 10] for place in range(12)]).interval
    assert interval is not None and interval.num_blocks == 10
    assert make_result([[1, 2, 3, 4], [5, 6, 7, 8]]).interval is None  # too few of both


def test_an_interval_of_errors_stays_between_zero_and_one() -> None:
    interval = make_result([[0, 0, 60, 0, 0]]).interval
    assert interval is not None and interval.low == 0 and interval.high < 1


def test_a_difference_is_paired() -> None:
    hard = np.array([5, 60, 20, 80, 40, 10])
    one, other = make_result([hard]), make_result([hard + np.array([3, 2, 3, 4, 3, 3])])
    difference = estimate_difference([other], [one])
    assert difference is not None and difference.excludes_zero
    assert difference.estimate == pytest.approx(0.03) and difference.high - difference.low < 0.015
    alone = estimate_interval([one])
    assert alone is not None and alone.high - alone.low > 0.3  # batches differ far more than methods


def test_seeds_are_paired_and_their_spread_is_added() -> None:
    source = make_result([[50] * 6])
    seeds = [make_result([[30 + 2 * seed] * 6], seed=seed) for seed in range(3)]
    interval = estimate_difference(seeds, [source])
    assert interval is not None and interval.num_runs == 3
    half = T_QUANTILES[1] * stdev([0.30, 0.32, 0.34]) / sqrt(3)  # batches of a run are all the same
    assert (interval.estimate, interval.high) == pytest.approx((-0.18, -0.18 + half))
    worse = [make_result([[31 + 2 * seed] * 6], seed=seed) for seed in range(3)]
    paired = estimate_difference(worse, seeds)
    assert paired is not None and (paired.low, paired.high) == pytest.approx((0.01, 0.01))
    assert estimate_difference(seeds, [make_result([[50] * 6], order=4)]) is None  # nothing to pair


@pytest.mark.parametrize(("correlation", "num_segments"), [(0.0, 1), (0.0, 3), (0.6, 1), (0.6, 3)])
def test_coverage_of_a_difference_without_effect(correlation: float, num_segments: int) -> None:
    """Most intervals hold zero, though neighboring batches err together and segments share images.

    In 20,000 simulations it was 95 % without correlation and 93 % with it; three standard deviations less or more are
    accepted. Intervals that take images as independent hold zero far too seldom.
    """
    expected, num_trials = 0.93 if correlation else 0.95, 900 // num_segments
    rng = np.random.default_rng(0)
    num_batches, hits, naive_hits = 60, 0, 0
    for _ in range(num_trials):
        noise = rng.normal(size=(2, num_batches))
        for place in range(1, num_batches):
            noise[:, place] += correlation * noise[:, place - 1]
        shared = 0.3 + 0.06 * noise[:, None, :]  # the same images, segment after segment
        wrong = rng.binomial(100, np.clip(shared, 0.01, 0.99).repeat(num_segments, 1))
        difference = estimate_difference([make_result(wrong[0])], [make_result(wrong[1])])
        assert difference is not None
        hits += not difference.excludes_zero
        fraction = wrong.mean() / 100
        naive_hits += abs(difference.estimate) < 1.96 * sqrt(2 * fraction * (1 - fraction) / (wrong.size / 2 * 100))
    assert abs(hits / num_trials - expected) <= 3 * sqrt(expected * (1 - expected) / num_trials)
    assert naive_hits / num_trials < 0.85


def test_short_blocks_are_as_many_as_divide_the_batches() -> None:
    for num_batches, num_blocks in ((4, 0), (5, 5), (6, 6), (12, 6), (13, 10), (16, 8), (20, 10), (96, 8)):
        result = make_result([[number % 3 for number in range(num_batches)]] * 2)
        assert len(result.short_left_out_blocks) == num_blocks
        interval = estimate_interval([result], short_blocks=True)
        assert interval is None if num_blocks == 0 else interval is not None and interval.num_blocks == num_blocks
    assert len(make_result([range(16)]).left_out_blocks) == 5


def test_short_blocks_cover_the_truth_where_batches_are_independent() -> None:
    generator, hits = np.random.default_rng(0), 0
    for _ in range(300):
        wrong = generator.binomial(32, 0.3, (3, 10)) - generator.binomial(32, 0.2, (3, 10))
        one, other = make_result(wrong + 32, size=32), make_result(np.full((3, 10), 32), size=32)
        interval = estimate_difference([one], [other], short_blocks=True)
        assert interval is not None
        hits += interval.low <= 0.1 <= interval.high
    assert 0.92 <= hits / 300 <= 0.98

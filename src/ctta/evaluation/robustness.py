"""Measures of robustness: a method against the source network on the same stream, and its own course over visits.

A stream whose domains come back has several visits, in each of which all domains are seen once. Every measure takes the
results of one method on one stream that differ in seed and order only. Errors are fractions; intervals are those of
:mod:`ctta.evaluation.intervals`, so that "more than noise" means the same everywhere.
"""

from collections.abc import Container, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal

from ctta.evaluation.intervals import Interval, estimate_difference
from ctta.evaluation.metrics import ERROR, Metric
from ctta.evaluation.results import Result

#: How a method compares with the source network; "unclear" where the difference is not more than noise.
Verdict = Literal["better", "worse", "unclear"]


def judge(difference: Interval | None, metric: Metric = ERROR) -> Verdict:
    """Return whether a method beats the source network, harms, or neither by more than noise.

    Args:
        difference: The metric of the method minus that of Source, as :func:`estimate_difference` returns it; None if
            there are too few batches for an interval.
        metric: The metric.

    Returns:
        For errors "better" if the whole interval is below zero and "worse" if it is above, and for mIoU the other way
        around; else "unclear".
    """
    if difference is None or not difference.excludes_zero:
        return "unclear"
    return "better" if (difference.high < 0) == (metric.best == "lowest") else "worse"


def select_visits(result: Result, chosen: Container[int]) -> Result:
    """Return the part of a complete result that belongs to some visits, counted from 0."""
    visits = result.visits or (0,) * len(result.domains)
    segments = [number for number, each in enumerate(visits) if each in chosen]
    if not segments:
        raise IndexError(f"visits must be from 0 to {max(visits)}, got {chosen}")
    places = {number: place for place, number in enumerate(segments)}
    batches = tuple(
        replace(batch, segment=places[batch.segment]) for batch in result.batches if batch.segment in places
    )
    return replace(
        result,
        domains=tuple(result.domains[number] for number in segments),
        visits=(),
        batches=batches,
        num_batches=len(batches),
    )


def count_visits(results: Sequence[Result]) -> int:
    """Return how many visits the stream has; 1 if its domains do not come back."""
    return 1 + max(results[0].visits, default=0)


def compute_visit_errors(results: Sequence[Result]) -> tuple[float, ...]:
    """Return the error at each visit, as :attr:`Result.visit_errors` defines it, averaged over the results."""
    return tuple(map(fmean, zip(*(result.visit_errors for result in results), strict=True)))


def estimate_drift(results: Sequence[Result]) -> Interval | None:
    """Return how much the error grows from the first visit to the last; None with one visit, or too few batches.

    The two visits are paired block by block. Their images may be in another order, so Source drifts as well, by chance.
    """
    num_visits = count_visits(results)
    if num_visits == 1:
        return None
    first, last = ([select_visits(result, [visit]) for result in results] for visit in (0, num_visits - 1))
    return estimate_difference(last, first)


def find_time_to_harm(results: Sequence[Result], source: Sequence[Result]) -> int | None:
    """Return the first visit, counted from 1, that is worse than Source in the same visit by more than noise.

    The 95 % interval of the difference, paired over the batches of that visit, excludes zero. Of visits that are
    equal in truth, one in forty does so by chance; therefore the next visit must do so as well, except after the last.
    """
    num_visits = count_visits(results)
    harmed = [
        judge(
            estimate_difference(
                [select_visits(result, [visit]) for result in results],
                [select_visits(result, [visit]) for result in source],
            ),
            results[0].metric,
        )
        == "worse"
        for visit in range(num_visits)
    ]
    return next((visit + 1 for visit in range(num_visits) if all(harmed[visit : visit + 2])), None)

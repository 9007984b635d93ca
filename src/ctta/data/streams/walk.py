"""The walk of CCC from one corruption to the next, along severities of a chosen mean accuracy."""

import numpy as np
from numpy.typing import ArrayLike

from ctta.core.validation import check_fraction
from ctta.data.streams.accuracy import AccuracyMatrix, AccuracyTable

#: Quarter severities of the corruption that fades and of the one that grows.
Point = tuple[int, int]


def walk(matrix: AccuracyMatrix, first: str, second: str, *, target: float) -> list[Point]:
    """Return the way from one corruption to another whose mean accuracy is near a target.

    It starts at (i, 0), where only the first corruption acts, with any i from 1 to 20; each step lessens the first by
    a quarter severity or strengthens the second by one; and it ends where the first is gone. From every point the walk
    takes the step after which the mean accuracy of the rest, this point included, is nearer to the target, and
    strengthens the second if both are equal. Of the twenty starts, that is chosen whose walk has the mean nearest to
    the target. So it is the mean that is near, and not each point.

    Args:
        matrix: Accuracies of a network, see :func:`ctta.data.streams.measure_accuracy`.
        first: Corruption that fades.
        second: Corruption that grows.
        target: Mean accuracy, from 0 to 1.

    Returns:
        The points as quarter severities (i, j): (9, 6) is ``first`` at 2.25 and ``second`` at 1.5.

    Reference: Press et al., "RDumb: a simple approach that questions our progress in continual test-time adaptation",
    NeurIPS 2023.
    """
    check_fraction("target", target)
    return find_path(matrix[first, second], target)


def find_path(table: AccuracyTable, target: float) -> list[Point]:
    """Return the walk over one table of accuracies; see :func:`walk`.

    The best rest of a walk depends only on where it begins, so it is found from the end, one point after the other.

    >>> [len(find_path(np.full((21, 21), accuracy), 0.4)) for accuracy in (0.3, 0.4)]
    [22, 22]
    """
    size = len(table)
    # Sum of the accuracies of the rest of the walk from each point, its number of points, and whether j grows next.
    total, length, grows = table.astype(np.float64), np.ones(table.shape, np.int64), np.zeros(table.shape, bool)
    for j in reversed(range(size)):
        for i in range(1, size):  # at i = 0 the walk ends
            options = [(i, j + 1), (i - 1, j)] if j + 1 < size else [(i - 1, j)]
            means = [(total[option] + table[i, j]) / (length[option] + 1) for option in options]
            best = options[_find_nearest(means, target)]
            grows[i, j] = best != (i - 1, j)
            total[i, j], length[i, j] = total[best] + table[i, j], length[best] + 1
    start = 1 + _find_nearest(total[1:, 0] / length[1:, 0], target)
    path = [(start, 0)]
    while path[-1][0] > 0:
        i, j = path[-1]
        path.append((i, j + 1) if grows[i, j] else (i - 1, j))
    return path


def _find_nearest(means: ArrayLike, target: float) -> int:
    """Return the index of the mean nearest to the target, the first of equal ones; sums that round are equal."""
    return int(np.argmin(np.round(np.abs(np.asarray(means) - target), 12)))

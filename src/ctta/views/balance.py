"""Random numbers of several views made to cover their range evenly."""

import torch
from torch import Tensor


def balance(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Rows of independent uniform numbers, moved so that each column has one in each of ``len(rows)`` equal parts.

    An even number of rows comes in mirrored pairs: row i of the first half and row i of the second add up to 1. A row
    picked at random is as uniform as before, so a mean over the rows estimates the same thing. But what changes slowly
    with a parameter is averaged over even parts (a Latin hypercube), and what grows evenly with it cancels within a
    pair (antithetic draws), so fewer rows do.

    >>> rows = balance(torch.rand(4, 2), torch.Generator().manual_seed(0))
    >>> (4 * rows).long().sort(0).values.T.tolist(), torch.allclose(rows[:2] + rows[2:], torch.ones(2, 2))
    ([[0, 1, 2, 3], [0, 1, 2, 3]], True)
    """
    count, size = rows.shape
    if count % 2:  # a row without partner would always have to lie in the middle
        return (_shuffled(count, size, generator) + rows) / count
    lower = (_shuffled(count // 2, size, generator) + rows[: count // 2]) / count
    first = torch.where(torch.rand(lower.shape, generator=generator) < 0.5, lower, 1 - lower)
    return torch.cat([first, 1 - first])


def _shuffled(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Columns with the whole numbers below ``count``, each in an order of its own."""
    return torch.stack([torch.randperm(count, generator=generator) for _ in range(size)], 1)

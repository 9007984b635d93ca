"""Random numbers of several views made to cover their range evenly."""

import torch
from torch import Tensor


def balance(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Rows of independent uniform numbers, moved so that each column has one in each of ``len(rows)`` equal parts.

    The rows come in mirrored pairs: row i of the first half and row i of the second add up to 1. A row picked at random
    is as uniform as before, so a mean over the rows estimates the same thing. But what grows evenly with a parameter
    cancels within a pair (antithetic draws), and what changes slowly is averaged over even parts (a Latin hypercube),
    so fewer rows do.

    >>> rows = balance(torch.rand(4, 2), torch.Generator().manual_seed(0))
    >>> (4 * rows).long().sort(0).values.T.tolist(), torch.allclose(rows[:2] + rows[2:], torch.ones(2, 2))
    ([[0, 1, 2, 3], [0, 1, 2, 3]], True)
    """
    count, size = rows.shape
    pairs = count // 2
    parts = torch.stack([torch.randperm(pairs, generator=generator) for _ in range(size)], 1)
    lower = (parts + rows[:pairs]) / count
    first = torch.where(torch.rand(pairs, size, generator=generator) < 0.5, lower, 1 - lower)
    odd = (pairs + rows[pairs : count - pairs]) / count  # the odd row out, if any, has the part in the middle
    return torch.cat([first, odd, 1 - first])

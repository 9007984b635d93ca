"""Do batches come class by class? Batch statistics are then those of a class, and spoil every answer."""

import torch
from torch import Tensor

FEWEST_BATCHES = 4


@torch.no_grad()
def clumping(means: Tensor, within: Tensor) -> float | None:
    """How much likelier two elements of one batch are to share a class than two of different batches; about 1 if not.

    Both likelihoods are without bias for any number of classes and any batch size, so their ratio needs no table.
    A new domain changes the source's answers too, so the batches are cut in two where that lowers the ratio most, and
    only batches on the same side are compared.

    Args:
        means: mean predictions of the last batches, one row each.
        within: for each, how probable it is that two of its elements share a class.
    """
    count = len(means)
    if count < FEWEST_BATCHES:
        return None
    likeness = (means @ means.T).fill_diagonal_(0).tolist()
    inside = within.tolist()
    ratios: list[float] = []
    for cut in range(count):
        sides = [range(cut), range(cut, count)]
        pairs = [(rows, len(rows) * (len(rows) - 1)) for rows in sides if len(rows) > 1]
        own = sum(inside[row] for rows, _ in pairs for row in rows)
        other = sum(
            len(rows) / number * sum(likeness[row][column] for row in rows for column in rows) for rows, number in pairs
        )
        ratios.append(own / max(other, 1e-12))
    return min(ratios)

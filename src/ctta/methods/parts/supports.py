"""For each class the features of the lowest entropies that were classified as it: the memory of T3A and TDA."""

import torch
from torch import Tensor
from torch.nn import functional as F


def keep_most_certain(stored: Tensor, labels: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the places of the lowest entropies of each class, of those that are stored and of a batch.

    Args:
        stored: The stored entropies (C, S), in ascending order; infinite at places that are free.
        labels: The class of each image of the batch (N).
        entropies: Their entropies (N); an image whose entropy is not finite is not kept.

    Returns:
        The entropies that are kept (C, S), and where they are: below S among those stored, then in the batch.
    """
    # One column per candidate: those of other classes are pushed out by an infinite entropy.
    is_own = F.one_hot(labels, len(stored)).T.bool()
    candidates = torch.cat([stored, torch.where(is_own, entropies.to(stored), torch.inf)], 1)
    kept = candidates.sort(dim=1, stable=True).indices[:, : stored.shape[1]]
    return candidates.gather(1, kept), kept


def pick(kept: Tensor, stored: Tensor, arriving: Tensor) -> Tensor:
    """Return what is at the places that :func:`keep_most_certain` chose.

    Args:
        kept: The places (C, S).
        stored: The values of those that are stored (C, S, ...).
        arriving: Those of the batch (N, ...).

    Returns:
        The values (C, S, ...).
    """
    classes, num_stored = torch.arange(len(kept), device=kept.device).unsqueeze(1), kept.shape[1]
    old, new = stored[classes, kept.clamp_max(num_stored - 1)], arriving[(kept - num_stored).clamp_min(0)]
    return torch.where((kept < num_stored).view(*kept.shape, *[1] * (stored.ndim - 2)), old, new.to(stored))

"""Calibrate CoTTA's threshold for a network."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ctta.core.validation import check_batch_stats, check_fraction
from ctta.errors import InputError
from ctta.functional import confidence
from ctta.nn import BatchStats
from ctta.nn.surgery import Output, copy_for_adaptation, iter_inputs


@torch.no_grad()
def calibrate_threshold(
    net: nn.Module,
    batches: Iterable[Any],
    *,
    quantile: float = 0.05,
    margin: float = 0.05,
    batch_stats: BatchStats = "auto",
    output: Output = None,
) -> float:
    """Compute CoTTA's ``threshold`` for a network by the rule of the reference implementation.

    The threshold is the 5 % quantile of the source model's confidence on source images, minus 0.05: a lower confidence
    is below the source's usual one. For dense predictions every pixel counts, so a few images are enough.

    Args:
        net: Source network; not modified.
        batches: Source inputs, or tuples that start with them; labels are ignored.
        quantile: Quantile of the confidence, from 0 to 1.
        margin: Subtracted from the quantile.
        batch_stats: The value that CoTTA will be given, since it computes the source's confidence in that mode.
        output: Where to find the logits in what the network returns, if it cannot be inferred.

    Returns:
        The threshold.

    Raises:
        InputError: If there is no source image, or a batch is not valid.

    >>> net = nn.Linear(4, 2)
    >>> 0.4 < calibrate_threshold(net, [torch.randn(100, 4)]) < 1
    True
    """
    check_fraction("quantile", quantile)
    check_batch_stats(batch_stats)
    source = copy_for_adaptation(net, batch_stats=batch_stats, output=output)
    confidences = []
    for x in iter_inputs(batches, source):
        if len(x):
            confidences.append(confidence(source(x)).flatten().cpu())
    if not confidences:
        raise InputError("got no source images to calibrate on, expected at least one batch")
    # By sorting: torch.quantile rejects more than 2**24 values, which a few dense predictions already exceed.
    ordered = torch.cat(confidences).sort().values
    position = quantile * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below].lerp(ordered[above], position - below)) - margin

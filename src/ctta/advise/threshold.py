"""Settings read off source images, for users who still have some."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ctta.functional import confidence
from ctta.surgery import Output, copy_for_adaptation, iter_inputs
from ctta.validation import check_fraction, validate_batches


@torch.no_grad()
def calibrate_threshold(
    net: nn.Module,
    batches: Iterable[Any],
    *,
    quantile: float = 0.05,
    margin: float = 0.05,
    batch_stats: float = 1.0,
    output: Output = None,
) -> float:
    """CoTTA's ``threshold`` for a network, by its authors' rule.

    The 5 % quantile of the source model's confidence on source images, minus 0.05: below it, the model is less sure
    than it hardly ever was at home. Where the answer is dense every pixel counts; a few images are then enough.

    Args:
        net: the source network; not touched.
        batches: source inputs, or tuples that start with them; labels are not looked at.
        quantile: which quantile of the confidence.
        margin: what is taken off it.
        batch_stats: as CoTTA will be given, since its gate asks the source in that mode.
        output: where the logits are in what the network returns, if not found by itself.

    >>> net = nn.Linear(4, 2)
    >>> 0.4 < calibrate_threshold(net, [torch.randn(100, 4)]) < 1
    True
    """
    check_fraction("quantile", quantile)
    check_fraction("batch_stats", batch_stats)
    source = copy_for_adaptation(net, batch_stats=batch_stats, output=output)
    confidences = []
    for x in validate_batches(iter_inputs(batches)):
        if len(x):
            confidences.append(confidence(source(x)).flatten().cpu())
    if not confidences:
        raise ValueError("no source images to calibrate on; give at least one batch")
    # By sorting, since torch.quantile refuses what a few dense answers already hold.
    ordered = torch.cat(confidences).sort().values
    place = quantile * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below].lerp(ordered[above], place - below)) - margin

"""The paper's equations as free functions.

Everything is logits, class dimension 1, so that images (N, C) and pixels (N, C, H, W) share the code.
Functions that end in ``_`` change their first argument.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def confidence(logits: Tensor) -> Tensor:
    """The largest class probability of every element: (N, C, ...) to (N, ...)."""
    # max softmax = exp(max log-softmax), and exp(logit_max - logsumexp) needs no tensor of all probabilities.
    return (logits.amax(1) - logits.logsumexp(1)).exp()


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy of the predicted distribution, in nats: (N, C, ...) to (N, ...).

    >>> entropy(torch.zeros(1, 4)).exp()    # undecided between four classes
    tensor([4.])
    """
    return cross_entropy(logits, logits)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """-sum_c softmax(target)_c log softmax(logits)_c, Eq. 5: the target is a distribution, given as logits."""
    return -(target.softmax(1) * logits.log_softmax(1)).sum(1)


def symmetric_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Half the cross-entropy each way, the loss of the authors' ImageNet code."""
    return (cross_entropy(logits, target) + cross_entropy(target, logits)) / 2


def hard_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy against the target's most probable class, the loss of the authors' segmentation code."""
    return F.cross_entropy(logits, target.argmax(1), reduction="none")


@torch.no_grad()
def ema_update_(teacher: nn.Module, student: nn.Module, decay: float) -> None:
    """teacher <- decay * teacher + (1 - decay) * student, Eq. 2, over all parameters."""
    averaged, latest = list(teacher.parameters()), list(student.parameters())
    for average, value in zip(averaged, latest, strict=True):
        average.lerp_(value, 1 - decay)


@torch.no_grad()
def stochastic_restore_(student: nn.Module, source: nn.Module, probability: float, generator: torch.Generator) -> None:
    """Put the source's value back into each trainable element with this probability, Eq. 7-8."""
    pairs = [
        (adapted, original)
        for adapted, original in zip(student.parameters(), source.parameters(), strict=True)
        if adapted.requires_grad
    ]
    if not pairs:
        return
    ends = torch.tensor([adapted.numel() for adapted, _ in pairs]).cumsum(0)
    chosen = bernoulli_positions(int(ends[-1]), probability, generator)
    # One draw over all parameters laid end to end, then cut at their boundaries.
    cuts = torch.searchsorted(chosen, ends[:-1]).tolist()
    for (adapted, original), end, positions in zip(pairs, ends.tolist(), chosen.tensor_split(cuts), strict=True):
        here, there = torch.atleast_1d(adapted), torch.atleast_1d(original)
        # Indices per axis, so that parameters in any memory layout are written in place.
        at = torch.unravel_index((positions - (end - here.numel())).to(here.device), here.shape)
        here[at] = there[at]


def bernoulli_positions(count: int, probability: float, generator: torch.Generator) -> Tensor:
    """The positions below ``count`` that independent coin flips choose, in ascending order.

    The gaps between successes of coin flips are geometric, so only the successes are drawn:
    restoring 1 % of the weights costs 1 % of a mask. Drawn on the generator's device.
    """
    if probability <= 0 or count == 0:
        return torch.empty(0, dtype=torch.long)
    if probability >= 1:
        return torch.arange(count)
    expected = count * probability
    chunk = math.ceil(expected + 4 * math.sqrt(expected)) + 8
    last, chunks = -1, []
    while last < count:
        uniform = torch.rand(chunk, generator=generator, dtype=torch.float64)
        failures = (torch.log1p(-uniform) / math.log1p(-probability)).floor()
        # A gap longer than the whole row ends it; the bound keeps the sum within int64.
        chunks.append(last + (failures.clamp_max(count).long() + 1).cumsum(0))
        last = int(chunks[-1][-1])
    positions = torch.cat(chunks)
    return positions[positions < count]

"""The paper's equations as free functions.

Everything is logits, class dimension 1, so that images (N, C) and pixels (N, C, H, W) share the code.
Functions that end in ``_`` change their first argument.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def at_least_float32(x: Tensor) -> Tensor:
    """16-bit values as float32, others as they are: sums and losses in 16 bits lose what adaptation learns from."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def confidence(logits: Tensor) -> Tensor:
    """The largest class probability of every element: (N, C, ...) to (N, ...)."""
    logits = at_least_float32(logits)
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
    return -(at_least_float32(target).softmax(1) * at_least_float32(logits).log_softmax(1)).sum(1)


def symmetric_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Half the cross-entropy each way, the loss of the authors' ImageNet code."""
    return (cross_entropy(logits, target) + cross_entropy(target, logits)) / 2


def hard_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy against the target's most probable class, the loss of the authors' segmentation code."""
    return F.cross_entropy(at_least_float32(logits), target.argmax(1), reduction="none")


@torch.no_grad()
def ema_update_(teacher: nn.Module, student: nn.Module, decay: float) -> None:
    """teacher <- decay * teacher + (1 - decay) * student, Eq. 2, over all parameters."""
    averaged, latest = tuple(teacher.parameters()), tuple(student.parameters())
    if averaged:
        torch._foreach_lerp_(averaged, latest, 1 - decay)  # one launch on a GPU; refuses unequal numbers of tensors


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
    # One draw over all parameters laid end to end, then cut at their boundaries; and one copy to their device.
    cuts = torch.searchsorted(chosen, ends[:-1]).tolist()
    pieces = chosen.to(pairs[0][0].device).tensor_split(cuts)
    for (adapted, original), start, positions in zip(pairs, [0, *ends[:-1].tolist()], pieces, strict=True):
        _copy_at_(adapted, original, (positions - start).to(adapted.device))


def _copy_at_(target: Tensor, origin: Tensor, positions: Tensor) -> None:
    """Copy the elements at these positions of the flattened tensors."""
    if target.is_contiguous() and origin.is_contiguous():
        target.view(-1).index_copy_(0, positions, origin.view(-1).index_select(0, positions))
    else:  # other memory layouts cannot be flattened in place
        at = torch.unravel_index(positions, target.shape)
        target[at] = origin[at]


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

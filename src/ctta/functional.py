"""The equations of the methods as free functions.

Predictions are logits with the classes in dimension 1, so that images (N, C) and pixels (N, C, H, W) share the code.
Functions that end in ``_`` change their first argument in place. Equation numbers are those of the CoTTA paper.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import get_ema_multi_avg_fn

__all__ = [
    "at_least_float32",
    "bernoulli_positions",
    "confidence",
    "cross_entropy",
    "ema_update_",
    "entropy",
    "hard_cross_entropy",
    "stochastic_restore_",
    "symmetric_cross_entropy",
]


def at_least_float32(x: Tensor) -> Tensor:
    """Convert 16-bit values to float32, in which sums and losses keep the small differences that adaptation needs.

    Args:
        x: A floating-point tensor.

    Returns:
        The tensor in float32 or wider.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def confidence(logits: Tensor) -> Tensor:
    """Return the largest class probability of every element.

    Args:
        logits: (N, C, ...).

    Returns:
        Probabilities (N, ...).
    """
    logits = at_least_float32(logits)
    # max softmax = exp(max logit - logsumexp), which needs no tensor of all probabilities.
    return (logits.amax(1) - logits.logsumexp(1)).exp()


def entropy(logits: Tensor) -> Tensor:
    """Return the Shannon entropy of every predicted distribution, in nats.

    Args:
        logits: (N, C, ...).

    Returns:
        Entropies (N, ...).

    >>> entropy(torch.zeros(1, 4)).exp()    # uniform over four classes
    tensor([4.])
    """
    return cross_entropy(logits, logits)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy -sum_c softmax(target)_c log softmax(logits)_c of every element (Eq. 5).

    Args:
        logits: Predictions (N, C, ...).
        target: Target distributions, also as logits (N, C, ...).

    Returns:
        Losses (N, ...).
    """
    return -(at_least_float32(target).softmax(1) * at_least_float32(logits).log_softmax(1)).sum(1)


def symmetric_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean of the cross-entropies in both directions, as in CoTTA's code for ImageNet.

    Args:
        logits: Predictions (N, C, ...).
        target: Target distributions as logits (N, C, ...).

    Returns:
        Losses (N, ...).
    """
    return (cross_entropy(logits, target) + cross_entropy(target, logits)) / 2


def hard_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy against the target's most probable class, as in CoTTA's code for segmentation.

    Args:
        logits: Predictions (N, C, ...).
        target: Target distributions as logits (N, C, ...).

    Returns:
        Losses (N, ...).
    """
    return F.cross_entropy(at_least_float32(logits), target.argmax(1), reduction="none")


@torch.no_grad()
def ema_update_(teacher: nn.Module, student: nn.Module, decay: float) -> None:
    """Update the teacher's parameters: teacher <- decay * teacher + (1 - decay) * student (Eq. 2).

    Args:
        teacher: The averaged network.
        student: The network that is trained, with the same parameters.
        decay: The fraction that the teacher keeps, from 0 to 1.
    """
    averaged, latest = tuple(teacher.parameters()), tuple(student.parameters())
    if averaged:
        get_ema_multi_avg_fn(decay)(averaged, latest, None)


@torch.no_grad()
def stochastic_restore_(student: nn.Module, source: nn.Module, probability: float, generator: torch.Generator) -> None:
    """Set each element of the trainable parameters back to the source's value with some probability (Eq. 7-8).

    Args:
        student: The network that is trained.
        source: The network as it was before adaptation, with the same parameters.
        probability: The probability of each element to be restored.
        generator: A generator on the CPU; the result is the same on every device.
    """
    pairs = [
        (adapted, original)
        for adapted, original in zip(student.parameters(), source.parameters(), strict=True)
        if adapted.requires_grad
    ]
    if not pairs:
        return
    ends = torch.tensor([adapted.numel() for adapted, _ in pairs]).cumsum(0)
    chosen = bernoulli_positions(int(ends[-1]), probability, generator)
    # One draw over all parameters laid end to end, split at their boundaries; one copy to the device.
    cuts = torch.searchsorted(chosen, ends[:-1]).tolist()
    pieces = chosen.to(pairs[0][0].device).tensor_split(cuts)
    for (adapted, original), start, positions in zip(pairs, [0, *ends[:-1].tolist()], pieces, strict=True):
        _copy_at_(adapted, original, (positions - start).to(adapted.device))


def _copy_at_(target: Tensor, source: Tensor, positions: Tensor) -> None:
    """Copy the elements at positions of the flattened tensors."""
    if target.is_contiguous() and source.is_contiguous():
        target.view(-1).index_copy_(0, positions, source.view(-1).index_select(0, positions))
    else:  # other memory formats cannot be flattened in place
        at = torch.unravel_index(positions, target.shape)
        target[at] = source[at]


def bernoulli_positions(count: int, probability: float, generator: torch.Generator) -> Tensor:
    """Draw which of ``count`` independent coin flips succeed.

    The gaps between successes are geometric, so only the successes are drawn: choosing 1 % of the positions costs 1 %
    of a mask.

    Args:
        count: The number of flips.
        probability: The probability of success.
        generator: A generator on the CPU.

    Returns:
        The positions of the successes in ascending order.
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
        # A gap longer than all flips ends the draw; the bound keeps the sum within int64.
        chunks.append(last + (failures.clamp_max(count).long() + 1).cumsum(0))
        last = int(chunks[-1][-1])
    positions = torch.cat(chunks)
    return positions[positions < count]

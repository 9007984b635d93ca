"""What is done to the parameters of networks; equation numbers are those of the CoTTA paper."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


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


def pair_trained(student: nn.Module, source: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Return the parameters of a network that require grad, each with its counterpart in another network.

    Args:
        student: The network that is trained.
        source: The other network; a parameter that it does not have is left out.

    Returns:
        Pairs in the order of ``student.parameters()``.
    """
    originals = dict(source.named_parameters())
    return [
        (adapted, originals[name])
        for name, adapted in student.named_parameters()
        if adapted.requires_grad and name in originals
    ]


@torch.no_grad()
def lerp_(targets: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """Move tensors toward others: target <- (1 - weight) * target + weight * end.

    Args:
        targets: The tensors to change.
        ends: As many tensors of the same shapes.
        weight: 0 for no change, 1 for the other tensors.

    >>> x = torch.zeros(2)
    >>> lerp_([x], [torch.ones(2)], 0.25)
    >>> x
    tensor([0.2500, 0.2500])
    """
    if targets:
        torch._foreach_lerp_(list(targets), list(ends), weight)


@torch.no_grad()
def stochastic_restore_(student: nn.Module, source: nn.Module, probability: float, generator: torch.Generator) -> None:
    """Set each element of the trainable parameters back to the source's value with some probability (Eq. 7-8).

    Args:
        student: The network that is trained.
        source: The network as it was before adaptation, with the same parameters.
        probability: The probability of each element to be restored.
        generator: A generator on the CPU; the result is the same on every device.
    """
    pairs = pair_trained(student, source)
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

"""Which predictions of a batch to learn from, with which weight, and means over them.

A loss is the mean over the rows of a process, and :meth:`~ctta.AdaptiveModel.minimize` weights processes by their rows.
For a mean over *selected* elements that would be wrong, since a process may have any number of them: use
:func:`masked_mean`.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ctta.core.parallel import current_reducer
from ctta.functional.losses import at_least_float32, entropy


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the selected elements of the batch; 0 if there are none, and then without gradient.

    With several processes this is the local part of a loss: the parts, weighted by rows as
    :meth:`~ctta.AdaptiveModel.minimize` does, give the mean over what all of them have selected. The number itself is
    ``current_reducer().mean(masked_mean(values, mask))``.

    Args:
        values: One value per element (N, ...). A NaN is never hidden by the mask, since its gradient is not either.
        mask: Whether an element is selected (N, ...).

    Returns:
        A scalar.

    >>> masked_mean(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([True, False, True]))
    tensor(3.5000)
    >>> masked_mean(torch.tensor([1.0, 2.0]), torch.tensor([False, False]))
    tensor(0.)
    """
    selected = mask.to(values.dtype)
    return (values * selected).mean() / _positive_or_one(current_reducer().mean(selected.mean()))


def call_on_selected(net: Callable[[Tensor], Tensor], x: Tensor, mask: Tensor) -> Tensor:
    """Return the logits of the selected inputs of a batch, computed as a batch of their own; differentiable.

    Args:
        net: The network.
        x: The batch (N, ...).
        mask: Whether an input is selected (N); at least one of the whole batch must be.

    Returns:
        Logits (N, C, ...), zeros where nothing was selected.

    >>> call_on_selected(lambda x: x + 1, torch.ones(3, 2), torch.tensor([True, False, True])).sum(1)
    tensor([4., 0., 4.])
    """
    rows = mask.nonzero().squeeze(1)
    with current_reducer().subset(mask):
        # A process without selected inputs takes part with one that has no weight.
        logits = net(x[rows] if len(rows) else x[:1])[: len(rows)]
    return logits.new_zeros(len(x), *logits.shape[1:]).index_copy(0, rows, logits)


def batch_sum(values: Tensor) -> Tensor:
    """Return the sum over the batch as a loss that :meth:`~ctta.AdaptiveModel.minimize` takes.

    With several processes this is the local part, as for :func:`masked_mean`.

    Args:
        values: One value per element (N, ...).

    Returns:
        A scalar.

    >>> batch_sum(torch.tensor([1.0, 2.0]))
    tensor(3.)
    """
    return values.mean() * current_reducer().total_count(values.numel())


def mean_probabilities(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean prediction over the batch, or over its selected elements; differentiable.

    With several processes it is that of the whole batch, on each of them.

    Args:
        logits: (N, C, ...).
        mask: Whether an element is selected (N, ...); by default all are.

    Returns:
        Probabilities (C); zeros if nothing is selected.

    >>> mean_probabilities(torch.tensor([[0.0, 0.0], [0.0, 99.0]]), torch.tensor([True, False]))
    tensor([0.5000, 0.5000])
    """
    p = at_least_float32(logits).softmax(1)
    p = p.movedim(1, -1).reshape(-1, p.shape[1])
    if mask is None:
        return current_reducer().var_mean(p, [0])[1][0]
    selected = mask.reshape(-1).to(p.dtype)
    fraction = current_reducer().mean(selected.mean())
    return current_reducer().var_mean(p * selected.unsqueeze(1), [0])[1][0] / _positive_or_one(fraction)


def marginal_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the mean prediction over the batch; differentiable.

    Args:
        logits: (N, C, ...).

    Returns:
        A scalar; with several processes that of the whole batch, on each of them.

    >>> marginal_entropy(torch.tensor([[99.0, 0.0], [0.0, 99.0]])).exp()    # each is sure, and they disagree
    tensor(2.)
    """
    mean = mean_probabilities(logits)
    return -(mean * mean.clamp_min(torch.finfo(mean.dtype).tiny).log()).sum()


def _positive_or_one(fraction: Tensor) -> Tensor:
    """Return a divisor that leaves the sum over nothing at zero."""
    return fraction.where(fraction > 0, 1)


@torch.no_grad()
def min_max_scale(values: Tensor) -> Tensor:
    """Scale the values of a batch to [0, 1]; all of them to 0 if they are equal.

    Args:
        values: One value per element (N, ...).

    Returns:
        Values (N, ...) without gradient.

    >>> min_max_scale(torch.tensor([1.0, 3.0, 2.0])), min_max_scale(torch.tensor([5.0]))
    (tensor([0.0000, 1.0000, 0.5000]), tensor([0.]))
    """
    batch = current_reducer()
    low, high = -batch.max(-values.amin()), batch.max(values.amax())
    return (values - low) / _positive_or_one(high - low)


@torch.no_grad()
def cosine_to_average(logits: Tensor, average: Tensor) -> Tensor:
    """Return the cosine between every prediction and an average prediction.

    Args:
        logits: (N, C, ...).
        average: Probabilities (C). Zeros, as before the first update, have a cosine of 0 with everything.

    Returns:
        Cosines (N, ...).

    >>> cosine_to_average(torch.tensor([[0.0, 0.0]]), torch.tensor([0.5, 0.5])).round(decimals=3)
    tensor([1.])
    """
    p = at_least_float32(logits).softmax(1)
    return F.cosine_similarity(p, average.to(p).view(-1, *[1] * (p.ndim - 2)).unsqueeze(0), dim=1)


@torch.no_grad()
def update_average_(average: Tensor, value: Tensor, momentum: float = 0.9) -> None:
    """Update a moving average: average <- momentum * average + (1 - momentum) * value; the first value sets it.

    Args:
        average: The buffer; zeros until the first update.
        value: The new value. Zeros, as from an empty selection, change nothing.
        momentum: The fraction that the average keeps.

    >>> average = torch.zeros(2)
    >>> for value in ([1.0, 0.0], [0.0, 1.0]):
    ...     update_average_(average, torch.tensor(value))
    >>> average
    tensor([0.9000, 0.1000])
    """
    value = value.to(average)
    if value.any():
        average.copy_(momentum * average + (1 - momentum) * value if average.any() else value)


@torch.no_grad()
def reliability_weights(entropies: Tensor, margin: float) -> Tensor:
    """Return EATA's sample weights exp(margin - H), above 1 for entropies below the margin.

    Args:
        entropies: (N, ...).
        margin: Entropy at which the weight is 1.

    Returns:
        Weights (N, ...) without gradient.

    >>> reliability_weights(torch.tensor([1.0]), 1.0)
    tensor([1.])
    """
    return (margin - entropies).exp()


@torch.no_grad()
def roid_weights(logits: Tensor, average: Tensor, temperature: float = 1 / 3) -> Tensor:
    """Return ROID's sample weights exp(diversity * certainty / temperature), 0 for the less diverse elements.

    Diversity is one minus the cosine to the average prediction and certainty the negative entropy, both scaled to
    [0, 1] over the batch. Elements of less than the mean diversity are dropped.

    Args:
        logits: (N, C, ...).
        average: The moving average of predictions (C); ROID starts it at 1/C.
        temperature: The smaller, the more unequal the weights.

    Returns:
        Weights (N, ...), each 0 or at least 1, without gradient.

    >>> roid_weights(torch.zeros(2, 3), torch.ones(3) / 3)    # equal elements have equal weights
    tensor([1., 1.])
    """
    diversity = min_max_scale(1 - cosine_to_average(logits, average))
    certainty = min_max_scale(-entropy(logits))
    is_kept = diversity >= current_reducer().mean(diversity.mean())
    return (diversity * certainty / temperature).exp() * is_kept


@torch.no_grad()
def correct_prior(logits: Tensor, kind: Literal["official", "bayes"] | None = "official") -> Tensor:
    """Correct predictions by the smoothed class frequencies of their batch, as ROID does.

    Args:
        logits: (N, C, ...).
        kind: ``"official"`` multiplies the logits by the frequencies, as in ROID's code; ``"bayes"`` adds their
            logarithms to the log-probabilities; None corrects nothing.

    Returns:
        Corrected logits (N, C, ...).

    >>> correct_prior(torch.tensor([[2.0, 0.0], [2.0, 0.0]])).argmax(1)
    tensor([0, 0])
    """
    if kind is None:
        return logits
    logits = at_least_float32(logits)
    frequencies, num_classes = mean_probabilities(logits), logits.shape[1]
    num_elements = current_reducer().total_count(logits.numel() // num_classes)
    smoothing = max(1 / num_elements, 1 / num_classes) / frequencies.max()
    prior = (frequencies + smoothing) / (1 + smoothing * num_classes)
    prior = prior.view(1, -1, *[1] * (logits.ndim - 2))
    return logits * prior if kind == "official" else logits.log_softmax(1) + prior.log()

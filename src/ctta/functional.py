"""The equations of the methods as free functions.

Predictions are logits with the classes in dimension 1, so that images (N, C) and pixels (N, C, H, W) share the code.
Functions that end in ``_`` change their first argument in place. What is computed over a batch is the same on one
process and on several (see :mod:`ctta.core.parallel`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ctta.core.parallel import current_reducer

__all__ = [
    "EntropyKind",
    "at_least_float32",
    "batch_sum",
    "bernoulli_positions",
    "call_on_selected",
    "confidence",
    "contrastive_loss",
    "correct_prior",
    "cosine_to_average",
    "cross_entropy",
    "ema_update_",
    "entropy",
    "feature_divergence",
    "generalized_cross_entropy",
    "hard_cross_entropy",
    "information_maximization",
    "lerp_",
    "marginal_entropy",
    "masked_mean",
    "mean_probabilities",
    "min_max_scale",
    "pair_trained",
    "reliability_weights",
    "roid_weights",
    "soft_likelihood_ratio",
    "stochastic_restore_",
    "symmetric_cross_entropy",
    "update_average_",
    "widest_float",
]

#: Which entropy a method minimizes: that of the softmax, or COME's of the classes and "none of them".
EntropyKind = Literal["softmax", "come"]


def at_least_float32(x: Tensor) -> Tensor:
    """Convert 16-bit values to float32, in which sums and losses keep the small differences that adaptation needs.

    Args:
        x: A floating-point tensor.

    Returns:
        The tensor in float32 or wider.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def widest_float(device: torch.device) -> torch.dtype:
    """Return the floating-point dtype for sums over many values: float64, or float32 on a device without it.

    Args:
        device: Where the values are.

    Returns:
        The dtype.

    >>> widest_float(torch.device("cpu"))
    torch.float64
    """
    try:
        return torch.empty(0, dtype=torch.float64, device=device).dtype
    except (TypeError, RuntimeError):
        return torch.float32


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


def entropy(logits: Tensor, kind: EntropyKind = "softmax") -> Tensor:
    """Return the entropy of every predicted distribution, in nats.

    Args:
        logits: (N, C, ...).
        kind: ``"softmax"`` for Shannon's entropy of the C classes; ``"come"`` for that of COME's opinion over the
            classes and "none of them", which has the evidence of C uniform logits of 0. COME's gradient leaves the
            norm of the logits alone.

    Returns:
        Entropies (N, ...).

    >>> entropy(torch.zeros(1, 4)).exp()    # uniform over four classes
    tensor([4.])
    >>> entropy(torch.zeros(1, 4), "come").exp()    # half of the mass on "none of them"
    tensor([4.0000])
    """
    if kind == "come":
        masses = _add_ignorance(_constrain_norm(at_least_float32(logits))).softmax(1)
        return -(masses * (masses + 1e-7).log()).sum(1)  # the constant is COME's
    return cross_entropy(logits, logits)


def _constrain_norm(logits: Tensor) -> Tensor:
    """Return the logits, with a gradient that cannot change their norm over the classes."""
    norm: Tensor = torch.linalg.vector_norm(logits, dim=1, keepdim=True)
    return logits * (norm.detach() / norm.clamp_min(torch.finfo(norm.dtype).tiny))


def _add_ignorance(logits: Tensor) -> Tensor:
    """Append the logit ln C: b_c = exp(z_c) / (sum exp(z) + C) and u = C / (sum exp(z) + C) are then one softmax."""
    ignorance = torch.full_like(logits[:, :1], math.log(logits.shape[1]))
    return torch.cat([logits, ignorance], 1)


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


def generalized_cross_entropy(logits: Tensor, target: Tensor, q: float = 0.8) -> Tensor:
    """Return (1 - p^q) / q of the target's most probable class, which noisy labels affect less than -log p.

    Args:
        logits: Predictions (N, C, ...).
        target: Target distributions as logits (N, C, ...).
        q: From 0 (exclusive; cross-entropy is the limit) to 1 (absolute error). The default is RPL's.

    Returns:
        Losses (N, ...).

    >>> generalized_cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]), q=1.0)
    tensor([0.5000])
    """
    return -torch.expm1(-q * hard_cross_entropy(logits, target)) / q


def soft_likelihood_ratio(logits: Tensor, clip: float | None = 0.99, eps: float = 1e-5) -> Tensor:
    """Return the soft likelihood ratio -sum_c p_c log(p_c / (1 - p_c) + eps), with p_c of at most ``clip``.

    Its gradient does not vanish for confident predictions, as that of the entropy does.

    Args:
        logits: (N, C, ...).
        clip: The largest probability, above which there is no gradient; the default is ROID's. None for none, and then
            without ``eps``.
        eps: Added within the logarithm.

    Returns:
        Losses (N, ...).

    >>> soft_likelihood_ratio(torch.zeros(1, 2), eps=0.0)    # odds of 1
    tensor([-0.])
    """
    logits = at_least_float32(logits)
    if clip is not None:
        p = logits.softmax(1).clamp_max(clip)
        return -(p * (p / (1 - p) + eps).log()).sum(1)
    # Of the most probable class 1 - p would round to 0, so it is summed from the others.
    top, log_p = logits.argmax(1, keepdim=True), logits.log_softmax(1)
    rest = log_p.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
    log_rest = torch.log1p(-log_p.exp().scatter(1, top, 0.0)).scatter(1, top, rest)
    return -(log_p.exp() * (log_p - log_rest)).sum(1)


def information_maximization(logits: Tensor, eps: float = 1e-5) -> Tensor:
    """Return the mean entropy minus the entropy of the mean prediction: confident, but diverse over the batch.

    Args:
        logits: (N, C, ...).
        eps: Added within the logarithm of the mean prediction.

    Returns:
        The loss, a scalar.

    >>> information_maximization(torch.tensor([[99.0, 0.0], [0.0, 99.0]]), eps=0.0).exp()    # sure, and of both classes
    tensor(0.5000)
    """
    p = at_least_float32(logits).softmax(1)
    _, mean = current_reducer().var_mean(p.movedim(1, -1).reshape(-1, p.shape[1]), [0])
    return entropy(logits).mean() + (mean * (mean + eps).log()).sum()


def contrastive_loss(features: Tensor, temperature: float = 0.1) -> Tensor:
    """Return the supervised contrastive loss of several views per sample, each sample being a class of its own.

    Every view is an anchor. Its positives are the other views of its sample, and everything else in the batch is
    negative.

    Args:
        features: (N, views, d), of any length: they are normalized here. At least two views.
        temperature: Divides the cosine similarities. The default is RMT's and SANTA's.

    Returns:
        The loss, a scalar; with several processes that of the whole batch.

    >>> contrastive_loss(torch.eye(2).unsqueeze(1).expand(2, 2, 2)) < 1e-3    # views agree, samples differ
    tensor(True)
    """
    features = F.normalize(at_least_float32(current_reducer().gather(features)), dim=-1)
    num_samples, num_views, _ = features.shape
    flat = features.flatten(0, 1)
    sample = torch.arange(num_samples, device=flat.device).repeat_interleave(num_views)
    is_self = torch.eye(len(flat), dtype=torch.bool, device=flat.device)
    similarities = (flat @ flat.T / temperature).masked_fill(is_self, -torch.inf)
    is_positive = (sample.unsqueeze(0) == sample.unsqueeze(1)) & ~is_self
    log_likelihood = similarities.log_softmax(1).masked_fill(~is_positive, 0)
    return -log_likelihood.sum() / is_positive.sum()


@torch.no_grad()
def feature_divergence(
    means: Tensor, source_means: Tensor, source_variances: Tensor, average: Literal["official", "paper"] = "official"
) -> float:
    """Return how far the mean features of classes have moved from the source's, as PeTTA measures it.

    Args:
        means: One row per class (K, d).
        source_means: Of the same classes on source images (K, d).
        source_variances: The variances there (K, d).
        average: ``"official"`` averages the squared distances over classes before the exponential, as PeTTA's code;
            ``"paper"`` averages the divergences of the classes.

    Returns:
        A number from 0, for equal means or no classes, to 1.

    >>> feature_divergence(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3))
    0.0
    """
    if len(means) == 0:
        return 0.0
    distances = ((means - source_means).square() / (source_variances + 1e-6)).mean(1)
    return float((1 - (-(distances.mean() if average == "official" else distances)).exp()).mean())


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
    latest = torch.where(average.any(), momentum * average + (1 - momentum) * value, value)
    average.copy_(torch.where(value.any(), latest, average))


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
    # One draw over all parameters laid end to end, split at their boundaries; one copy to the device.
    chosen = bernoulli_positions(int(ends[-1]), probability, generator)
    cuts = torch.searchsorted(chosen, ends[:-1]).tolist()
    starts, parts = [0, *ends[:-1].tolist()], chosen.tensor_split(cuts)
    restored = [(pair, part - start) for pair, start, part in zip(pairs, starts, parts, strict=True) if len(part)]
    flat = [_flatten(adapted, original, positions) for (adapted, original), positions in restored]
    indices = torch.cat([positions for *_, positions in flat] or [chosen]).to(pairs[0][0].device)
    for (adapted, original, _), own in zip(flat, indices.split([len(each[2]) for each in flat]), strict=True):
        index = own.to(adapted.device)
        if adapted.ndim == 1:
            adapted.index_copy_(0, index, original.index_select(0, index))
        else:
            at = torch.unravel_index(index, adapted.shape)
            adapted[at] = original[at]


def _flatten(target: Tensor, source: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return two tensors as vectors over the same memory, and the positions of elements of the first one there.

    Tensors whose memory is not that of one vector stay as they are.
    """
    if target.is_contiguous() and source.is_contiguous():
        return target.view(-1), source.view(-1), positions
    # In another memory format, such as channels-last, the axes have another order.
    order = sorted(range(target.ndim), key=target.stride, reverse=True)
    ours, theirs = target.permute(order), source.permute(order)
    if not (ours.is_contiguous() and theirs.is_contiguous()):
        return target, source, positions
    at, strides = torch.unravel_index(positions, target.shape), [0] * target.ndim
    for axis, stride in zip(order, ours.stride(), strict=True):
        strides[axis] = stride
    offsets = torch.stack([index * stride for index, stride in zip(at, strides, strict=True)]).sum(0)
    return ours.view(-1), theirs.view(-1), offsets


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

"""Confidences, entropies and losses of predictions; equation numbers are those of the CoTTA paper."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ctta.core.parallel import current_reducer

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

"""The equations of the methods as free functions.

Predictions are logits with the classes in dimension 1, so that images (N, C) and pixels (N, C, H, W) share the code.
Functions that end in ``_`` change their first argument in place. What is computed over a batch is the same on one
process and on several (see :mod:`ctta.core.parallel`).
"""

from ctta.functional.losses import (
    EntropyKind,
    at_least_float32,
    confidence,
    contrastive_loss,
    cross_entropy,
    entropy,
    feature_divergence,
    generalized_cross_entropy,
    hard_cross_entropy,
    information_maximization,
    soft_likelihood_ratio,
    symmetric_cross_entropy,
)
from ctta.functional.parameters import bernoulli_positions, ema_update_, lerp_, pair_trained, stochastic_restore_
from ctta.functional.selection import (
    batch_sum,
    call_on_selected,
    correct_prior,
    cosine_to_average,
    marginal_entropy,
    masked_mean,
    mean_probabilities,
    min_max_scale,
    reliability_weights,
    roid_weights,
    update_average_,
)

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
]

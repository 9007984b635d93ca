"""DOTA: add to a zero-shot classifier that of Gaussians which are estimated from the stream."""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.core.parallel import current_reducer
from ctta.core.validation import check_each, check_fraction, check_non_negative, check_positive
from ctta.functional import at_least_float32
from ctta.methods.parts.contrast import normalize_rows
from ctta.nn import BatchStats
from ctta.nn.heads import features_and_logits, head_weight


class Gaussians(NamedTuple):
    """One normal distribution of features for each of the C classes, with a covariance in common.

    Attributes:
        means: Their means (C, d).
        counts: How many images each counts for (C).
        covariance: The covariance (d, d).
    """

    means: Tensor
    counts: Tensor
    covariance: Tensor


class DOTA(AdaptiveModel):
    """Add the logits of a Gaussian classifier, whose means and covariance follow the stream, to those of the network.

    Nothing is trained. A batch is predicted before it counts, by the soft labels of the network. Made for zero-shot
    classifiers, :func:`ctta.zero_shot`. The reference has a covariance for each class, and uses their mean; here one
    covariance is kept, the mean of theirs by their counts, which needs d² numbers and not C d².

    Args:
        net: A network for images, whose classifier can be found or is named by ``head``.
        variance: The variance of the features of a class before the first batch.
        shrinkage: The part of the identity in the covariance that is inverted.
        weight_rate: The weight of the Gaussians' logits, for each image that a class counts for on average.
        max_weight: The largest weight.
        head: The name of the classifier; by default it is found.
        batch_stats: The fraction of the batch in BatchNorm's statistics, if the network has any.

    >>> import ctta
    >>> encoder = nn.Sequential(nn.Flatten(), nn.Linear(48, 6))
    >>> logits = DOTA(ctta.zero_shot(encoder, torch.randn(4, 6)))(torch.rand(16, 3, 4, 4))

    Reference: Han et al., "DOTA: distributional test-time adaptation of vision-language models", NeurIPS 2025.
    """

    info = MethodInfo("DOTA", paper="Han et al., NeurIPS 2025", trains="Gaussians", labels_pixels=False)
    means: Tensor
    counts: Tensor
    covariance: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        variance: float = 1e-4,
        shrinkage: float = 1e-3,
        weight_rate: float = 0.02,
        max_weight: float = 0.1,
        head: str | None = None,
        batch_stats: BatchStats = 0.0,
        **common: Unpack[PassArguments],
    ) -> None:
        super().__init__(net, batch_stats=batch_stats, **common)
        check_each(check_positive, variance=variance, shrinkage=shrinkage)
        check_fraction("shrinkage", shrinkage)
        check_each(check_non_negative, weight_rate=weight_rate, max_weight=max_weight)
        self.variance, self.shrinkage, self.weight_rate = variance, shrinkage, weight_rate
        self.max_weight, self.head = max_weight, self.use_head(head)
        means = F.normalize(at_least_float32(head_weight(self.source)), dim=1)
        identity = torch.eye(means.shape[1], dtype=means.dtype, device=means.device)
        for name, value in Gaussians(means, means.new_ones(len(means)), variance * identity)._asdict().items():
            self.register_buffer(name, value)

    @override
    @torch.no_grad()
    def adapt_step(self, x: Tensor) -> Tensor:
        features, logits = self._run_source(x)
        answer, batch = self._correct(features, logits), current_reducer()
        updated = self._update(batch.gather(features), batch.gather(at_least_float32(logits)).softmax(1))
        is_finite = updated.means.isfinite().all()  # one overflow would stay forever
        for name, value in updated._asdict().items():
            self.get_buffer(name).copy_(torch.where(is_finite, value, self.get_buffer(name)))
        return answer

    @override
    @torch.no_grad()
    def predict_step(self, x: Tensor) -> Tensor:
        return self._correct(*self._run_source(x))

    def _run_source(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of a batch, of length 1, and the logits of the source."""
        features, logits = features_and_logits(self.source, x)
        self.require_image_logits(logits)
        return normalize_rows(features).to(self.means), logits

    def _correct(self, features: Tensor, logits: Tensor) -> Tensor:
        """Return the logits with those of the Gaussians."""
        identity = torch.eye(len(self.covariance), dtype=self.covariance.dtype, device=self.covariance.device)
        covariance = (1 - self.shrinkage) * self.covariance + self.shrinkage * identity
        # Without a check, which the host would have to read.
        directions: Tensor = torch.linalg.solve_ex(covariance, self.means.T).result
        scores = features @ directions - (self.means.T * directions).sum(0) / 2
        weight = (self.weight_rate * self.counts.mean()).clamp_max(self.max_weight)
        return logits + (weight * scores).to(logits)

    def _update(self, features: Tensor, labels: Tensor) -> Gaussians:
        """Return the Gaussians after features (N, d) of soft labels (N, C)."""
        labels = labels.to(features)
        added, counts = labels.sum(0), self.counts + labels.sum(0)
        sums = labels.T @ features
        means = (sums + self.counts.unsqueeze(1) * self.means) / counts.unsqueeze(1)
        # The sum over images and classes of the squared distance to the old mean, without a tensor (N, C, d).
        mixed = sums.T @ self.means
        around_means = (self.means * added.unsqueeze(1)).T @ self.means
        scatter = features.T @ features - mixed - mixed.T + around_means
        covariance = (self.counts.sum() * self.covariance + scatter) / counts.sum()
        return Gaussians(means, counts, covariance)

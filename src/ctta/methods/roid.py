"""ROID: certain and diverse samples, consistency with a view, weights averaged with the source's, corrected priors."""

from functools import partial
from typing import Literal, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonArguments
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.core.parallel import current_reducer
from ctta.core.validation import check_choice, check_integer, check_positive
from ctta.functional import (
    batch_sum,
    call_on_selected,
    confidence,
    correct_prior,
    mean_probabilities,
    roid_weights,
    soft_likelihood_ratio,
    symmetric_cross_entropy,
    update_average_,
)
from ctta.optim import OptimizerFactory
from ctta.policies import average_with_source
from ctta.views import Views, check_views, draw_views, image_views


class ROIDArguments(CommonArguments, total=False):
    """The keyword arguments that methods which extend ROID take over from it."""

    temperature: float
    prior: Literal["official", "bayes"] | None
    views: Views
    batch_size: int | None
    num_classes: int | None


class ROID(AdaptiveModel):
    """Minimize a weighted soft likelihood ratio and a consistency loss, and stay near the source's weights.

    Args:
        net: A network for images with normalization layers of any kind.
        optimizer: A factory of the optimizer. The default is the setting for CIFAR; that for ImageNet is
            ``partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9, nesterov=True)``.
        temperature: Temperature of the sample weights.
        keep: The fraction of the adapted weights when they are averaged with the source's, after each step.
        prior: How predictions are corrected by the class frequencies of their batch: as in the ``"official"`` code,
            which multiplies logits, by ``"bayes"``, or None.
        views: The view that predictions must agree with, the first of those drawn; () for no consistency loss.
        batch_size: What the sum of the losses is divided by; the authors use the configured batch size also for a
            shorter last batch. By default the size of each batch.
        num_classes: By default the outputs of the network.
        seed: The seed of the views.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> logits = ROID(net)(torch.rand(16, 3, 8, 8))

    Reference: Marsden et al., "Universal test-time adaptation through weight ensembling, diversity weighting, and prior
    correction", WACV 2024.
    """

    info = MethodInfo("ROID", "Marsden et al., WACV 2024", "norm layers", 2, 1, num_networks=2, labels_pixels=False)
    checks_values_late = True
    average: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        temperature: float = 1 / 3,
        keep: float = 0.99,
        prior: Literal["official", "bayes"] | None = "official",
        views: Views = image_views(1, blur_and_noise=False, padding="reflect"),
        batch_size: int | None = None,
        num_classes: int | None = None,
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(net, **common)
        check_positive("temperature", temperature)
        check_views(views)
        if prior is not None:
            check_choice("prior", prior, ("official", "bayes"))
        self.temperature, self.keep, self.prior, self.views = temperature, keep, prior, views
        self.batch_size = None if batch_size is None else check_integer("batch_size", batch_size, 1)
        self.num_classes = self.register_average(num_classes)
        self.student = self.copy_of_source()
        self.train_norms_(self.student)
        self.optimize(self.student, optimizer)
        self.stabilize()

    def stabilize(self) -> None:
        """Choose what keeps the weights near the source's."""
        self.use_policies(average_with_source(self.keep))

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        self.require_image_logits(logits)
        weights = roid_weights(logits, self.current_average(logits), self.temperature)
        losses = soft_likelihood_ratio(logits)
        for view in draw_views(self.views, self.generator("views"))[:1]:
            augmented = call_on_selected(partial(view, self.student), x, weights > 0)
            losses = losses + symmetric_cross_entropy(augmented, logits)
        loss = batch_sum(weights * losses) / (self.batch_size or current_reducer().total_count(len(x)))
        if self.minimize(loss, confidence=confidence(logits.detach()).mean(), selected=weights > 0):
            self.size_average_(logits)
            update_average_(self.average, mean_probabilities(logits.detach()))
        self.set_policy_logits(logits)
        return correct_prior(logits, self.prior)

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        return correct_prior(self.student(x), self.prior)

"""ETA: entropy minimization on predictions that are reliable and not redundant."""

import math
from functools import partial
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutSeed
from ctta.core.model import MethodInfo
from ctta.core.validation import check_choice, check_each, check_fraction, check_non_negative
from ctta.functional import (
    EntropyKind,
    confidence,
    cosine_to_average,
    entropy,
    masked_mean,
    mean_probabilities,
    reliability_weights,
    update_average_,
)
from ctta.methods.parts.prediction import StudentModel
from ctta.optim import OptimizerFactory


class ETAArguments(CommonWithoutSeed, total=False):
    """The keyword arguments that methods which extend ETA take over from it."""

    margin: float
    redundancy: float
    momentum: float
    entropy: EntropyKind
    num_classes: int | None


class ETA(StudentModel):
    """Minimize the entropy of reliable and non-redundant predictions, each weighted by its reliability.

    Args:
        net: A network with normalization layers of any kind.
        optimizer: A factory of the optimizer. The default is the setting for CIFAR; that for ImageNet is
            ``partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9)``.
        margin: Learn from entropies below this fraction of ln C, which is also where a weight is 1.
        redundancy: Learn from predictions whose cosine to the average is smaller: 0.4 for CIFAR10-C (default), 0.1 for
            CIFAR100-C, 0.05 for ImageNet-C.
        momentum: The fraction that the average of selected predictions keeps.
        entropy: ``"softmax"``, or ``"come"`` for COME's.
        num_classes: By default the outputs of the network.
        batch_stats: The fraction of the batch in BatchNorm's statistics; by default only the batch.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> logits = ETA(net)(torch.randn(16, 4))

    Reference: Niu et al., "Efficient test-time model adaptation without forgetting", ICML 2022.
    """

    info = MethodInfo("ETA", paper="Niu et al., ICML 2022", trains="norm layers", backward_passes=1, num_networks=2)
    checks_values_late = True
    check_settings: ClassVar = {"margin": 0.99, "redundancy": 0.999}
    average: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        margin: float = 0.4,
        redundancy: float = 0.4,
        momentum: float = 0.9,
        entropy: EntropyKind = "softmax",
        num_classes: int | None = None,
        **common: Unpack[CommonWithoutSeed],
    ) -> None:
        super().__init__(net, **common)
        check_choice("entropy", entropy, ("softmax", "come"))
        check_each(check_non_negative, margin=margin, redundancy=redundancy)
        check_fraction("momentum", momentum)
        self.margin, self.redundancy, self.momentum = margin, redundancy, momentum
        self.entropy, self.num_classes = entropy, num_classes
        self.student = self.copy_of_source()
        self.train_norms_(self.student)
        self.optimize(self.student, optimizer)
        self.register_average(num_classes, is_uniform=False)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        entropies, limit = entropy(logits, self.entropy), self.margin * math.log(logits.shape[1])
        is_diverse = cosine_to_average(logits, self.current_average(logits)).abs() < self.redundancy
        selected = (entropies < limit) & is_diverse
        loss = masked_mean(reliability_weights(entropies, limit) * entropies, selected) + self.penalty()
        if self.minimize(loss, selected=selected, confidence=confidence(logits.detach()).mean()):
            self.size_average_(logits)
            update_average_(self.average, mean_probabilities(logits.detach(), selected), self.momentum)
        return logits

    def penalty(self) -> Tensor | float:
        """Return what is added to the loss of an update; nothing for ETA."""
        return 0.0

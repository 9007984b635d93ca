"""Pseudo-label: learn from the network's own most probable class."""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutSeed
from ctta.core.model import MethodInfo
from ctta.functional import confidence, hard_cross_entropy
from ctta.methods.parts.prediction import StudentModel
from ctta.optim import OptimizerFactory


class PseudoLabel(StudentModel):
    """Train norm layers on the network's own predicted classes, one step per batch.

    Args:
        net: A network with normalization layers of any kind.
        optimizer: A factory of the optimizer; the default is TENT's setting for CIFAR.
        batch_stats: The fraction of the batch in BatchNorm's statistics. The default ``"auto"`` uses only the batch
            from 16 images on, and blends fewer with the source's statistics; 1 for only the batch.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> logits = PseudoLabel(net)(torch.randn(16, 4))

    Reference: Lee, "Pseudo-label: the simple and efficient semi-supervised learning method for deep neural networks",
    ICML workshop 2013; here on the test stream, with TENT's parameters, as the CoTTA paper compares it.
    """

    info = MethodInfo(
        "Pseudo-label", paper="Lee, ICML workshop 2013", trains="norm layers", backward_passes=1, num_networks=2
    )
    checks_values_late = True

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        **common: Unpack[CommonWithoutSeed],
    ) -> None:
        super().__init__(net, **common)
        self.student = self.copy_of_source()
        self.train_norms_(self.student)
        self.optimize(self.student, optimizer)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        loss = hard_cross_entropy(logits, logits.detach()).mean()
        self.minimize(loss, confidence=confidence(logits.detach()).mean())
        return logits

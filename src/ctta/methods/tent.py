"""TENT: minimize the entropy of the predictions over the scale and shift of normalization layers."""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutSeed
from ctta.core.model import MethodInfo
from ctta.functional import confidence, entropy
from ctta.methods.parts.prediction import StudentModel
from ctta.optim import OptimizerFactory


class Tent(StudentModel):
    """Minimize the entropy of predictions over the scales and shifts of norm layers, one step per batch.

    It is fast and helps at once. Over a long changing stream its errors accumulate.

    Args:
        net: A network with normalization layers of any kind.
        optimizer: A factory of the optimizer. The default is TENT's setting for CIFAR; that for ImageNet is
            ``partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9, nesterov=True)``.
        batch_stats: The fraction of the batch in BatchNorm's statistics. The default ``"auto"`` uses only the batch
            from 16 images on, and blends fewer with the source's statistics; 1 for only the batch, as in TENT.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> model = Tent(net)
    >>> logits = model(torch.randn(16, 4))    # predicts and adapts

    Reference: Wang et al., "Tent: fully test-time adaptation by entropy minimization", ICLR 2021.
    """

    info = MethodInfo("TENT", paper="Wang et al., ICLR 2021", trains="norm layers", backward_passes=1, num_networks=2)
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
        self.minimize(entropy(logits).mean(), confidence=confidence(logits.detach()).mean())
        return logits

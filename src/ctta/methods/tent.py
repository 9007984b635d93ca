"""TENT: minimise the entropy of the predictions by the norm layers' scale and shift."""

from functools import partial

import torch
from torch import Tensor, nn

from ctta.base import AdaptiveModel
from ctta.functional import confidence, entropy
from ctta.norms import find_norm_parameters
from ctta.optim import OptimizerFactory
from ctta.surgery import Output, train_only_


class Tent(AdaptiveModel):
    """One gradient step on the entropy of each batch's predictions, over the norm layers' scale and shift only.

    Cheap, and strong at first; over a long changing stream its errors feed on themselves.

    Args:
        net: a network with normalisation layers of any kind.
        optimizer: factory; the default is the reference setting for CIFAR, and ImageNet's is
            ``partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9, nesterov=True)``.
        batch_stats: share of the batch in BatchNorm's statistics.
        output: where the logits are in what the network returns, if not found by itself.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> model = Tent(net)
    >>> logits = model(torch.randn(16, 4))    # predicts and adapts

    Reference: Wang et al., "Tent: fully test-time adaptation by entropy minimization", ICLR 2021.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        batch_stats: float = 1.0,
        output: Output = None,
    ) -> None:
        super().__init__(net, batch_stats=batch_stats, output=output)
        self.student = self.copy_of_source()
        train_only_(self.student, find_norm_parameters(self.student))
        self.optimize(self.student, optimizer)

    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        self.minimize(entropy(logits).mean(), confidence=confidence(logits.detach()).mean())
        return logits

    def predict_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        return logits

"""RPL: robust pseudo-labeling, a generalized cross-entropy against the network's own labels."""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutSeed
from ctta.core.model import MethodInfo
from ctta.core.validation import check_positive
from ctta.functional import confidence, generalized_cross_entropy
from ctta.methods.parts.prediction import StudentModel
from ctta.optim import OptimizerFactory


class RPL(StudentModel):
    """Train norm layers on pseudo-labels with a loss that is robust to wrong ones.

    Args:
        net: A network with normalization layers of any kind.
        q: The exponent of the generalized cross-entropy (1 - p^q) / q of the most probable class.
        optimizer: A factory of the optimizer. The default is the setting for CIFAR; that for ImageNet is
            ``partial(torch.optim.SGD, lr=5e-4, momentum=0.9)``.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> logits = RPL(net)(torch.randn(16, 4))

    Reference: Rusak et al., "If your data distribution shifts, use self-learning", TMLR 2022.
    """

    info = MethodInfo("RPL", paper="Rusak et al., TMLR 2022", trains="norm layers", backward_passes=1, num_networks=2)
    checks_values_late = True

    def __init__(
        self,
        net: nn.Module,
        *,
        q: float = 0.8,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        **common: Unpack[CommonWithoutSeed],
    ) -> None:
        super().__init__(net, **common)
        check_positive("q", q)
        self.q = q
        self.student = self.copy_of_source()
        self.train_norms_(self.student)
        self.optimize(self.student, optimizer)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        loss = generalized_cross_entropy(logits, logits.detach(), self.q).mean()
        self.minimize(loss, confidence=confidence(logits.detach()).mean())
        return logits

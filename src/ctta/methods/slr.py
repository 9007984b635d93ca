"""SLR: minimize the soft likelihood ratio, and keep the predictions of the stream diverse."""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutSeed
from ctta.core.model import MethodInfo
from ctta.core.validation import check_fraction, check_non_negative
from ctta.functional import confidence, mean_probabilities, soft_likelihood_ratio
from ctta.methods.parts.prediction import StudentModel
from ctta.optim import OptimizerFactory


class SLR(StudentModel):
    """Train norm layers on a confidence loss whose gradient does not vanish, the soft likelihood ratio.

    The loss is the negative entropy of a moving average of the predictions plus ``weight`` times the soft likelihood
    ratio. The input transformation module of the paper is not part of it.

    Args:
        net: A network with normalization layers of any kind.
        weight: The weight of the likelihood ratio.
        clip: The largest probability in the ratio, as in ROID's code. None for the ratio of the paper, whose gradient
            does not end there.
        momentum: The fraction that the average prediction keeps at each batch; it starts uniform.
        num_classes: By default the outputs of the network.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> logits = SLR(net)(torch.randn(16, 4))

    Reference: Mummadi et al., "Test-time adaptation to distribution shift by confidence maximization and input
    transformation", 2021.
    """

    info = MethodInfo("SLR", paper="Mummadi et al., 2021", trains="norm layers", backward_passes=1, num_networks=2)
    checks_values_late = True
    average: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        weight: float = 0.025,
        clip: float | None = 0.99,
        momentum: float = 0.9,
        num_classes: int | None = None,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        **common: Unpack[CommonWithoutSeed],
    ) -> None:
        super().__init__(net, **common)
        check_non_negative("weight", weight)
        check_fraction("momentum", momentum)
        if clip is not None:
            check_fraction("clip", clip)
        self.weight, self.clip, self.momentum = weight, clip, momentum
        self.num_classes = self.register_average(num_classes)
        self.student = self.copy_of_source()
        self.train_norms_(self.student)
        self.optimize(self.student, optimizer)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        p = mean_probabilities(logits)
        average = self.momentum * self.current_average(logits).to(p) + (1 - self.momentum) * p
        diversity = torch.special.xlogy(average, average).sum()
        ratio = soft_likelihood_ratio(logits, self.clip).mean()
        if self.minimize(diversity + self.weight * ratio, confidence=confidence(logits.detach()).mean()):
            self.size_average_(logits)
            self.average.copy_(average.detach())
        return logits

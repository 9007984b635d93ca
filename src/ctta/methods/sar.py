"""SAR: sharpness-aware entropy minimization on reliable predictions, with a reset before it collapses."""

import math
from functools import partial
from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutSeed
from ctta.core.model import MethodInfo
from ctta.core.validation import check_choice, check_each, check_non_negative
from ctta.functional import EntropyKind, confidence, entropy, masked_mean
from ctta.methods.parts.prediction import StudentModel
from ctta.optim import OptimizerFactory
from ctta.policies import reset_on_low_entropy


class SAR(StudentModel):
    """Minimize the entropy of reliable predictions by sharpness-aware steps; reset when it becomes very low.

    Args:
        net: A network with normalization layers of any kind; meant for GroupNorm and LayerNorm.
        optimizer: A factory of the optimizer. The default is the usual setting for CIFAR; for ImageNet the authors use
            a learning rate of 2.5e-4 with ResNet-50 and of 1e-3 with ViT-B, for batches of 64.
        margin: Learn from entropies below this fraction of ln C.
        radius: How far to climb before the gradient that is used is computed.
        recover_below: Reset when the moving average of the entropy is below this; 0 for never.
        recover_unit: ``"nats"`` as in the authors' code, whose 0.2 was chosen for 1000 classes; with ten, it may reset
            at nearly every step. ``"share"`` is a fraction of ln C.
        entropy: ``"softmax"``, or ``"come"`` for COME's.
        skip_top: Whether to leave out the layers nearest to the output, as the authors do.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> logits = SAR(net)(torch.randn(16, 4))

    Reference: Niu et al., "Towards stable test-time adaptation in dynamic wild world", ICLR 2023.
    """

    info = MethodInfo(
        "SAR",
        paper="Niu et al., ICLR 2023",
        trains="norm layers but the top",
        forward_passes="up to 2",
        backward_passes=2,
        num_networks=2,
    )
    checks_values_late = True
    check_settings: ClassVar = {"margin": 0.99}

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        margin: float = 0.4,
        radius: float = 0.05,
        recover_below: float = 0.2,
        recover_unit: Literal["nats", "share"] = "nats",
        entropy: EntropyKind = "softmax",
        skip_top: bool = True,
        **common: Unpack[CommonWithoutSeed],
    ) -> None:
        super().__init__(net, **common)
        check_each(check_non_negative, margin=margin, radius=radius)
        check_choice("entropy", entropy, ("softmax", "come"))
        self.margin, self.radius, self.entropy, self.skip_top = margin, radius, entropy, skip_top
        self.recover_below, self.recover_unit = recover_below, recover_unit
        self.student = self.copy_of_source()
        self.train_norms_(self.student, skip_top=skip_top)
        self.optimize(self.student, optimizer)
        self.use_policies(reset_on_low_entropy(recover_below, recover_unit))

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        entropies, limit = entropy(logits, self.entropy), self.margin * math.log(logits.shape[1])
        selected = entropies.detach() < limit

        def compute_second_loss() -> tuple[Tensor, Tensor]:
            again = entropy(self.student(x), self.entropy)
            still_selected = selected & (again.detach() < limit)
            return masked_mean(again, still_selected), still_selected

        self.minimize_sharpness(
            masked_mean(entropies, selected),
            compute_second_loss,
            radius=self.radius,
            selected=selected,
            confidence=confidence(logits.detach()).mean(),
        )
        return logits

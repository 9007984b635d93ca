"""SHOT-IM: information maximization over the feature extractor, with the classifier fixed."""

from functools import partial
from typing import Literal, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutSeed
from ctta.core.model import MethodInfo
from ctta.core.validation import check_choice, check_fraction, check_non_negative
from ctta.functional import confidence, hard_cross_entropy, information_maximization, masked_mean
from ctta.methods.parts.prediction import StudentModel
from ctta.nn.surgery import names_outside, train_only_
from ctta.optim import OptimizerFactory


class SHOTIM(StudentModel):
    """Maximize mutual information: confident predictions of diverse classes, with a frozen classifier.

    Args:
        net: A network whose classifier can be found, or is named by ``head``.
        trains: The ``"extractor"``, that is everything before the classifier, or only its ``"norms"``.
        pseudo_label_weight: The weight of the cross-entropy against confident labels. 0 is SHOT-IM; online versions of
            SHOT use 0.1 or 0.3.
        min_confidence: The confidence from which a label is used.
        head: The name of the classifier; by default it is found.
        optimizer: A factory of the optimizer. Public online versions differ widely here.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> logits = SHOTIM(net)(torch.randn(16, 4))

    Reference: Liang et al., "Do we really need to access the source data? Source hypothesis transfer for unsupervised
    domain adaptation", ICML 2020; here online, one step per batch.
    """

    info = MethodInfo(
        "SHOT-IM", paper="Liang et al., ICML 2020", trains="all but the head", backward_passes=1, num_networks=2
    )
    checks_values_late = True

    def __init__(
        self,
        net: nn.Module,
        *,
        trains: Literal["extractor", "norms"] = "extractor",
        pseudo_label_weight: float = 0.0,
        min_confidence: float = 0.9,
        head: str | None = None,
        optimizer: OptimizerFactory = partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        **common: Unpack[CommonWithoutSeed],
    ) -> None:
        super().__init__(net, **common)
        check_choice("trains", trains, ("extractor", "norms"))
        check_non_negative("pseudo_label_weight", pseudo_label_weight)
        check_fraction("min_confidence", min_confidence)
        self.trains, self.pseudo_label_weight, self.min_confidence = trains, pseudo_label_weight, min_confidence
        self.head = self.use_head(head)
        self.student = self.copy_of_source()
        if trains == "norms":
            self.train_norms_(self.student)
        trained = [name for name, parameter in self.student.named_parameters() if parameter.requires_grad]
        train_only_(self.student, names_outside(trained, [self.head]))
        self.optimize(self.student, optimizer)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        loss, sureness = information_maximization(logits), confidence(logits.detach())
        if self.pseudo_label_weight:
            labeled = masked_mean(hard_cross_entropy(logits, logits.detach()), sureness > self.min_confidence)
            loss = loss + self.pseudo_label_weight * labeled
        self.minimize(loss, confidence=sureness.mean())
        return logits

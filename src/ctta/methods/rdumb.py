"""RDumb: ETA that is reset at fixed intervals."""

from functools import partial
from typing import Unpack

import torch
from torch import nn

from ctta.core.model import MethodInfo
from ctta.methods.eta import ETA, ETAArguments
from ctta.optim import OptimizerFactory
from ctta.policies import reset_every


class RDumb(ETA):
    """Adapt as ETA does, and reset every ``period`` batches, which prevents a collapse on long streams.

    Args:
        net: A network with normalization layers of any kind.
        optimizer: A factory of the optimizer. The default is the setting for CIFAR; that for ImageNet is
            ``partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9)``.
        period: Batches between two resets; the authors' batches have 64 images.
        margin: Learn from entropies below this fraction of ln C, which is also where a weight is 1.
        redundancy: Learn from predictions whose cosine to the average is smaller: 0.05 for ImageNet-C, 0.4 for CIFAR-C.
        momentum: The fraction that the average of selected predictions keeps.
        entropy: ``"softmax"``, or ``"come"`` for COME's.
        num_classes: By default the outputs of the network.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> logits = RDumb(net)(torch.randn(16, 4))

    Reference: Press et al., "RDumb: a simple approach that questions our progress in continual test-time adaptation",
    NeurIPS 2023.
    """

    info = MethodInfo(
        "RDumb", paper="Press et al., NeurIPS 2023", trains="norm layers", backward_passes=1, num_networks=2
    )

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        period: int = 1000,
        **eta: Unpack[ETAArguments],
    ) -> None:
        super().__init__(net, optimizer=optimizer, **eta)
        self.period = period
        self.use_policies(reset_every(period))

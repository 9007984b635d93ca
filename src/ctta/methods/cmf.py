"""CMF: ROID with a Kalman filter of the weights."""

from functools import partial
from typing import Literal, Unpack

import torch
from torch import nn
from typing_extensions import override

from ctta.core.model import MethodInfo
from ctta.methods.roid import ROID, ROIDArguments
from ctta.optim import OptimizerFactory
from ctta.policies import kalman


class CMF(ROID):
    """Adapt as ROID does, with weights filtered over time instead of averaged with the source's.

    Args:
        net: A network for images with normalization layers of any kind.
        optimizer: A factory of the optimizer. The default is the setting for CIFAR; that for ImageNet is
            ``partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9, nesterov=True)``.
        alpha: How much of the hidden weights stays when they drift to the source's.
        gamma: How much of the adapted weights stays when they are pulled to the hidden ones.
        noise: Process noise of a network with 38,400 trained weights.
        pull_to: Pull the adapted weights to the ``"filtered"`` hidden ones (default), or to the ``"predicted"`` ones,
            from before these have seen the step.
        temperature: Temperature of the sample weights.
        prior: As for :class:`ROID`.
        views: As for :class:`ROID`.
        batch_size: As for :class:`ROID`.
        num_classes: By default the outputs of the classifier, if it is found.
        seed: The seed of the views.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> logits = CMF(net)(torch.rand(16, 3, 8, 8))

    Reference: Lee and Chang, "Continual momentum filtering on parameter space for online test-time adaptation",
    ICLR 2024.
    """

    info = MethodInfo(
        "CMF",
        paper="Lee and Chang, ICLR 2024",
        trains="norm layers",
        forward_passes=2,
        backward_passes=1,
        num_networks=2,
        labels_pixels=False,
    )

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        alpha: float = 0.99,
        gamma: float = 0.99,
        noise: float = 0.005,
        pull_to: Literal["filtered", "predicted"] = "filtered",
        **roid: Unpack[ROIDArguments],
    ) -> None:
        self._filter = kalman(alpha, gamma, noise, pull_to)
        super().__init__(net, optimizer=optimizer, **roid)
        self.alpha, self.gamma, self.noise, self.pull_to = alpha, gamma, noise, pull_to

    @override
    def stabilize(self) -> None:
        self.use_policies(self._filter)

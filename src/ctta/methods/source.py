"""Source: the network as it was trained."""

from typing import Unpack

from torch import nn

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import MethodInfo
from ctta.methods.parts.prediction import SourceModel


class Source(SourceModel):
    """Predict with the network as it was trained: the baseline of every table.

    Args:
        net: Any network.

    >>> import torch
    >>> net = torch.nn.Linear(4, 3)
    >>> x = torch.randn(2, 4)
    >>> torch.equal(Source(net)(x), net(x))
    True
    """

    info = MethodInfo("Source")

    def __init__(self, net: nn.Module, **common: Unpack[PassArguments]) -> None:
        super().__init__(net, batch_stats=0, **common)

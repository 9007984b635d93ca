"""Source: the network as it was trained."""

from torch import Tensor, nn
from typing_extensions import override

from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.nn.surgery import Output


class Source(AdaptiveModel):
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

    def __init__(self, net: nn.Module, *, output: Output = None) -> None:
        super().__init__(net, batch_stats=0, output=output)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        return self.predict_step(x)

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.source(x)
        return logits

"""BN Stats Adapt: normalise by the statistics of the batch at hand."""

from torch import Tensor, nn

from ctta.base import AdaptiveModel
from ctta.surgery import Output


class BNStats(AdaptiveModel):
    """BatchNorm layers use the statistics of each test batch instead of the training set's; nothing is learnt.

    Args:
        net: any network; without BatchNorm layers it answers as it was trained.
        batch_stats: share m of the batch, (1-m) * running + m * batch; below 1 for small batches.
        output: where the logits are in what the network returns, if not found by itself.

    >>> import torch
    >>> model = BNStats(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)))
    >>> x = torch.randn(8, 4)
    >>> torch.allclose(model(x), model(5 * x + 7), atol=1e-4)    # a shifted, scaled sensor changes nothing
    True

    References: Schneider et al., "Improving robustness against common corruptions by covariate shift adaptation",
    NeurIPS 2020; Nado et al., "Evaluating prediction-time batch normalization", 2020.
    """

    def __init__(self, net: nn.Module, *, batch_stats: float = 1.0, output: Output = None) -> None:
        super().__init__(net, batch_stats=batch_stats, output=output)

    def adapt_step(self, x: Tensor) -> Tensor:
        return self.predict_step(x)

    def predict_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.source(x)
        return logits

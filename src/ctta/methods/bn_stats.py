"""BN Stats Adapt: normalize by the statistics of the test batch."""

from typing import Unpack

from torch import nn

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import MethodInfo
from ctta.methods.parts.prediction import SourceModel
from ctta.nn import BatchStats


class BNStats(SourceModel):
    """Normalize by the statistics of each test batch instead of the training set's; nothing is learned.

    Args:
        net: Any network; without BatchNorm layers it predicts as it was trained.
        batch_stats: The fraction m of the batch in the statistics, (1-m) * running + m * batch. The default ``"auto"``
            uses only the batch from 16 images on, and fewer images the less, the fewer they are; 1 for only the batch.

    >>> import torch
    >>> model = BNStats(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)))
    >>> x = torch.randn(16, 4)
    >>> torch.allclose(model(x), model(5 * x + 7), atol=1e-4)    # invariant to shift and scale of the input
    True

    References: Schneider et al., "Improving robustness against common corruptions by covariate shift adaptation",
    NeurIPS 2020; Nado et al., "Evaluating prediction-time batch normalization", 2020.
    """

    info = MethodInfo("BN Stats Adapt", paper="Schneider et al., NeurIPS 2020")

    def __init__(self, net: nn.Module, *, batch_stats: BatchStats = "auto", **common: Unpack[PassArguments]) -> None:
        super().__init__(net, batch_stats=batch_stats, **common)

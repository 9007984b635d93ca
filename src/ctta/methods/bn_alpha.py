"""BN-alpha: normalize by a blend of the source's statistics with those of the test batch."""

from collections.abc import Iterable
from typing import Any, Unpack

from torch import nn
from typing_extensions import override

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import MethodInfo
from ctta.core.validation import check_choice, check_fraction, check_integer
from ctta.methods.parts.prediction import SourceModel
from ctta.nn import attach_norm_hooks_
from ctta.nn.running import BlendedStatistics, Center


class BNAlpha(SourceModel):
    """BatchNorm layers use (1-alpha) * source + alpha * batch statistics; nothing is learned.

    Unlike ``BNStats(net, batch_stats=alpha)`` it takes the unbiased variance of the batch, as the published code does.
    It works from a batch of one image on.

    Args:
        net: Any network; without BatchNorm layers it predicts as it was trained.
        alpha: The fraction of the batch in the statistics.
        prior: How many images the source's statistics count for. If given, the fraction is n / (prior + n) for a batch
            of n images instead of ``alpha`` (Schneider et al.; 16 is common).
        center: What the batch is centered by: its ``"mean"``, or its ``"median"`` (MedBN), which a few poisoned images
            cannot move; with ``alpha=1`` that is MedBN as published.

    >>> import torch
    >>> model = BNAlpha(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)))
    >>> model(torch.randn(1, 4)).shape
    torch.Size([1, 3])

    References: Schneider et al., "Improving robustness against common corruptions by covariate shift adaptation",
    NeurIPS 2020; Park et al., "MedBN: robust test-time adaptation against malicious test samples", CVPR 2024.
    """

    info = MethodInfo("BN-alpha", "Schneider et al., NeurIPS 2020", trains="nothing")

    def __init__(
        self,
        net: nn.Module,
        *,
        alpha: float = 0.1,
        prior: int | None = None,
        center: Center = "mean",
        **common: Unpack[PassArguments],
    ) -> None:
        super().__init__(net, batch_stats=0.0, **common)
        check_fraction("alpha", alpha)
        check_choice("center", center, ("mean", "median"))
        self.alpha, self.center = alpha, center
        self.prior = None if prior is None else check_integer("prior", prior, 0)
        self._blend_statistics_(self.source)

    @override
    def deploy(self, batches: Iterable[Any] | None = None) -> nn.Module:
        net = super().deploy(batches)
        if batches is None:
            self._blend_statistics_(net)
        return net

    def _blend_statistics_(self, net: nn.Module) -> None:
        attach_norm_hooks_(net, lambda _: BlendedStatistics(self.alpha, self.prior, self.center))

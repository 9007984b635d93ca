"""BN-EMA: BatchNorm statistics that follow the stream."""

from typing import Unpack

from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.core.parallel import change_call, current_reducer
from ctta.core.state import snapshot_buffers
from ctta.core.updates import Step
from ctta.core.validation import check_fraction
from ctta.nn import attach_norm_hooks_
from ctta.nn.running import RunningStatistics, running_statistics
from ctta.optim import read_finite


class BNEMA(AdaptiveModel):
    """Follow the stream with BatchNorm's running statistics, as a moving average; nothing else is learned.

    Each batch goes through the network twice: first to update the statistics, then to predict with them.

    Args:
        net: Any network; without BatchNorm layers it predicts as it was trained.
        momentum: The fraction of the batch in an update of the statistics.

    >>> import torch
    >>> model = BNEMA(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    >>> model(torch.randn(8, 4)).shape
    torch.Size([8, 3])
    """

    info = MethodInfo("BN-EMA", trains="norm statistics", forward_passes=2, num_networks=2)
    checks_values_late = True

    def __init__(self, net: nn.Module, *, momentum: float = 0.1, **common: Unpack[PassArguments]) -> None:
        super().__init__(net, batch_stats=0.0, **common)
        check_fraction("momentum", momentum)
        self.momentum = momentum
        self.student = self.copy_of_source().requires_grad_(False)
        attach_norm_hooks_(self.student, lambda _: RunningStatistics(momentum, normalize_by="batch"))

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        restore_statistics = snapshot_buffers(self.student)
        try:
            with change_call(is_tracking=True):
                self.student(x)
            logits: Tensor = self.student(x)
            num_bad = current_reducer().max((~logits.isfinite()).sum().float())
            is_finite = all(read_finite(running_statistics(self.student), num_bad == 0))
        except BaseException:
            restore_statistics()
            raise
        if not is_finite:  # one overflow would stay in the average forever
            restore_statistics()
            self.num_skipped += 1
            logits = self.student(x)
        self.last_step = Step(logits.new_zeros(()), skipped=not is_finite)
        return logits

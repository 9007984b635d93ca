"""DELTA: batch renormalization and weights that count rare classes as much as frequent ones."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal, Unpack

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import MethodInfo
from ctta.core.parallel import change_call, current_call, current_reducer, read_flags
from ctta.core.state import LazyModule, snapshot_buffers
from ctta.core.updates import Policy
from ctta.core.validation import check_choice, check_each, check_fraction
from ctta.functional import (
    confidence,
    entropy,
    hard_cross_entropy,
    masked_mean,
    mean_probabilities,
    reliability_weights,
)
from ctta.methods.parts.prediction import StudentModel
from ctta.nn import BatchStatistics, NormHook, attach_norm_hooks_, renormalize
from ctta.nn.moments import attach_statistics_gradient, batch_var_mean, fix_stride_of_one
from ctta.optim import OptimizerFactory


class Renormalization(NormHook, LazyModule):
    """A forward pre-hook of one BatchNorm, whose running statistics start at the first batch's and follow the stream.

    The output is (x - m) / s * r + d with the mean m and the standard deviation s of the batch, and with
    r = s / s_running and d = (m - m_running) / s_running as constants. Its value is that of the running statistics, and
    its gradient that of the batch's. In a call that tracks, the running statistics then
    move toward the batch's; of the deviations, not of the variances, an average is kept.

    Args:
        momentum: The fraction of themselves that the running statistics keep.
    """

    cpu_buffers = ("num_followed",)
    num_followed: Tensor

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("num_followed", torch.zeros((), dtype=torch.long))
        self._latest: tuple[Tensor, Tensor] | None = None  # statistics of the batch that the layer is computing

    @override
    def before(self, module: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        BatchStatistics.set_mode_(module, by_layer=False)
        assert module.running_mean is not None, "checked when the method is built"
        x = inputs[0]
        values = x.to(module.running_mean.dtype)
        variance, mean = batch_var_mean(values)
        self._latest = (mean.detach().flatten(), variance.detach().flatten()) if current_call().is_tracking else None
        if self.num_followed > 0:
            # r and d make the value that of the layer's own statistics, and leave the gradient of the batch's.
            return attach_statistics_gradient(module, inputs, mean, variance)
        values = renormalize(module, values, mean, variance, x.ndim - 2)
        return (fix_stride_of_one(values).to(x.dtype), *inputs[1:])

    @override
    @torch.no_grad()
    def after(self, module: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Move the running statistics after the layer has used them, if they are tracked."""
        if self._latest is None:
            return
        assert module.running_mean is not None and module.running_var is not None
        mean, variance = self._latest
        if self.num_followed > 0:
            mean = mean.lerp(module.running_mean, self.momentum)
            deviation = (variance + module.eps).sqrt().lerp((module.running_var + module.eps).sqrt(), self.momentum)
            variance = (deviation.square() - module.eps).clamp_min(0)
        # Replaced, not written to, since a graph may still need them.
        module.running_mean, module.running_var, self._latest = mean, variance, None
        self.num_followed += 1


class DELTA(StudentModel):
    """Minimize entropy with more weight on rare classes, and normalize by moving averages over the stream.

    BatchNorm normalizes by moving averages over the stream, with the gradient of batch statistics (TBR), so the batch
    that is predicted matters little. Samples weigh inversely to the average probability of their class (DOT).

    Args:
        net: A network with normalization layers of any kind; only BatchNorm is renormalized.
        optimizer: A factory of the optimizer. The default is the reference's, for ImageNet.
        loss: What DELTA is added to: the ``"entropy"`` of TENT, the ``"weighted_entropy"`` of predictions with an
            entropy below ln(C) / 2, or ``"pseudo_label"`` for the predicted classes of a confidence above 0.4.
        norm_momentum: The fraction of themselves that BatchNorm's averages keep; 0 is TENT's normalization.
        class_momentum: The fraction of itself that the average prediction keeps; 1 weighs all classes alike.
        num_classes: By default the outputs of the network.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    >>> logits = DELTA(net)(torch.randn(16, 4))

    Reference: Zhao, Chen and Xia, "DELTA: degradation-free fully test-time adaptation", ICLR 2023.
    """

    info = MethodInfo("DELTA", "Zhao et al., ICLR 2023", "norm layers", backward_passes=1, num_networks=2)
    checks_values_late = True
    average: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9),
        lr: float | None = None,
        loss: Literal["entropy", "weighted_entropy", "pseudo_label"] = "entropy",
        norm_momentum: float = 0.95,
        class_momentum: float = 0.95,
        num_classes: int | None = None,
        policies: Sequence[Policy] = (),
        **common: Unpack[PassArguments],
    ) -> None:
        super().__init__(net, lr=lr, policies=policies, batch_stats=0.0, **common)
        check_choice("loss", loss, ("entropy", "weighted_entropy", "pseudo_label"))
        check_each(check_fraction, norm_momentum=norm_momentum, class_momentum=class_momentum)
        self.loss, self.norm_momentum, self.class_momentum = loss, norm_momentum, class_momentum
        self.num_classes = num_classes
        self.student = self.copy_of_source()
        self.statistics = attach_norm_hooks_(self.student, lambda _: Renormalization(norm_momentum))
        self.train_norms_(self.student)
        self.optimize(self.student, optimizer)
        self.register_average(num_classes)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        read_flags()  # before statistics follow the batch
        restore_statistics = snapshot_buffers(self.student, self.statistics)
        with change_call(is_tracking=True):
            logits: Tensor = self.student(x)
        losses, selected = self._compute_losses(logits)
        loss = masked_mean(self._weigh_classes(logits.detach()).to(losses) * losses, selected)
        self.minimize(loss, selected=selected, confidence=confidence(logits.detach()).mean())
        if self.last_step is not None and self.last_step.skipped:
            restore_statistics()
        else:
            self.size_average_(logits)
            latest = mean_probabilities(logits.detach()).to(self.average)
            self.average.copy_(self.class_momentum * self.average + (1 - self.class_momentum) * latest)
        return logits

    def _compute_losses(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each element (N, ...), and which of them count."""
        if self.loss == "pseudo_label":
            return hard_cross_entropy(logits, logits.detach()), confidence(logits.detach()) > 0.4
        entropies, margin = entropy(logits), math.log(logits.shape[1]) / 2
        if self.loss == "weighted_entropy":
            return reliability_weights(entropies, margin) * entropies, entropies.detach() < margin
        return entropies, torch.ones_like(entropies, dtype=torch.bool)

    def _weigh_classes(self, logits: Tensor) -> Tensor:
        """Return the weight of each element (N, ...), with a mean of 1 over the batch."""
        # A class that is never predicted underflows at last, and one over it would not be finite.
        weights = 1 / self.current_average(logits).clamp_min(1e-30)[logits.argmax(1)]
        return weights / current_reducer().mean(weights.mean())

"""TRIBE: BatchNorm statistics balanced over classes, and a teacher tied to the source."""

import math
from functools import partial
from typing import ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutBatchStats
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.core.parallel import change_call, current_call, current_reducer, read_flags, replicated
from ctta.core.state import LazyModule, snapshot_buffers
from ctta.core.validation import check_each, check_fraction, check_non_negative
from ctta.functional import at_least_float32, confidence, entropy, hard_cross_entropy, masked_mean
from ctta.methods.parts.memory import predicted_classes
from ctta.nn import BatchStatistics, NormHook, attach_norm_hooks_
from ctta.nn.moments import attach_statistics_gradient, image_var_mean
from ctta.nn.surgery import share_parameters_
from ctta.optim import OptimizerFactory
from ctta.views import Views, check_views, draw_views, image_views


class LabeledBatch(NamedTuple):
    """The predicted classes (N) of a batch that statistics follow, and how many classes there are."""

    labels: Tensor
    num_classes: int


class BalancedStatistics(NormHook, LazyModule):
    """A forward pre-hook of one BatchNorm that keeps statistics per class, and normalizes by their mean over classes.

    In a call on a :class:`LabeledBatch` the statistics of the classes follow it and are used at once, with the
    gradient of the batch's part. In others the layer uses what they gave last, its ``running_mean`` and
    ``running_var``.

    Args:
        momentum: What one image adds to the statistics of its class; None for 0.0005 per class, but at least 0.01. For
            more than 1 / momentum images of a class it is one over their number.
        spread: The fraction of a change that goes to all classes alike.
    """

    means: Tensor
    variances: Tensor

    def __init__(self, momentum: float | None, spread: float) -> None:
        super().__init__()
        self.momentum, self.spread = momentum, spread
        self.register_lazy_buffer("means", None, None)
        self.register_lazy_buffer("variances", None, None)

    @override
    def before(self, module: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        BatchStatistics.set_mode_(module, by_layer=False)
        batch = current_call().batch_facts
        if not isinstance(batch, LabeledBatch):
            return None
        assert module.running_mean is not None and module.running_var is not None, "checked when the method is built"
        x, (labels, num_classes) = inputs[0], batch
        if not self.is_allocated:
            self.allocate_("means", module.running_mean.expand(num_classes, -1).clone())
            self.allocate_("variances", module.running_var.expand(num_classes, -1).clone())
        values = x.to(module.running_mean.dtype)
        means, variances = self._follow(values, labels)
        # An average over one class has no variance between classes.
        mean, variance = means.mean(0), variances.mean(0) + means.var(0, correction=min(1, num_classes - 1))
        self.means, self.variances = means.detach(), variances.detach()
        module.running_mean, module.running_var = mean.detach(), variance.detach()
        along_channels = (-1,) + (1,) * (x.ndim - 2)
        return attach_statistics_gradient(module, inputs, mean.view(along_channels), variance.view(along_channels))

    def _follow(self, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the statistics of the classes after a batch (C, channels)."""
        one_hot = F.one_hot(labels, len(self.means)).to(values)
        counts = one_hot.sum(0).unsqueeze(1)
        momentum = max(0.0005 * len(self.means), 0.01) if self.momentum is None else self.momentum
        rate = torch.where(counts * momentum > 1, 1 / counts.clamp_min(1), momentum)
        own_variances, own_means = image_var_mean(values)
        distances = own_means - self.means[labels]
        moved = rate * (one_hot.T @ distances)  # zero for classes without images
        squared = rate * (one_hot.T @ (own_variances + distances.square()))
        num_present = (counts > 0).sum()
        means = self.means + (1 - self.spread) * moved + self.spread * moved.sum(0) / num_present
        # Of absent classes rate * counts is zero, so they change by the spread alone.
        variances = self.variances + (1 - self.spread) * (squared - rate * counts * self.variances - moved.square())
        common = (squared - moved.square()).sum(0) / num_present
        weight = (rate * counts).sum() / num_present
        return means, variances + self.spread * (common - weight * variances)


class TRIBE(AdaptiveModel):
    """Learn from confident predictions, with statistics of BatchNorm that give every class the same weight.

    A teacher with the student's weights and statistics of its own predicts. The student learns the teacher's classes
    from a view, where the teacher is confident, and the teacher stays close to the source, whose statistics follow the
    stream as well. Made for correlated streams with rare classes.

    Args:
        net: A network with normalization layers of any kind, whose scales and shifts are trained.
        optimizer: A factory of the optimizer. The default is that for CIFAR; that for ImageNet is Adam with 5e-4.
        momentum: What one image adds to the statistics of its class: 0.01, 0.05 and 0.5 for 10, 100 and 1000 classes.
            None for the larger of 0.0005 per class and 0.01.
        spread: The fraction of it that goes to all classes: 0, 0.1 and 0.5 there.
        max_entropy: Entropy below which the teacher is confident, as a fraction of that of a uniform prediction: 0.05,
            0.2 and 0.4 there.
        anchor: The weight of the squared distance between the logits of teacher and source.
        views: The view that the student sees; the loss is averaged over several, and none shows the batch itself. The
            default expects images in [0, 1]; see :func:`ctta.views.image_views`.
        seed: The seed of the random views.

    >>> model = TRIBE(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, 10)))
    >>> model(torch.rand(4, 3, 8, 8)).shape
    torch.Size([4, 10])

    Reference: Su et al., "Towards real-world test-time adaptation: tri-net self-training with balanced normalization".
    """

    info = MethodInfo("TRIBE", "Su et al., AAAI 2024", "norm layers", "3 + views", backward_passes=1, num_networks=4)
    checks_values_late = True
    check_settings: ClassVar = {"max_entropy": 0.99}

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        momentum: float | None = 0.01,
        spread: float = 0.0,
        max_entropy: float = 0.05,
        anchor: float = 0.5,
        views: Views = image_views(1),
        **common: Unpack[CommonWithoutBatchStats],
    ) -> None:
        super().__init__(net, batch_stats=0.0, **common)
        check_fraction("momentum", 0.0 if momentum is None else momentum)
        check_fraction("spread", spread)
        check_each(check_non_negative, max_entropy=max_entropy, anchor=anchor)
        check_views(views)
        self.momentum, self.spread, self.max_entropy = momentum, spread, max_entropy
        self.anchor, self.views = anchor, views
        self.student, self.teacher, self.reference = (self.copy_of_source() for _ in range(3))
        self.reference.requires_grad_(False)
        self.train_norms_(self.student)
        share_parameters_(self.teacher, self.student)
        networks = (self.student, self.teacher, self.reference)
        self.statistics = nn.ModuleList(
            attach_norm_hooks_(net, lambda _: BalancedStatistics(momentum, spread)) for net in networks
        )
        self.optimize(self.student, optimizer)

    @override
    @torch.no_grad()
    def predict_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.teacher(x)
        return logits

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits, batch = self.predict_step(x).detach(), current_reducer()
        images, predictions = batch.gather(x), batch.gather(logits)
        read_flags()  # before statistics follow the batch
        restore_buffers = snapshot_buffers(self.student, self.teacher, self.reference, self.statistics)
        with replicated():  # the statistics of a class depend on all images of the batch
            if not self._update(images, predictions):
                restore_buffers()
        return logits

    def _update(self, images: Tensor, predictions: Tensor) -> bool:
        views = draw_views(self.views, self.generator("views"))
        with change_call(batch_facts=LabeledBatch(predicted_classes(predictions), predictions.shape[1])):
            target = at_least_float32(self.teacher(images))
            logits = [view(self.student, images) for view in views] or [self.student(images)]
            reference = at_least_float32(self.reference(images))
        is_sure = entropy(target.detach()) < self.max_entropy * math.log(target.shape[1])
        losses = torch.stack([hard_cross_entropy(each, target) for each in logits]).mean(0)
        losses = losses + self.anchor * (target - reference).square().mean(1)
        means = {"confidence": confidence(target.detach()).mean(), "selected": is_sure}
        self.minimize(masked_mean(losses, is_sure), **means)
        # Without a confident prediction there is no step, and the statistics follow the stream all the same.
        return self.last_step is not None and not self.last_step.skipped

"""RoTTA: a student and a teacher learn from a balanced memory of past images, for streams with correlated classes."""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutBatchStats
from ctta.core.model import MethodInfo
from ctta.core.parallel import change_call
from ctta.core.validation import check_each, check_fraction, check_integer
from ctta.functional import confidence, cross_entropy, ema_update_
from ctta.methods.parts.memory import MemoryModel, TimelyMemory
from ctta.nn import attach_norm_hooks_
from ctta.nn.running import RunningStatistics
from ctta.optim import OptimizerFactory
from ctta.views import Views, check_views, draw_views, image_views


class RoTTA(MemoryModel):
    """Learn from a memory in which classes are balanced, recent images preferred and uncertain ones avoided.

    A teacher, the moving average of the student, predicts. Every ``update_every`` images the student learns, from a
    view of the memory, what the teacher predicts for it; recent images count more. The statistics of BatchNorm follow
    the memory slowly and are used for predictions, so batches may be small or contain one class.

    Args:
        net: A network with normalization layers of any kind, whose scales and shifts are trained.
        memory_size: The number of images in the memory.
        update_every: The number of images between two updates; they need not fit the batches.
        decay: The fraction of itself that the teacher keeps at an update.
        momentum: The fraction of the memory in an update of BatchNorm's statistics.
        views: The view of the memory that the student sees; the loss is averaged over several, and none shows the
            memory itself. The default expects images in [0, 1]; see :func:`ctta.views.image_views`.
        seed: The seed of the random views.

    >>> net = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, 10))
    >>> model = RoTTA(net, memory_size=8, update_every=8)
    >>> model(torch.rand(20, 3, 8, 8)).shape    # predicts all, then updates after image 8 and image 16
    torch.Size([20, 10])

    Reference: Yuan, Xie and Li, "Robust test-time adaptation in dynamic scenarios", CVPR 2023.
    """

    info = MethodInfo(
        "RoTTA", "Yuan et al., CVPR 2023", "norm layers", "1, and 2 per update", backward_passes=1, num_networks=3
    )
    update_every: int

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        memory_size: int = 64,
        update_every: int = 64,
        decay: float = 0.999,
        momentum: float = 0.05,
        views: Views = image_views(1),
        **common: Unpack[CommonWithoutBatchStats],
    ) -> None:
        super().__init__(net, batch_stats=0.0, **common)
        check_each(check_fraction, decay=decay, momentum=momentum)
        check_views(views)
        self.memory, self.update_every = TimelyMemory(memory_size), check_integer("update_every", update_every, 1)
        self.memory_size, self.decay, self.momentum, self.views = memory_size, decay, momentum, views
        self.student, self.teacher = self.copy_of_source(), self.copy_of_source().requires_grad_(False)
        for network in (self.student, self.teacher):  # each has its own statistics
            attach_norm_hooks_(network, lambda _: RunningStatistics(momentum))
        self.train_norms_(self.student)
        self.optimize(self.student, optimizer)

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.teacher(x)
        return logits

    @override
    def update(self, number: int) -> bool:
        images, ages = self.memory.recall()
        views = draw_views(self.views, self.generator(f"views {number}"))
        with change_call(is_tracking=True):
            target = self.teacher(images)
            predictions = [view(self.student, images) for view in views] or [self.student(images)]
        losses = torch.stack([cross_entropy(logits, target) for logits in predictions]).mean(0)
        timeliness = torch.sigmoid(-ages.to(losses) / self.memory_size)  # e^-a / (1 + e^-a)
        weighted = timeliness.view(-1, *[1] * (losses.ndim - 1)) * losses
        is_updated = self.minimize(weighted.mean(), confidence=confidence(target).mean())
        if is_updated:
            ema_update_(self.teacher, self.student, self.decay)
        return is_updated

"""RMT: a mean teacher with a symmetric loss, and contrast with prototypes of the source's classes."""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.model import MethodInfo
from ctta.core.validation import check_fraction
from ctta.functional import confidence, ema_update_, symmetric_cross_entropy
from ctta.methods.parts.contrast import ContrastArguments, ContrastModel, average_with_views
from ctta.methods.rmt.replay import ReplayModel, SourceReplay
from ctta.optim import OptimizerFactory
from ctta.source_stats import SourceStats


class RMT(ContrastModel, ReplayModel):
    """Learn from a mean teacher, and pull features toward the class prototypes of the source.

    Returns the sum of both networks' logits. Prototypes of the source's classes are needed. Without ``replay`` this is
    the source-free form; the reference replays labeled source images, and first calls :meth:`warm_up` on them.

    Args:
        net: A network for images, of which every parameter is trained.
        source_stats: Statistics of source images, ``ctta.source_stats(net, batches, labels)``; the reference has the
            labels of all training images.
        optimizer: A factory of the optimizer. The default is the setting for CIFAR; that for ImageNet is
            ``partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)``.
        decay: The fraction of itself that the teacher keeps at an update.
        replay: Labeled source images, :class:`ctta.SourceReplay`, of which each step learns a batch; None for none.
        replay_weight: The weight of their cross-entropy.
        contrast_weight: The weight of the contrast.
        temperature: Divides the cosine similarities of the contrast.
        projection: The number of outputs of the projector, which is trained as well.
        views: The view of each batch; losses are averaged over several, and none shows the batch itself. The default
            expects images in [0, 1]; see :func:`ctta.views.image_views`.
        head: The name of the classifier; by default it is found.
        seed: The seed of the random views and of the projector's first weights.

    >>> import ctta
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> stats = ctta.source_stats(net, [torch.rand(32, 3, 8, 8)], labels=torch.arange(32) % 10)
    >>> logits = RMT(net, source_stats=stats)(torch.rand(16, 3, 8, 8))

    Reference: Döbler, Marsden and Yang, "Robust mean teacher for continual and gradual test-time adaptation", CVPR
    2023.
    """

    info = MethodInfo(
        "RMT",
        paper="Döbler et al., CVPR 2023",
        trains="all weights and projector",
        forward_passes="2 + views",
        backward_passes=1,
        num_networks=3,
        needs_source_data=True,
        labels_pixels=False,
        starts_random=True,
    )

    def __init__(
        self,
        net: nn.Module,
        *,
        source_stats: SourceStats | None = None,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        decay: float = 0.999,
        replay: SourceReplay | None = None,
        replay_weight: float = 1.0,
        **contrast: Unpack[ContrastArguments],
    ) -> None:
        super().__init__(net, source_stats=source_stats, **contrast)
        check_fraction("decay", decay)
        self.decay = decay
        self.student, self.teacher = self.copy_of_source(), self.copy_of_source().requires_grad_(False)
        self.optimize(nn.ModuleList([self.student, self.projector]), optimizer)
        self.use_replay(replay, replay_weight)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        features, logits = self.compute_views(self.student, x)
        target: Tensor = self.teacher(x).detach()
        losses = [symmetric_cross_entropy(each, target) for each in logits]
        loss = average_with_views(losses) + self.contrast(features) + self.replay_loss(x)
        if self.minimize(loss, confidence=confidence(target).mean()):
            ema_update_(self.teacher, self.student, self.decay**self.step_scale)
        return logits[0] + target

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x) + self.teacher(x)
        return logits

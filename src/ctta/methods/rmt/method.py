"""RMT: a mean teacher with a symmetric loss, and contrast with prototypes of the source's classes."""

import os
from functools import partial
from typing import Self, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.model import MethodInfo
from ctta.core.parallel import change_call
from ctta.core.validation import check_fraction, check_integer, check_non_negative
from ctta.errors import CheckpointError, ConfigError
from ctta.functional import confidence, ema_update_, symmetric_cross_entropy
from ctta.methods.parts.contrast import ContrastArguments, ContrastModel, average_with_views
from ctta.methods.rmt.replay import SourceReplay
from ctta.optim import OptimizerFactory, scale_rates, step_if_finite_
from ctta.source_stats import SourceStats


class RMT(ContrastModel):
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
    checks_values_late = True

    replay_digest: Tensor

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
        check_non_negative("replay_weight", replay_weight)
        self.decay = decay
        self.student, self.teacher = self.copy_of_source(), self.copy_of_source().requires_grad_(False)
        self.optimize(nn.ModuleList([self.student, self.projector]), optimizer)
        self.replay, self.replay_weight = replay, replay_weight
        if replay is not None:
            if not isinstance(replay, SourceReplay):
                raise TypeError(f"replay must be a ctta.SourceReplay(images, labels), got {type(replay).__name__}")
            if (label := int(replay.labels.max())) >= (num_classes := self.count_classes()):
                raise ConfigError(f"replay has an image of class {label}, and the network has {num_classes} classes")
            self.register_buffer("replay_digest", torch.tensor(replay.digest))

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        features, logits = self.compute_views(self.student, x)
        target: Tensor = self.teacher(x).detach()
        losses = [symmetric_cross_entropy(each, target) for each in logits]
        loss = average_with_views(losses) + self.contrast(features)
        if self.replay is not None and self.replay_weight:
            replayed = self.replay.cross_entropy(self.student, self.num_steps, self.seed, x)
            loss = loss + self.replay_weight * replayed
        if self.minimize(loss, confidence=confidence(target).mean()):
            ema_update_(self.teacher, self.student, self.decay**self.step_scale)
        return logits[0] + target

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x) + self.teacher(x)
        return logits

    def warm_up(self, num_images: int = 50_000) -> Self:
        """Let student and teacher agree on source images, before a stream begins.

        The learning rate rises linearly to its value. What is learned is part of the stream: it is saved with it, and
        :meth:`reset` and :meth:`fork` return to the state without it. With several processes, call it on each.

        Args:
            num_images: How many images to see, batch by batch; the reference has 50,000.

        Returns:
            The model itself.

        Raises:
            ConfigError: There are no source images.
        """
        if self.replay is None:
            raise ConfigError("warm_up needs source images: give replay=ctta.SourceReplay(images, labels)")
        assert self.optimizer is not None, "built by the constructor"
        num_steps = check_integer("num_images", num_images, 1) // self.replay.batch_size
        like, groups = next(self.student.parameters()), self.optimizer.param_groups
        for step in range(num_steps):
            images, _ = self.replay.draw(step, self.seed, like)
            rising = scale_rates(self.optimizer, [(step + 1) / num_steps] * len(groups))
            with torch.inference_mode(False), torch.enable_grad(), change_call(num_images=len(images)), rising:
                loss = symmetric_cross_entropy(self.student(images), self.teacher(images).detach()).mean()
                if step_if_finite_(self.optimizer, loss):
                    ema_update_(self.teacher, self.student, self.decay)
        return self

    @override
    def on_load(self, path: str | os.PathLike[str]) -> None:
        super().on_load(path)
        if self.replay is not None and int(self.replay_digest) != self.replay.digest:
            raise CheckpointError(
                f"{path} was saved with other source images, labels or batch size of replay: give those that the "
                "stream was started with"
            )

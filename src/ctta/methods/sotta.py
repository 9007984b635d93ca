"""SoTTA: sharpness-aware entropy minimization on confident images, for streams with images that do not belong there."""

from functools import partial
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutBatchStats
from ctta.core.model import MethodInfo
from ctta.core.parallel import change_call
from ctta.core.validation import check_fraction, check_integer, check_non_negative
from ctta.functional import confidence, entropy
from ctta.methods.parts.memory import ConfidentMemory, MemoryModel
from ctta.nn import attach_norm_hooks_
from ctta.nn.running import RunningStatistics
from ctta.optim import OptimizerFactory


class SoTTA(MemoryModel):
    """Learn from a memory of confident images, with as many of each predicted class, where the loss is flat.

    Images of other classes, noise and attacks are rarely predicted with confidence, so they stay out of the memory; the
    sharpness-aware step limits the harm of those that do not. Running statistics predict, so batches may be small.

    Args:
        net: A network with normalization layers of any kind, whose scales and shifts are trained, without those of the
            top layers.
        optimizer: A factory of the optimizer inside the sharpness-aware step.
        memory_size: The number of images in the memory.
        update_every: The number of images between two updates; they need not fit the batches.
        min_confidence: The confidence from which on an image is kept: 0.99, 0.66 and 0.33 for CIFAR10-C, CIFAR100-C and
            ImageNet-C.
        momentum: The fraction of the memory in an update of BatchNorm's statistics, of which there are two per step.
        radius: How far the weights climb to find the sharpest loss nearby.
        freeze_top: Whether the top layers (the last stage, or the last quarter of the blocks) stay as they are.
        seed: The seed of the memory's choices.

    >>> net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    >>> model = SoTTA(net, memory_size=8, update_every=8)
    >>> model(torch.randn(1, 4)).shape
    torch.Size([1, 3])

    Reference: Gong et al., "SoTTA: robust test-time adaptation on noisy data streams", NeurIPS 2023.
    """

    info = MethodInfo(
        "SoTTA", "Gong et al., NeurIPS 2023", "norm layers", "1, and 2 per update", backward_passes=2, num_networks=2
    )
    check_settings: ClassVar = {**MemoryModel.check_settings, "min_confidence": 0.3}
    update_every: int

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        memory_size: int = 64,
        update_every: int = 64,
        min_confidence: float = 0.99,
        momentum: float = 0.2,
        radius: float = 0.05,
        freeze_top: bool = True,
        **common: Unpack[CommonWithoutBatchStats],
    ) -> None:
        super().__init__(net, batch_stats=0.0, **common)
        check_fraction("momentum", momentum)
        check_non_negative("radius", radius)
        self.memory = ConfidentMemory(memory_size, min_confidence)
        self.memory_size, self.update_every = memory_size, check_integer("update_every", update_every, 1)
        self.min_confidence, self.momentum, self.radius, self.freeze_top = min_confidence, momentum, radius, freeze_top
        self.student = self.copy_of_source()
        attach_norm_hooks_(self.student, lambda _: RunningStatistics(momentum, normalize_by="batch"))
        self.train_norms_(self.student, skip_top=freeze_top)
        self.optimize(self.student, optimizer)

    @override
    def update(self, number: int) -> bool:
        images, _ = self.memory.recall()
        if len(images) == 0:
            return True  # nothing was confident; the images have arrived all the same

        def measure() -> tuple[Tensor, Tensor, Tensor]:
            with change_call(is_tracking=True):
                logits = self.student(images)
            losses = entropy(logits)
            return losses.mean(), torch.ones_like(losses, dtype=torch.bool), logits

        loss, selected, logits = measure()
        sureness = confidence(logits.detach()).mean()
        return self.minimize_sharpness(
            loss, lambda: measure()[:2], radius=self.radius, selected=selected, confidence=sureness
        )

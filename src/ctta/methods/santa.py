"""SANTA: the source as an anchor of the predictions, and contrast with prototypes of its classes."""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.model import MethodInfo
from ctta.functional import confidence, cross_entropy
from ctta.methods.parts.contrast import ContrastArguments, ContrastModel, average_with_views
from ctta.optim import OptimizerFactory
from ctta.source_stats import SourceStats


class SANTA(ContrastModel):
    """Learn from predictions that the source confirms, and pull features toward the nearest class of the source.

    The cross-entropy has the student's prediction, of the image and of its view, as the target, and the frozen
    source's inside the logarithm. The contrast pulls each image, its view and its nearest prototype together.

    Args:
        net: A network for images with normalization layers of any kind, whose scales and shifts are trained.
        source_stats: Statistics of source images, ``ctta.source_stats(net, batches, labels)``; the reference has the
            labels of all training images.
        optimizer: A factory of the optimizer. The default is the setting for CIFAR; that for ImageNet is
            ``partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)``.
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
    >>> logits = SANTA(net, source_stats=stats)(torch.rand(16, 3, 8, 8))

    Reference: Chakrabarty, Sreenivas and Biswas, "SANTA: source anchoring network and target alignment for continual
    test time adaptation", TMLR 2023.
    """

    info = MethodInfo(
        "SANTA",
        paper="Chakrabarty et al., TMLR 2023",
        trains="norm layers and projector",
        forward_passes="2 + views",
        backward_passes=1,
        num_networks=2,
        needs_source_data=True,
        labels_pixels=False,
        starts_random=True,
    )
    checks_values_late = True

    def __init__(
        self,
        net: nn.Module,
        *,
        source_stats: SourceStats | None = None,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        **contrast: Unpack[ContrastArguments],
    ) -> None:
        super().__init__(net, source_stats=source_stats, **contrast)
        self.student = self.copy_of_source()
        self.train_norms_(self.student)
        self.optimize(nn.ModuleList([self.student, self.projector]), optimizer)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        features, logits = self.compute_views(self.student, x)
        with torch.no_grad():
            anchor = self.source(x)
        loss = average_with_views([cross_entropy(anchor, each) for each in logits]) + self.contrast(features)
        self.minimize(loss, confidence=confidence(logits[0].detach()).mean())
        return logits[0]

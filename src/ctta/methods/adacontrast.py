"""AdaContrast: labels refined by nearest neighbors, and contrast with a queue of past images."""

from functools import partial
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutBatchStats
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.core.parallel import change_call, read_flags
from ctta.core.state import snapshot_buffers
from ctta.core.validation import check_each, check_fraction, check_integer, check_positive
from ctta.functional import at_least_float32, confidence, ema_update_, marginal_entropy
from ctta.methods.parts.contrast import PastImages, draw_exactly
from ctta.nn import attach_norm_hooks_
from ctta.nn.heads import features_and_logits, head_weight
from ctta.nn.running import RunningStatistics
from ctta.optim import OptimizerFactory
from ctta.views import Views, image_views


class AdaContrast(AdaptiveModel):
    """Learn the classes of nearest neighbors in the stream, contrast views with past images, then predict.

    Predictions are made after the step, with running statistics of BatchNorm that follow the views.

    Args:
        net: A network for images in [0, 1], of which every parameter is trained.
        decay: The fraction of itself that the moving average of the student keeps.
        momentum: The fraction of a view in an update of BatchNorm's statistics.
        num_neighbors: How many of the nearest images in the bank vote for the class of an image.
        start_after: The number of images from which on neighbors vote; before, the network's own class counts.
        bank_size: The number of past images whose features and predictions are kept for the votes.
        queue_size: The number of past images that the contrast pushes away; at first random ones.
        temperature: Divides the cosine similarities of the contrast.
        labels_first: Whether labels enter the queue before the contrast and features after it, as in public code.
        weak: The view that is labeled. The reference flips and crops.
        strong: Two views: one learns the label, the other is its positive. The reference draws MoCo v2's per image.
        head: The name of the classifier; by default it is found.
        seed: The seed of the views and of the queue's first entries.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> logits = AdaContrast(net)(torch.rand(16, 3, 8, 8))

    Reference: Chen et al., "Contrastive test-time adaptation", CVPR 2022.
    """

    info = MethodInfo("AdaContrast", "Chen et al., CVPR 2022", "all weights", 5, 1, num_networks=3, labels_pixels=False)
    checks_values_late = True
    view_arguments = ("weak", "strong")
    check_settings: ClassVar = {"start_after": 6, "bank_size": 16, "queue_size": 16}

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.SGD, lr=2e-4, momentum=0.9, nesterov=True, weight_decay=1e-4),
        decay: float = 0.999,
        momentum: float = 0.1,
        num_neighbors: int = 10,
        start_after: int = 1024,
        bank_size: int = 16_384,
        queue_size: int = 16_384,
        temperature: float = 0.07,
        labels_first: bool = True,
        weak: Views = image_views(1, color=0.0, motion=0.25),
        strong: Views = image_views(2),
        head: str | None = None,
        **common: Unpack[CommonWithoutBatchStats],
    ) -> None:
        super().__init__(net, batch_stats=0.0, **common)
        check_each(check_fraction, decay=decay, momentum=momentum)
        check_positive("temperature", temperature)
        for count, views in ((1, weak), (2, strong)):
            draw_exactly(count, views, self.generator("views"))
        self.decay, self.momentum, self.temperature = decay, momentum, temperature
        self.num_neighbors, self.queue_size = check_integer("num_neighbors", num_neighbors, 1), queue_size
        self.start_after, self.bank_size = check_integer("start_after", start_after, 0), bank_size
        self.labels_first, self.weak, self.strong, self.head = labels_first, weak, strong, self.use_head(head)
        # The average is no teacher: it never predicts, and is not deployed.
        self.student, self.averaged = self.copy_of_source(), self.copy_of_source().requires_grad_(False)
        for network in (self.student, self.averaged):
            attach_norm_hooks_(network, lambda _: RunningStatistics(momentum, normalize_by="batch"))
        self.optimize(self.student, optimizer)
        self.past = PastImages(head_weight(self.source), bank_size, queue_size, self.generator("queue"))

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        read_flags()  # before statistics follow the batch
        restore_statistics = snapshot_buffers(self.student, self.averaged)
        (weak,) = draw_exactly(1, self.weak, self.generator("weak"))
        strong, other = draw_exactly(2, self.strong, self.generator("strong"))
        with change_call(is_tracking=True):
            with torch.no_grad():
                features, logits = features_and_logits(partial(weak, self.student), x)
            query, logits_of_query = features_and_logits(partial(strong, self.student), x)
            key, _ = features_and_logits(partial(other, self.averaged), x)
        self.require_image_logits(logits)
        labels = self.past.label(features, logits, self.num_neighbors, self.start_after)
        loss = F.cross_entropy(at_least_float32(logits_of_query), labels) - marginal_entropy(logits_of_query)
        loss = loss + self.past.contrast(query, key, labels, self.temperature, labels_first=self.labels_first)
        if self.minimize(loss, confidence=confidence(logits_of_query.detach()).mean()):
            with change_call(is_tracking=True):
                features, logits = features_and_logits(partial(weak, self.averaged), x)
            self.past.add_(key, labels, features, logits)
            ema_update_(self.averaged, self.student, self.decay)  # before the keys of the next step
        else:
            restore_statistics()
        torch.clear_autocast_cache()  # or a surrounding autocast would predict with the weights before the update
        prediction: Tensor = self.student(x)
        return prediction

"""PeTTA: RoTTA whose learning slows down as its features leave the source's, for streams without end."""

from functools import partial
from typing import Literal, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutBatchStats
from ctta.core.model import MethodInfo
from ctta.core.parallel import change_call, current_reducer, replicated
from ctta.core.validation import check_choice
from ctta.functional import cross_entropy, ema_update_, feature_divergence, pair_trained, symmetric_cross_entropy
from ctta.methods.parts.memory import MemoryModel, TimelyMemory
from ctta.nn import attach_norm_hooks_
from ctta.nn.heads import features_and_logits
from ctta.nn.running import RunningStatistics
from ctta.optim import OptimizerFactory
from ctta.source_stats import SourceStats
from ctta.views import Views, check_views, draw_views, image_views


class PeTTA(MemoryModel):
    """RoTTA's memory and statistics, with an update per batch, held near the source by how far the teacher is from it.

    Args:
        net: A network with normalization layers of any kind, whose scales and shifts are trained.
        source_stats: ``ctta.source_stats(net, batches, batch_stats=0)`` of held-out source images.
        memory_size: The number of images in the memory.
        momentum: The fraction of the memory in an update of BatchNorm's statistics.
        teacher_rate: The fraction of the student in an update of the teacher, at no divergence.
        regularization: The weight of the cosine to the source's weights, at full divergence; 1 for DomainNet.
        loss: ``"symmetric"`` for CIFAR; ``"cross_entropy"`` for ImageNet-C and DomainNet.
        divergence: ``"official"`` averages over classes before the exponential, as the code; ``"paper"`` after it.
        head: The name of the classifier; by default it is found.
        views: The views of the memory that the student sees. The default expects images in [0, 1].
        seed: The seed of the random views.

    Reference: Hoang et al., "Persistent test-time adaptation in recurring testing scenarios", NeurIPS 2024.
    """

    info = MethodInfo("PeTTA", "Hoang et al., NeurIPS 2024", "norm layers", "1 + 4", 1, 4, needs_source_data=True)
    checks_values_late = True
    class_means: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        source_stats: SourceStats | None = None,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        memory_size: int = 64,
        momentum: float = 0.05,
        teacher_rate: float = 1e-3,
        regularization: float = 10.0,
        loss: Literal["symmetric", "cross_entropy"] = "symmetric",
        divergence: Literal["official", "paper"] = "official",
        head: str | None = None,
        views: Views = image_views(1),
        **common: Unpack[CommonWithoutBatchStats],
    ) -> None:
        super().__init__(net, batch_stats=0.0, **common)
        check_choice("loss", loss, ("symmetric", "cross_entropy"))
        check_choice("divergence", divergence, ("official", "paper"))
        check_views(views)
        stats = self.use_source_stats(source_stats, "class_counts", "class_means", "class_variances")
        self.register_buffer("class_means", stats["class_means"].clone())
        self.memory, self.memory_size, self.momentum = TimelyMemory(memory_size), memory_size, momentum
        self.teacher_rate, self.regularization = teacher_rate, regularization
        self.loss, self.divergence, self.head, self.views = loss, divergence, self.use_head(head), views
        self.student, self.teacher, self.anchor = (self.copy_of_source() for _ in range(3))
        networks = nn.ModuleList([self.teacher, self.anchor]).requires_grad_(False).append(self.student)
        attach_norm_hooks_(networks, lambda _: RunningStatistics(momentum))
        self.train_norms_(self.student)
        self.optimize(self.student, optimizer)

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        return features_and_logits(self.teacher, x)[1]

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        (features, logits), batch = features_and_logits(self.teacher, x), current_reducer()
        features = batch.gather(features.detach().flatten(2).mean(2) if features.ndim > 2 else features)
        images, predictions = batch.gather(x), batch.gather(logits.detach())
        has_variance = self.source_stats["class_counts"] > 1  # of features on source images
        with replicated():
            (arrivals,), (has_variance,) = self.memory.read_predictions([predictions], has_variance)
            classes, device = arrivals.labels.unique(), features.device
            rows = [(arrivals.labels == each).nonzero().squeeze(1).to(device) for each in classes]
            means = torch.stack([features[each].mean(0) for each in rows]).to(self.class_means)
            known = classes[has_variance[classes]].to(device)
            update = partial(self._update, classes.to(device), known, means)
            self.remember_and_update_(images, arrivals, self.generator("memory"), update)
        return logits

    def _update(self, classes: Tensor, known: Tensor, means: Tensor) -> bool:
        stats = self.source_stats
        counts = stats["class_counts"][known].unsqueeze(1)
        unbiased = stats["class_variances"][known] * counts / (counts - 1)  # as in the authors' code
        divergence = feature_divergence(self.class_means[known], stats["class_means"][known], unbiased, self.divergence)
        images, views = self.memory.recall()[0], draw_views(self.views, self.generator("views"))
        with change_call(is_tracking=True):
            target, clean, anchor = self.teacher(images), self.student(images), self.anchor(images)
            seen = [view(self.student, images) for view in views] or [clean]
        if self.loss == "symmetric":
            loss = torch.stack([symmetric_cross_entropy(each, target) for each in (clean, *seen)]).mean()
        else:
            loss = torch.stack([cross_entropy(each, target) for each in seen]).mean()
        loss = loss + torch.stack([cross_entropy(each, anchor) for each in seen]).mean()
        pairs = pair_trained(self.student, self.source)
        cosine = torch.stack([F.cosine_similarity(new.flatten(), old.flatten(), dim=0) for new, old in pairs]).mean()
        is_updated = self.minimize(loss - divergence * self.regularization * cosine)
        if is_updated:
            ema_update_(self.teacher, self.student, 1 - (1 - divergence) * self.teacher_rate)
            self.class_means[classes] = self.class_means[classes].lerp(means, 0.05)
        return is_updated

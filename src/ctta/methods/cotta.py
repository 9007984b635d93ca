"""CoTTA: continual test-time adaptation by an averaged teacher, averaged views and stochastic restoring."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from ctta.base import AdaptiveModel
from ctta.functional import (
    at_least_float32,
    confidence,
    cross_entropy,
    ema_update_,
    hard_cross_entropy,
    stochastic_restore_,
    symmetric_cross_entropy,
)
from ctta.norms import uses_batch_statistics
from ctta.optim import OptimizerFactory
from ctta.parallel import current_reducer
from ctta.surgery import Output
from ctta.validation import check_choice, check_fraction, check_views_at_once
from ctta.views import (
    Average,
    Views,
    average_views,
    check_images,
    check_views,
    draw_views,
    fast_image_views,
    image_views,
    multiscale_flip,
)

LOSSES = {"cross_entropy": cross_entropy, "symmetric": symmetric_cross_entropy, "hard": hard_cross_entropy}

#: The authors' settings for segmentation, Cityscapes to ACDC.
OFFICIAL_SEGMENTATION: Mapping[str, Any] = {
    "optimizer": partial(torch.optim.Adam, lr=7.5e-6),  # 6e-5 divided by eight: a batch is one scene and not eight
    "decay": 0.999,
    "restore": 0.01,
    "threshold": 0.69,
    "views": multiscale_flip(),
    "gate": "element",
    "average": "probabilities",
    "predict_with": "refined",
    "loss": "hard",
    "batch_stats": 0.0,
}


class CoTTA(AdaptiveModel):
    """A student learns from its own moving average, the teacher, and forgets its way back to the source.

    The teacher's answer is the target; where the source is unsure of an input, the teacher's mean answer over
    augmented views is. After each step a few weights at random go back to the source's values.
    The defaults are the authors' code for CIFAR10-C; :meth:`official_segmentation` is their code for street scenes,
    :meth:`paper` the text of the paper, and :meth:`fast` needs a quarter of the views.

    Args:
        net: any network; every parameter that requires grad is trained and restored.
        optimizer: factory; ImageNet's in the authors' code is
            ``partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)``.
        decay: how much of itself the teacher keeps at each step; 0 makes it the student.
        restore: probability for each weight to go back to the source's value; 0 never.
        threshold: views are averaged where the source's confidence is below; <= 0 never, > 1 always.
            See :func:`ctta.calibrate_threshold`.
        views: what to average over, () for nothing; see :mod:`ctta.views`.
        gate: compare the mean confidence of the ``"batch"`` with the threshold, or that of each ``"element"``
            (an image, or a pixel where the answer is dense).
        average: the mean over views of ``"logits"`` or of ``"probabilities"``.
        predict_with: answer with the ``"refined"`` target or with the ``"teacher"``'s direct prediction.
        loss: ``"cross_entropy"``, ``"symmetric"`` (half of it each way) or ``"hard"`` (against the target's argmax).
        views_at_once: how many views go through the teacher together: more memory, and less time where single ones
            leave the device idle. Each keeps statistics of its own.
        batch_stats: share of the batch in BatchNorm's statistics, in student, teacher and source.
        seed: of the draws of views and of restored weights.
        output: where the logits are in what the network returns, if not found by itself.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> model = CoTTA(net, views=image_views(4))
    >>> logits = model(torch.rand(16, 3, 8, 8))    # predicts and adapts

    Reference: Wang, Fink, Van Gool, Dai, "Continual test-time domain adaptation", CVPR 2022.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        decay: float = 0.999,
        restore: float = 0.01,
        threshold: float = 0.92,
        views: Views = image_views(32),
        gate: Literal["batch", "element"] = "batch",
        average: Average = "logits",
        predict_with: Literal["refined", "teacher"] = "refined",
        loss: Literal["cross_entropy", "symmetric", "hard"] = "cross_entropy",
        views_at_once: int = 1,
        batch_stats: float = 1.0,
        seed: int = 0,
        output: Output = None,
    ) -> None:
        super().__init__(net, batch_stats=batch_stats, seed=seed, output=output)
        check_fraction("decay", decay)
        check_fraction("restore", restore)
        check_choice("gate", gate, ("batch", "element"))
        check_choice("average", average, ("logits", "probabilities"))
        check_choice("predict_with", predict_with, ("refined", "teacher"))
        check_choice("loss", loss, tuple(LOSSES))
        check_views(views)
        check_views_at_once(views_at_once, views, self.source)
        if threshold != threshold:
            raise ValueError("threshold must be a number, got NaN")
        self.decay, self.restore, self.threshold, self.views = decay, restore, threshold, views
        self.gate, self.average, self.predict_with, self.loss = gate, average, predict_with, loss
        self._views_at_once = views_at_once
        self.student = self.copy_of_source()
        self.teacher = self.copy_of_source().requires_grad_(False)
        self.optimize(self.student, optimizer)

    @classmethod
    def official(cls, net: nn.Module, **overrides: Any) -> Self:
        """The authors' code for CIFAR10-C, which made the published numbers: the defaults."""
        return cls(net, **overrides)

    @classmethod
    def official_segmentation(cls, net: nn.Module, **overrides: Any) -> Self:
        """The authors' code for segmentation: gate per pixel, hard labels, 14 views, no batch statistics.

        With ``loss="cross_entropy", predict_with="teacher"`` it is the text of the paper.
        """
        return cls(net, **{**OFFICIAL_SEGMENTATION, **overrides})

    @classmethod
    def paper(cls, net: nn.Module, **overrides: Any) -> Self:
        """The text of the paper: gate per input, probabilities averaged, the teacher's direct prediction."""
        return cls(net, **{"gate": "element", "average": "probabilities", "predict_with": "teacher"} | overrides)

    @classmethod
    def fast(cls, net: nn.Module, **overrides: Any) -> Self:
        """The authors' code with :func:`ctta.views.fast_image_views`, 8 views for their 32."""
        return cls(net, **{"views": fast_image_views()} | overrides)

    @property
    def views_at_once(self) -> int:
        """Fixed once built, like ``batch_stats``."""
        return self._views_at_once

    def check_input(self, x: Tensor) -> None:
        super().check_input(x)
        if self.threshold > 0:
            check_images(x, self.views)  # now, and not only once the gate opens

    def adapt_step(self, x: Tensor) -> Tensor:
        """Algorithm 1."""
        unsure, certainty = self.unsure_elements(x)
        direct = self.direct(x) if self.predict_with == "teacher" else None
        target = self.pseudo_label(x, unsure, direct)  # Eq. 3-4
        loss = LOSSES[self.loss](self.student(x), target).mean()  # Eq. 5
        if self.minimize(loss, confidence=certainty, augmented=unsure.float().mean()):
            ema_update_(self.teacher, self.student, self.decay)  # Eq. 2
            stochastic_restore_(self.student, self.source, self.restore, self.generator("restore"))  # Eq. 7-8
        return target if direct is None else direct

    def predict_step(self, x: Tensor) -> Tensor:
        if self.predict_with == "teacher":
            return self.direct(x)
        return self.pseudo_label(x, self.unsure_elements(x)[0])

    @torch.no_grad()
    def unsure_elements(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where views are averaged: one truth value for the batch, or one per element; and the mean confidence."""
        if not self.views or self.threshold <= 0 or self.threshold > 1:
            # Known without asking the source.
            return torch.tensor(bool(self.views) and self.threshold > 1, device=x.device), None
        certainty = confidence(self.source(x))
        mean = certainty.mean()
        return (current_reducer().mean(mean) if self.gate == "batch" else certainty) < self.threshold, mean

    @torch.no_grad()
    def pseudo_label(self, x: Tensor, unsure: Tensor, direct: Tensor | None = None) -> Tensor:
        """The target y' as logits: the teacher's direct answer, and its mean over the views where unsure."""
        batch = current_reducer()
        everywhere = batch.all(unsure)
        if direct is None and not everywhere:
            direct = self.direct(x)
        if direct is not None and not batch.any(unsure):
            return direct
        if direct is None or everywhere:
            return self.refined(x)
        if uses_batch_statistics(self.teacher):
            refined = self.refined(x)  # every image shapes the statistics
        else:
            rows = unsure.reshape(len(unsure), -1).any(1)
            refined = direct.clone()
            with batch.subset(rows):
                if rows.any():  # the unsure ones may all be another process's
                    refined[rows] = self.refined(x[rows])
        return torch.where(unsure.unsqueeze(1), refined, direct)

    def direct(self, x: Tensor) -> Tensor:
        """The teacher's answer to the batch as it is."""
        return at_least_float32(self.teacher(x))

    def refined(self, x: Tensor) -> Tensor:
        """The teacher's mean answer over the views of this step."""
        views = draw_views(self.views, self.generator("views"))
        return average_views(views, self.teacher, x, self.average, self.views_at_once)

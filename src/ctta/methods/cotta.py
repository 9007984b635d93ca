"""CoTTA: continual test-time adaptation by a weight-averaged teacher, augmented views and stochastic restore."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal, Self, Unpack

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ctta.core.hyperparameters import CommonArguments
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.core.parallel import RecordedStatistics, change_call, current_reducer
from ctta.core.validation import check_choice, check_each, check_fraction, check_number, check_views_at_once
from ctta.errors import ConfigError
from ctta.functional import (
    at_least_float32,
    confidence,
    cross_entropy,
    ema_update_,
    hard_cross_entropy,
    stochastic_restore_,
    symmetric_cross_entropy,
)
from ctta.nn import uses_batch_statistics
from ctta.optim import OptimizerFactory
from ctta.views import (
    Average,
    Views,
    ViewsAtOnce,
    ViewWeights,
    average_views,
    check_images,
    check_views,
    choose_views_at_once,
    draw_views,
    fast_image_views,
    image_views,
    multiscale_flip,
)

LOSSES = {"cross_entropy": cross_entropy, "symmetric": symmetric_cross_entropy, "hard": hard_cross_entropy}

#: The settings of the authors' code for segmentation, Cityscapes to ACDC.
OFFICIAL_SEGMENTATION: Mapping[str, Any] = {
    "optimizer": partial(torch.optim.Adam, lr=7.5e-6),  # 6e-5 / 8: a batch is one scene instead of eight
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

#: Settings for segmentation with any network, chosen by benchmarks/choose/streets_settings.py.
SEGMENTATION: Mapping[str, Any] = {
    **OFFICIAL_SEGMENTATION,
    "loss": "cross_entropy",
    "threshold": 0.9,
    "views": multiscale_flip((1.0, 1.25, 1.5, 1.75, 2.0)),
    "view_weights": "confidence",
    "batch_stats": 1.0,  # where there is BatchNorm
}

#: Settings by the name of the classmethod that builds them: :meth:`CoTTA.fast` is the name ``cotta_fast``.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "official": {"batch_stats": 1.0},
    "official_segmentation": OFFICIAL_SEGMENTATION,
    "segmentation": SEGMENTATION,
    "paper": {"gate": "element", "average": "probabilities", "predict_with": "teacher"},
    "fast": {"views": fast_image_views()},
    "faster": {
        "views": fast_image_views(),
        "gate": "element",
        "gate_with": "teacher",
        "threshold": 0.65,
        "views_for": "uncertain",
    },
}
#: The part of the uncertain images in the statistics of their views, where the rest are those of the whole batch.
#: Chosen with the threshold of "faster" by benchmarks/choose/uncertain_views.py.
UNCERTAIN_FRACTION = 0.5


class CoTTA(AdaptiveModel):
    """Train a student on its moving average, the teacher, and restore random weights to the source.

    The teacher's prediction is the target; where the source is not confident, the target is the teacher's mean
    prediction over augmented views. After each step a few random weights are restored to the source's values.
    The defaults are the authors' code for CIFAR10-C, except for batches of fewer than 16 images. See
    :meth:`official_segmentation` for their code for street scenes, :meth:`segmentation` for settings that suit the
    network, :meth:`paper` for the text of the paper, :meth:`fast` for a quarter of the views and :meth:`faster` for
    views of uncertain images only.

    Args:
        net: Any network; every parameter that requires grad is trained and restored.
        optimizer: A factory of the optimizer. The default is the authors' for CIFAR; theirs for ImageNet is
            ``partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)``.
        decay: The fraction of itself that the teacher keeps at each step; 0 makes it equal to the student. The default
            is the paper's for all tasks.
        restore: The probability of each weight to be restored at each step; 0 for never. The default is the paper's;
            the authors' code for ImageNet has 0.001.
        threshold: Views are averaged where the source's confidence is lower; <= 0 for never, > 1 for always. The
            default is for CIFAR10-C (CIFAR100-C 0.72, ImageNet-C 0.1); see :func:`ctta.calibrate_threshold` for others.
        views: What to average over, () for nothing. The default of 32 random views is the authors'; see
            :mod:`ctta.views`.
        gate: Compare the threshold with the mean confidence of the ``"batch"`` (the authors' code), or with that of
            each ``"element"``, an image or a pixel (the paper).
        gate_with: Whose confidence that is: that of the ``"source"``, as in paper and code, or of the ``"teacher"``'s
            direct prediction, which saves the source's pass.
        views_for: With the gate ``"element"`` and batch statistics, which need every image, ``"all"`` images go
            through the views. ``"uncertain"`` images only are faster but an approximation: half of the statistics of
            their views are those of the whole batch, without a view.
        average: The mean over views of ``"logits"`` (the authors' code) or of ``"probabilities"`` (the paper).
        view_weights: In that mean, views count ``"equal"`` as in paper and code, or by the teacher's ``"confidence"``
            in each for the image at hand: a scale at which the network is unsure then hardly counts.
        predict_with: Return the ``"refined"`` target (the authors' code) or the ``"teacher"``'s direct prediction
            (the paper).
        loss: ``"cross_entropy"`` (the paper), ``"symmetric"`` (the mean of both directions, the authors' code for
            ImageNet) or ``"hard"`` (against the target's argmax, the authors' code for segmentation).
        views_at_once: How many views go through the teacher together, each with its own batch statistics. The default
            of 1 needs the least memory; more are faster where one view leaves the device idle. ``"auto"`` chooses by
            the size of the batch, see :func:`ctta.views.choose_views_at_once`.
        batch_stats: The fraction of the batch in BatchNorm's statistics, in student, teacher and source. The default
            ``"auto"`` uses only the batch from 16 images on, and blends fewer with the source's statistics; 1 for only
            the batch, as in the authors' code for classification.
        seed: The seed of the random views and of the restored weights.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> model = CoTTA(net, views=image_views(4))
    >>> logits = model(torch.rand(16, 3, 8, 8))    # predicts and adapts

    Reference: Wang, Fink, Van Gool, Dai, "Continual test-time domain adaptation", CVPR 2022.
    """

    info = MethodInfo(
        "CoTTA",
        paper="Wang et al., CVPR 2022",
        trains="all weights",
        forward_passes="3, or 2 + views",
        backward_passes=1,
        num_networks=3,
    )
    checks_values_late = True
    check_settings: ClassVar = {"views": image_views(2)}
    presets = PRESETS
    view_arguments = ()  # checked below

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
        gate_with: Literal["source", "teacher"] = "source",
        views_for: Literal["all", "uncertain"] = "all",
        average: Average = "logits",
        view_weights: ViewWeights = "equal",
        predict_with: Literal["refined", "teacher"] = "refined",
        loss: Literal["cross_entropy", "symmetric", "hard"] = "cross_entropy",
        views_at_once: ViewsAtOnce = 1,
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(net, **common)
        check_each(check_fraction, decay=decay, restore=restore)
        check_choice("gate", gate, ("batch", "element"))
        check_choice("gate_with", gate_with, ("source", "teacher"))
        check_choice("views_for", views_for, ("all", "uncertain"))
        if views_for == "uncertain" and gate == "batch":
            raise ConfigError(
                'views_for="uncertain" needs gate="element": otherwise a whole batch is uncertain, or none'
            )
        check_choice("average", average, ("logits", "probabilities"))
        check_choice("view_weights", view_weights, ("equal", "confidence"))
        check_choice("predict_with", predict_with, ("refined", "teacher"))
        check_choice("loss", loss, tuple(LOSSES))
        check_views(views)
        check_views_at_once(views_at_once, views, self.source)
        check_number("threshold", threshold)
        if restore and any(policy.name == "restore" for policy in self.policies):
            raise ConfigError("CoTTA restores weights itself: give restore=0 to do it by a policy, or leave that out")
        self.decay, self.restore, self.threshold, self.views = decay, restore, threshold, views
        self.gate, self.average, self.predict_with, self.loss = gate, average, predict_with, loss
        self.view_weights, self.gate_with, self.views_for = view_weights, gate_with, views_for
        self._views_at_once = views_at_once
        self.student = self.copy_of_source()
        self.teacher = self.copy_of_source().requires_grad_(False)
        self.optimize(self.student, optimizer)

    @classmethod
    def official(cls, net: nn.Module, **overrides: Any) -> Self:
        """Build the authors' code for CIFAR10-C, which produced the published numbers.

        These are the defaults, except that every batch is normalized by its own statistics, however small it is.

        Args:
            net: The network.
            **overrides: Keyword arguments that differ.

        Returns:
            The model.
        """
        return cls(net, **{**PRESETS["official"], **overrides})

    @classmethod
    def official_segmentation(cls, net: nn.Module, **overrides: Any) -> Self:
        """Build the authors' code for Cityscapes to ACDC: :data:`OFFICIAL_SEGMENTATION`.

        It has a gate per pixel, hard labels, 14 views and no batch statistics. The constants were read from public
        derivatives of the authors' code, which is no longer online. With ``loss="cross_entropy",
        predict_with="teacher"`` it is the text of the paper.

        Args:
            net: The network; its logits are resized to the input.
            **overrides: Keyword arguments that differ.

        Returns:
            The model.
        """
        return cls(net, **{**PRESETS["official_segmentation"], **overrides})

    @classmethod
    def segmentation(cls, net: nn.Module, **overrides: Any) -> Self:
        """Build CoTTA for segmentation with settings that suit the network; its ``repr`` shows what was picked.

        It differs from :meth:`official_segmentation` in five settings: the views have scales from 1 to 2 instead of 0.5
        to 2, they count by how sure the network is at each (``view_weights="confidence"``), they are averaged where the
        source's confidence is below 0.9 instead of 0.69, labels are soft (``loss="cross_entropy"``), and BatchNorms
        normalize by the statistics of the scene (``batch_stats=1``). A network without BatchNorm keeps its norms as
        they are (0).

        Args:
            net: The network; its logits are resized to the input.
            **overrides: Keyword arguments that differ.

        Returns:
            The model.
        """
        has_batch_norm = any(isinstance(module, _BatchNorm) for module in net.modules())
        picked: dict[str, Any] = {} if has_batch_norm else {"batch_stats": 0.0}
        return cls(net, **{**PRESETS["segmentation"], **picked, **overrides})

    @classmethod
    def paper(cls, net: nn.Module, **overrides: Any) -> Self:
        """Build the text of the paper: gate per input, probabilities averaged, the teacher's direct prediction.

        Learning rate, decay, restore probability, threshold and views are the defaults: paper and code agree on them
        for CIFAR10-C.

        Args:
            net: The network.
            **overrides: Keyword arguments that differ.

        Returns:
            The model.
        """
        return cls(net, **{**PRESETS["paper"], **overrides})

    @classmethod
    def fast(cls, net: nn.Module, **overrides: Any) -> Self:
        """Build the authors' code with 8 balanced views instead of 32, see :func:`ctta.views.fast_image_views`.

        The views were chosen on hold-out corruptions by ``benchmarks/choose/fast_views.py``.

        Args:
            net: The network.
            **overrides: Keyword arguments that differ.

        Returns:
            The model.
        """
        return cls(net, **{**PRESETS["fast"], **overrides})

    @classmethod
    def faster(cls, net: nn.Module, **overrides: Any) -> Self:
        """Build :meth:`fast` with views of uncertain images only: those of which the teacher is less than 0.65 sure.

        It needs about half the time of :meth:`fast`. The settings were chosen on hold-out corruptions by
        ``benchmarks/choose/uncertain_views.py``; docs/how-to/speed.md has the errors.

        Args:
            net: The network.
            **overrides: Keyword arguments that differ.

        Returns:
            The model.
        """
        return cls(net, **{**PRESETS["faster"], **overrides})

    @property
    def views_at_once(self) -> ViewsAtOnce:
        """How many views go through the teacher together; read-only, because forks share layers that depend on it."""
        return self._views_at_once

    @override
    def check_input(self, x: Tensor) -> None:
        super().check_input(x)
        if self.threshold > 0:
            check_images(x, self.views)  # at once, and not only when the gate opens

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        """Run Algorithm 1 of the paper."""
        prediction, target, is_uncertain, gate_confidence = self._predict_and_refine(x)  # Eq. 3-4
        loss = LOSSES[self.loss](self.student(x), target).mean()  # Eq. 5
        if self.minimize(loss, confidence=gate_confidence, augmented=is_uncertain.float().mean()):
            # A small batch is a part of a step: as many as make a whole one keep and restore what that would.
            decay, restore = self.decay**self.step_scale, self.restore * self.step_scale
            ema_update_(self.teacher, self.student, decay)  # Eq. 2
            stochastic_restore_(self.student, self.source, restore, self.generator("restore"))  # Eq. 7-8
        return prediction

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        if self.predict_with == "teacher":
            return self._predict_directly(x)[0]
        return self._predict_and_refine(x)[0]

    def _predict_and_refine(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the answer, the target y', where that is averaged over views, and the mean confidence of the gate."""
        direct, recorded = None, None
        if self.predict_with == "teacher" or self._asks_teacher or self.views_for == "uncertain":
            direct, recorded = self._predict_directly(x)
        is_uncertain, mean_confidence = self._find_uncertain(x, direct)
        target = self._compute_target(x, is_uncertain, direct, recorded)
        answer = direct if direct is not None and self.predict_with == "teacher" else target
        return answer, target, is_uncertain, mean_confidence

    @property
    def _asks_teacher(self) -> bool:
        return self.gate_with == "teacher" and bool(self.views) and 0 < self.threshold <= 1

    @torch.no_grad()
    def _find_uncertain(self, x: Tensor, direct: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return where to average over views, as one flag or one per element, and the mean confidence of the gate."""
        if not self.views or self.threshold <= 0 or self.threshold > 1:
            # Decided without a network.
            return torch.tensor(bool(self.views) and self.threshold > 1, device=x.device), None
        per_element = confidence(direct if self._asks_teacher and direct is not None else self.source(x))
        mean = per_element.mean()
        return (current_reducer().mean(mean) if self.gate == "batch" else per_element) < self.threshold, mean

    @torch.no_grad()
    def _compute_target(
        self, x: Tensor, is_uncertain: Tensor, direct: Tensor | None, recorded: RecordedStatistics | None
    ) -> Tensor:
        """Return the target y' as logits: the direct prediction, or the mean over views where uncertain."""
        batch = current_reducer()
        is_all_uncertain = batch.all(is_uncertain)
        if direct is None and not is_all_uncertain:
            direct, recorded = self._predict_directly(x)
        is_one_flag = is_uncertain.ndim == 0
        if direct is not None and not (is_all_uncertain if is_one_flag else batch.any(is_uncertain)):
            return direct
        if direct is None or is_all_uncertain:
            return self._predict_over_views(x)
        if uses_batch_statistics(self.teacher) and self.views_for == "all":
            refined = self._predict_over_views(x)  # the statistics need every image
        else:
            rows = is_uncertain.reshape(len(is_uncertain), -1).any(1)
            refined = direct.clone()
            blend = {"fixed_statistics": recorded, "fraction": UNCERTAIN_FRACTION} if recorded else {}
            with batch.subset(rows), change_call(**blend):
                if rows.any():  # all uncertain rows may be on other processes
                    refined[rows] = self._predict_over_views(x[rows])
        return torch.where(is_uncertain.unsqueeze(1), refined, direct)

    def _predict_directly(self, x: Tensor) -> tuple[Tensor, RecordedStatistics | None]:
        """Return the teacher's prediction for the batch as it is, and its statistics if the views need them."""
        if self.views_for == "all":
            return at_least_float32(self.teacher(x)), None
        recorded: RecordedStatistics = {}
        with change_call(record=recorded):
            return at_least_float32(self.teacher(x)), recorded

    def _predict_over_views(self, x: Tensor) -> Tensor:
        """Return the teacher's mean prediction over the views of this step."""
        views = draw_views(self.views, self.generator("views"))
        at_once = choose_views_at_once(self.views_at_once, views, self.teacher, x)
        return average_views(views, self.teacher, x, self.average, at_once, self.view_weights)

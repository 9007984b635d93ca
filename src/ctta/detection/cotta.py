"""CoTTA for boxes: an averaged teacher, views merged by weighted boxes, and thresholds for each class."""

from collections.abc import Sequence
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonArguments
from ctta.core.model import MethodInfo
from ctta.core.parallel import read
from ctta.core.validation import check_each, check_fraction, check_positive
from ctta.detection.boxes import Boxes, fuse_boxes, move_boxes, pack, select_boxes, unpack
from ctta.detection.detector import Detector
from ctta.detection.model import DetectionModel
from ctta.errors import ConfigError
from ctta.functional import ema_update_, stochastic_restore_
from ctta.nn.surgery import resize
from ctta.optim import OptimizerFactory

#: The threshold of a class is this times the root of its mean score (AMROD).
THRESHOLD_FACTOR = 1.3
#: The threshold that every class starts from, and the highest one (AMROD).
FIRST_THRESHOLD, MAX_THRESHOLD = 0.8, 0.9
#: Boxes with lower scores have no part in the mean score of a class (AMROD).
MIN_COUNTED_SCORE = 0.1


class BoxCoTTA(DetectionModel):
    """Train a student on the boxes of its moving average, the teacher, and restore random weights to the source.

    The teacher answers, by default from the image and its mirror image, whose boxes are merged. Of its boxes those
    above the threshold of their class are the truth that the student learns from, on images of other brightness,
    contrast and saturation. A batch without such boxes teaches nothing. The thresholds follow the mean scores of the
    classes, as in AMROD.

    Args:
        net: The detector, or a network that :func:`ctta.detection.as_detector` knows; every parameter that requires
            grad is trained and restored.
        optimizer: A factory of the optimizer; the default is AMROD's for Cityscapes.
        decay: The fraction of itself that the teacher keeps at each step.
        restore: The probability of each weight to be restored at each step; 0 for never.
        flip: Whether the teacher also looks at mirrored images.
        scales: Factors of further sizes that the teacher looks at.
        min_overlap: The overlap from which on boxes of several views are one, see :func:`ctta.detection.fuse_boxes`.
        min_threshold: The lowest threshold of a class.
        threshold_decay: The fraction of itself that a threshold keeps at each step.
        jitter: How far brightness, contrast and saturation of the student's images vary; 0 for the images as they are.
        num_classes: Number of labels; None to ask the detector.
        batch_stats: The fraction of the batch in BatchNorm's statistics, in student and teacher.

    References: Wang et al., "Continual test-time domain adaptation", CVPR 2022; Cao et al., "Exploring test-time
    adaptation for object detection in continually changing environments", 2024.
    """

    info = MethodInfo(
        "CoTTA for boxes", trains="all weights", forward_passes="1 + views", backward_passes=1, num_networks=3
    )
    student: Detector
    thresholds: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.SGD, lr=1e-3, momentum=0.9, weight_decay=1e-4),
        decay: float = 0.9996,
        restore: float = 1e-3,
        flip: bool = True,
        scales: Sequence[float] = (),
        min_overlap: float = 0.55,
        min_threshold: float = 0.7,
        threshold_decay: float = 0.95,
        jitter: float = 0.4,
        num_classes: int | None = None,
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(net, **common)
        fractions = {"decay": decay, "restore": restore, "min_overlap": min_overlap, "jitter": jitter}
        check_each(check_fraction, **fractions, min_threshold=min_threshold, threshold_decay=threshold_decay)
        for scale in scales:
            check_positive("scales", scale)
        if restore and any(policy.name == "restore" for policy in self.policies):
            raise ConfigError("CoTTA restores weights itself: give restore=0 to do it by a policy, or leave that out")
        self.decay, self.restore, self.flip, self.scales = decay, restore, flip, tuple(scales)
        self.min_overlap, self.min_threshold, self.threshold_decay = min_overlap, min_threshold, threshold_decay
        self.jitter, self.num_classes = jitter, num_classes
        self.register_buffer("thresholds", torch.full((self.count_classes(num_classes),), FIRST_THRESHOLD))
        self.student = self.copy_of_detector()
        self.teacher = self.copy_of_detector().requires_grad_(False)
        self.optimize(self.student, optimizer)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        answer = self.predict_step(x)
        on_host, thresholds = read(answer, self.thresholds)
        found = unpack(on_host)
        thresholds = self._move_thresholds(thresholds, found)
        targets = [select_boxes(each, each["scores"] > thresholds[each["labels"]].to(x.dtype)) for each in found]
        if any(len(each["boxes"]) for each in targets):
            targets = move_boxes(targets, x.device)
            loss = self.student.loss(self._recolor(x), targets)
            if not self.minimize(loss, confidence=_mean_score(targets)):
                return answer
            decay, restore = self.decay**self.step_scale, self.restore * self.step_scale
            ema_update_(self.teacher, self.student, decay)
            stochastic_restore_(self.student, self.source, restore, self.generator("restore"))
        self.thresholds.copy_(thresholds)
        return answer

    @override
    @torch.no_grad()
    def predict_step(self, x: Tensor) -> Tensor:
        answers: list[Tensor] = [self.teacher(x)]
        views = [(1.0, 1.0, False)]
        for scale in (1.0, *self.scales):
            scaled = x if scale == 1 else resize(x, [max(1, round(side * scale)) for side in x.shape[2:]])
            for is_flipped in (False, True) if self.flip else (False,):
                if scale == 1 and not is_flipped:
                    continue
                answers.append(self.teacher(scaled.flip(3) if is_flipped else scaled))
                views.append((x.shape[3] / scaled.shape[3], x.shape[2] / scaled.shape[2], is_flipped))
        if len(answers) == 1:
            (answer,) = answers
            return answer
        found = [
            [_undo(each, *view, width=x.shape[3]) for each in unpack(answer)]
            for answer, view in zip(read(*answers), views, strict=True)
        ]
        merged = [fuse_boxes(each, self.min_overlap) for each in zip(*found, strict=True)]
        packed = pack(merged, self.source.max_detections)
        return packed.to(x.device, non_blocking=True)

    @torch.no_grad()
    def _move_thresholds(self, thresholds: Tensor, found: Sequence[Boxes]) -> Tensor:
        scores, labels = (torch.cat([each[name] for each in found]) for name in ("scores", "labels"))
        if len(labels) and int(labels.max()) >= len(thresholds):
            known = len(thresholds)
            raise ConfigError(f"the detector found class {int(labels.max())} of {known} classes: give num_classes=...")
        scores, labels = scores[scores > MIN_COUNTED_SCORE], labels[scores > MIN_COUNTED_SCORE]
        sums = torch.zeros_like(thresholds).index_add_(0, labels, scores.to(thresholds))
        counts = torch.bincount(labels, minlength=len(thresholds))
        level = THRESHOLD_FACTOR * (sums / counts.clamp_min(1)).sqrt()
        moved = thresholds.lerp(level, 1 - self.threshold_decay).clamp(self.min_threshold, MAX_THRESHOLD)
        return torch.where(counts > 0, moved, thresholds)

    def _recolor(self, x: Tensor) -> Tensor:
        """Return images of other brightness, contrast and saturation."""
        if self.jitter == 0:
            return x
        draw = torch.rand(3, len(x), 1, 1, 1, generator=self.generator("jitter"))
        brightness, contrast, saturation = 1 + self.jitter * (2 * draw.to(x) - 1)
        x = x * brightness
        x = torch.lerp(x.mean((1, 2, 3), keepdim=True), x, contrast)
        return torch.lerp(x.mean(1, keepdim=True), x, saturation).clamp(0, 1)


def _undo(found: Boxes, across: float, down: float, is_flipped: bool, *, width: int) -> Boxes:
    """Return boxes of a scaled and perhaps mirrored view in pixels of the image."""
    left, top, right, bottom = (found["boxes"] * found["boxes"].new_tensor([across, down] * 2)).unbind(1)
    if is_flipped:
        left, right = width - right, width - left
    return Boxes(boxes=torch.stack([left, top, right, bottom], 1), labels=found["labels"], scores=found["scores"])


def _mean_score(targets: Sequence[Boxes]) -> Tensor:
    return torch.cat([each["scores"] for each in targets]).mean()

"""Policies that decide from which batches a method learns."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.model import AdaptiveModel
from ctta.core.parallel import current_reducer, read
from ctta.core.updates import Policy
from ctta.core.validation import check_fraction, check_integer, check_positive
from ctta.errors import ConfigError
from ctta.functional import confidence, entropy
from ctta.policies.restoring import PolicyState


@dataclass(frozen=True, repr=False)
class UpdateWhen(Policy):
    """Learn from every n-th batch only, and from those of a sudden rise of the entropy; predict the others.

    A batch without an update costs what ``predict`` costs, for most methods one forward pass. Learning from few
    batches is how SNAP saves time; its memory of representative images is not part of this policy. To learn also where
    a quantity exceeds its moving average by a factor is the test of Yoo et al. (CVPR 2024), there of the distance of
    features. Methods that predict after their update predict as if there had been one.

    Attributes:
        every: The period, in batches; 1 for no limit.
        rise: The ratio of a batch's entropy to the moving average, above which it is learned from too; None for never.
            The predictions it needs cost a pass in batches that are learned from.
        max_change: The factor by which a batch's mean confidence may differ from its moving average, which starts at
            0.5. A batch beyond it, above or below, is not learned from; None for no limit. This is AMROD's test for
            detectors, with 1.4 or 1.5, ``every=1`` and a ``decay`` of 0.6 to 0.75. It costs the same pass.
        decay: The fraction of themselves that the averages keep.
    """

    name = "update_when"
    every: int = 10
    rise: float | None = None
    max_change: float | None = None
    decay: float = 0.99

    def __post_init__(self) -> None:
        check_integer("every", self.every, 1)
        check_fraction("decay", self.decay)
        if self.rise is not None:
            check_positive("rise", self.rise)
        if self.max_change is not None and not self.max_change > 1:
            raise ConfigError(f"max_change must be a factor above 1, got {self.max_change}")

    @override
    def start(self, model: AdaptiveModel) -> nn.Module:
        first = next(model.source.parameters())
        return PolicyState(first, {"num_waited": self.every - 1, "average": torch.inf, "confidence": 0.5})

    @override
    def wants_update(self, model: AdaptiveModel, state: PolicyState, x: Tensor, predict: Callable[[], Tensor]) -> bool:
        is_due = bool(state.number("num_waited") + 1 >= self.every)
        if self.max_change is None and (is_due or self.rise is None):
            return is_due
        level, sureness = _measure(predict())
        if self.max_change is not None:
            change = float(sureness / state.number("confidence"))
            if not 1 / self.max_change <= change <= self.max_change:
                return False
        return is_due or (self.rise is not None and bool(level > self.rise * state.number("average")))

    @override
    def after_step(self, model: AdaptiveModel, state: PolicyState, x: Tensor, logits: Tensor) -> None:
        step = model.last_step
        if step is not None and step.skipped:
            return  # a step that failed leaves no trace, and the next batch is due
        waited, average = state.number("num_waited"), state.number("average")
        # Nor is the wait over if nothing was found to learn from.
        has_waited = model.is_skipping or (step is not None and step.is_empty)
        waited.copy_(waited + 1 if has_waited else torch.zeros_like(waited))
        if self.rise is None and self.max_change is None:
            return
        latest, sureness = _measure(model.returned_logits)
        if latest.isfinite():
            average.copy_(self.decay * average + (1 - self.decay) * latest if average.isfinite() else latest)
            state.number("confidence").mul_(self.decay).add_((1 - self.decay) * sureness)


def _measure(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean entropy and the mean confidence of predictions on the host."""
    mean = current_reducer().mean
    level, sureness = read(mean(entropy(logits).mean()), mean(confidence(logits).mean()))
    return level, sureness

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
from ctta.functional import entropy
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
        decay: The fraction of itself that the average keeps.
    """

    name = "update_when"
    every: int = 10
    rise: float | None = None
    decay: float = 0.99

    def __post_init__(self) -> None:
        check_integer("every", self.every, 1)
        check_fraction("decay", self.decay)
        if self.rise is not None:
            check_positive("rise", self.rise)

    @override
    def start(self, model: AdaptiveModel) -> nn.Module:
        first = next(model.source.parameters())
        return PolicyState(first, {"num_waited": self.every - 1, "average": torch.inf})

    @override
    def wants_update(self, model: AdaptiveModel, state: PolicyState, x: Tensor, predict: Callable[[], Tensor]) -> bool:
        if state.number("num_waited") + 1 >= self.every:
            return True
        return self.rise is not None and bool(_mean_entropy(predict()) > self.rise * state.number("average"))

    @override
    def after_step(self, model: AdaptiveModel, state: PolicyState, x: Tensor, logits: Tensor) -> None:
        step = model.last_step
        if step is not None and step.skipped:
            return  # a step that failed leaves no trace, and the next batch is due
        waited, average = state.number("num_waited"), state.number("average")
        # Nor is the wait over if nothing was found to learn from.
        has_waited = model.is_skipping or (step is not None and step.is_empty)
        waited.copy_(waited + 1 if has_waited else torch.zeros_like(waited))
        if self.rise is not None and (latest := _mean_entropy(model.returned_logits)).isfinite():
            average.copy_(self.decay * average + (1 - self.decay) * latest if average.isfinite() else latest)


def _mean_entropy(logits: Tensor) -> Tensor:
    """Return the mean entropy of predictions on the host."""
    return read(current_reducer().mean(entropy(logits).mean()))[0]

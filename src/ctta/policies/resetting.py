"""Policies that return a method to its start, wholly or in part."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.model import AdaptiveModel
from ctta.core.parallel import current_reducer, read
from ctta.core.updates import Policy
from ctta.core.validation import (
    check_choice,
    check_each,
    check_fraction,
    check_integer,
    check_non_negative,
    check_positive,
)
from ctta.functional import at_least_float32, entropy, lerp_, pair_trained
from ctta.policies.restoring import PolicyState, student_of, was_updated


@dataclass(frozen=True, repr=False)
class ResetEvery(Policy):
    """Reset the method after a fixed number of batches or images, as RDumb does.

    Weights, optimizer and everything else that the method has learned go back to the start; ``num_steps``, on which
    random draws depend, goes on. Batches whose step was skipped, because something was not finite, do not count.

    A guard has a periodic reset too, ``Guarded(model, reset_every=1000)``. It counts every batch, also those that the
    guard kept the method from learning, resets the guard's snapshot as well, starts the method's count of steps anew,
    and logs an event. Use one of the two.

    Attributes:
        num: How many; RDumb has 1000 batches.
        unit: ``"batches"`` or ``"images"``. With images, the reset follows the batch that completes the number.
    """

    name = "reset_every"
    num: int = 1000
    unit: Literal["batches", "images"] = "batches"

    def __post_init__(self) -> None:
        check_integer("num", self.num, 1)
        check_choice("unit", self.unit, ("batches", "images"))

    @override
    def start(self, model: AdaptiveModel) -> nn.Module:
        return PolicyState(next(model.source.parameters()), {"count": 0})

    @override
    def after_step(self, model: AdaptiveModel, state: PolicyState, x: Tensor, logits: Tensor) -> None:
        if model.last_step is not None and model.last_step.skipped:
            return  # a step that failed leaves no trace
        state.number("count").add_(1 if self.unit == "batches" else current_reducer().total_count(len(x)))
        if state.number("count") >= self.num:
            model.restart_()


@dataclass(frozen=True, repr=False)
class ResetOnLowEntropy(Policy):
    """Reset the method when the moving average of its entropy falls too low, which is a sign of collapse, as SAR does.

    The entropy is that of the samples that a method selects, if it tells (``Step.entropy``), and else that of the
    batch.

    Attributes:
        below: The limit.
        unit: ``"nats"`` as in SAR, whose 0.2 was chosen for 1000 classes, or ``"share"`` of the largest entropy, ln C.
        momentum: The fraction that the average keeps.
    """

    name = "reset_on_low_entropy"
    below: float = 0.2
    unit: Literal["nats", "share"] = "nats"
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, ("nats", "share"))
        check_fraction("momentum", self.momentum)
        check_non_negative("below", self.below)

    @override
    def start(self, model: AdaptiveModel) -> nn.Module:
        return PolicyState(next(model.source.parameters()), {"average": math.inf})  # infinite until the first update

    @override
    def after_step(self, model: AdaptiveModel, state: PolicyState, x: Tensor, logits: Tensor) -> None:
        if model.last_step is None or not was_updated(model):
            return
        value = model.last_step.entropy
        if value is None:
            value = current_reducer().mean(entropy(logits).mean())
        (value,) = read(value)
        if not value.isfinite():
            return
        average = state.number("average")
        average.copy_(self.momentum * average + (1 - self.momentum) * value if average.isfinite() else value)
        limit = self.below * (math.log(logits.shape[1]) if self.unit == "share" else 1)
        if average < limit:
            model.restart_()


@dataclass(frozen=True, repr=False)
class AdaptiveReset(Policy):
    """Reset a part of the weights when predictions concentrate, and pull later ones to what was learned before (ASR).

    The concentration is the entropy of the batch's mean logits. The threshold follows it, more slowly the more the
    predictions differ from the source's. A reset leaves the first layers alone, fewer the lower the entropy, and
    returns the averages of the method to their start. After the first one, updates are pulled to the average weights
    before the resets, by their average squared gradients. Costs a pass through the source per batch, and four copies
    of the trained weights.

    Attributes:
        share: The threshold starts at ln(share * C).
        keep: Largest fraction of trained tensors, from the input on, that a reset keeps.
        depth: How much of that fraction is lost per nat below the threshold.
        pull: Weight of the pull; times the squared share of predictions that differed from the source's in the batch
            before, as in the authors' code.
    """

    name = "adaptive_reset"
    share: float = 0.5
    keep: float = 0.5
    depth: float = 20.0
    pull: float = 5.0

    def __post_init__(self) -> None:
        check_fraction("keep", self.keep)
        check_positive("share", self.share)
        check_each(check_non_negative, depth=self.depth, pull=self.pull)

    @override
    def start(self, model: AdaptiveModel) -> nn.Module:
        trained = [adapted for adapted, _ in pair_trained(student_of(model), model.source)]
        numbers = {"threshold": math.inf, "drift": 0.0, "num_updates": 0, "num_resets": 0}
        zeros = [torch.zeros_like(each) for each in trained]
        return PolicyState(
            trained[0], numbers, square_sum=zeros, weight_sum=zeros, square_mean=zeros, weight_mean=zeros
        )

    @override
    @torch.no_grad()
    def before_update(self, model: AdaptiveModel, state: PolicyState, x: Tensor) -> None:
        trained = [adapted for adapted, _ in pair_trained(student_of(model), model.source)]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        state.number("num_updates").add_(1)
        for gradient, parameter, square, weight in zip(
            gradients, trained, state.tensors("square_sum"), state.tensors("weight_sum"), strict=True
        ):
            square.add_(gradient.square())
            weight.add_(parameter)
        if not state.number("num_resets"):
            return
        strength = 2 * self.pull * state.number("drift") ** 2
        for gradient, parameter, square, weight in zip(
            gradients, trained, state.tensors("square_mean"), state.tensors("weight_mean"), strict=True
        ):
            parameter.grad = gradient + strength.to(square) * square * (parameter - weight)

    @override
    @torch.no_grad()
    def after_step(self, model: AdaptiveModel, state: PolicyState, x: Tensor, logits: Tensor) -> None:
        logits, threshold = at_least_float32(logits), state.number("threshold")
        first = math.log(self.share * logits.shape[1])
        mean = current_reducer().mean(logits.movedim(1, -1).reshape(-1, logits.shape[1]).mean(0))
        differs = logits.argmax(1) != model.source(x).argmax(1)
        drift = current_reducer().mean(differs.to(logits.dtype).mean())
        concentration, drift = read(entropy(mean.unsqueeze(0))[0], drift)
        if not concentration.isfinite():
            return
        if not threshold.isfinite():
            threshold.fill_(first)
        state.number("drift").copy_(drift)
        if concentration < threshold:
            fraction = max(self.keep - self.depth * float(threshold - concentration), 0.0)
            self._reset_(model, state, fraction)
            threshold.fill_(first)
        else:
            momentum = 0.15 * drift + 0.85
            threshold.copy_(momentum * threshold + (1 - momentum) * concentration)

    @staticmethod
    def _reset_(model: AdaptiveModel, state: PolicyState, fraction: float) -> None:
        pairs = pair_trained(student_of(model), model.source)
        for adapted, original in pairs[math.ceil(fraction * len(pairs)) :]:
            adapted.copy_(original)
        assert model.optimizer is not None
        model.optimizer.state.clear()
        initial = dict(model.fork().named_buffers(recurse=False))  # such as ETA's average prediction
        for name, buffer in model.named_buffers(recurse=False):
            buffer.copy_(initial[name])
        num_updates = int(state.number("num_updates"))
        for kind in ("square", "weight"):
            sums, means = state.tensors(f"{kind}_sum"), state.tensors(f"{kind}_mean")
            if num_updates:
                latest = [total / num_updates for total in sums]
                lerp_(means, latest, 0.1 if state.number("num_resets") else 1.0)
            for total in sums:
                total.zero_()
        if num_updates:
            state.number("num_resets").add_(1)
        state.number("num_updates").zero_()

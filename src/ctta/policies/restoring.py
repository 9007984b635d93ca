"""Policies that set single weights back to the source's."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.model import AdaptiveModel
from ctta.core.steps import Policy
from ctta.core.validation import check_fraction
from ctta.functional import pair_trained, stochastic_restore_


def student_of(model: AdaptiveModel) -> nn.Module:
    """Return the network that a method trains."""
    student = model.student
    assert isinstance(student, nn.Module)
    return student


def was_updated(model: AdaptiveModel) -> bool:
    """Return whether the step in progress has changed the weights."""
    return model.last_step is not None and model.last_step.updated


@dataclass(frozen=True, repr=False)
class Restore(Policy):
    """Set each trained weight back to the source's value with some probability after each update, as CoTTA does.

    Attributes:
        probability: The probability of each weight; the default is CoTTA's.
    """

    name = "restore"
    is_random = True
    probability: float = 0.01

    def __post_init__(self) -> None:
        check_fraction("probability", self.probability)

    @override
    def after_step(self, model: AdaptiveModel, state: nn.Module, x: Tensor, logits: Tensor) -> None:
        if was_updated(model):
            probability = self.probability * model.step_scale
            stochastic_restore_(student_of(model), model.source, probability, model.generator("restore"))


class _Squares(nn.Module):
    """The squared gradients of the step in progress; not a state, since they are gone when it ends."""

    squares: list[Tensor | None] | None = None


@dataclass(frozen=True, repr=False)
class RestoreByFisher(Policy):
    """Set the trained weights of least squared gradient back to the source's values after each update, as PETAL does.

    Attributes:
        fraction: The quantile of the squared gradients below which weights are restored; the default is PETAL's. A
            batch of few images, which is a part of a step, restores that part of it.
    """

    name = "restore_by_fisher"
    fraction: float = 0.03

    def __post_init__(self) -> None:
        check_fraction("fraction", self.fraction)

    @override
    def start(self, model: AdaptiveModel) -> nn.Module:
        return _Squares()

    @override
    def before_update(self, model: AdaptiveModel, state: _Squares, x: Tensor) -> None:
        pairs = pair_trained(student_of(model), model.source)
        # Weights that the loss does not depend on have not moved, and must not shift the quantile of the others.
        state.squares = [None if p.grad is None else p.grad.square() for p, _ in pairs]

    @override
    @torch.no_grad()
    def after_step(self, model: AdaptiveModel, state: _Squares, x: Tensor, logits: Tensor) -> None:
        squares, state.squares = state.squares, None
        if squares is None or not was_updated(model):
            return
        found = [square.flatten() for square in squares if square is not None]
        if not found:
            return
        limit = compute_quantile(torch.cat(found), self.fraction * model.step_scale)
        for (adapted, original), square in zip(pair_trained(student_of(model), model.source), squares, strict=True):
            if square is not None:
                adapted.copy_(torch.where(square < limit, original, adapted))


def compute_quantile(values: Tensor, fraction: float) -> Tensor:
    """Return a quantile by linear interpolation, as ``torch.quantile`` does, which refuses more than 16 million."""
    position = fraction * (len(values) - 1)
    below = int(position)
    low = values.kthvalue(below + 1).values
    high = values.kthvalue(min(below + 2, len(values))).values
    return low.lerp(high, position - below)

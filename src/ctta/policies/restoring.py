"""Policies that set single weights back to the source's, or keep all of them near it by averaging."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.model import AdaptiveModel
from ctta.core.state import LazyModule
from ctta.core.updates import Policy
from ctta.core.validation import check_choice, check_each, check_fraction, check_non_negative
from ctta.errors import ConfigError
from ctta.functional import lerp_, pair_trained, stochastic_restore_


def student_of(model: AdaptiveModel) -> nn.Module:
    """Return the network that a method trains."""
    return model.trained_networks[0]


def was_updated(model: AdaptiveModel) -> bool:
    """Return whether the step in progress has changed the weights."""
    return model.last_step is not None and model.last_step.updated


class PolicyState(LazyModule):
    """Buffers of single numbers, of the dtype of a tensor or integers, and of lists of tensors, which are copied.

    The numbers are on the host.
    """

    def __init__(self, like: Tensor, numbers: dict[str, float], **lists: list[Tensor]) -> None:
        super().__init__()
        self.cpu_buffers = tuple(numbers)
        for name, value in numbers.items():
            dtype = torch.long if isinstance(value, int) else like.dtype
            self.register_buffer(name, torch.tensor(value, dtype=dtype))
        for name, tensors in lists.items():
            for number, tensor in enumerate(tensors):
                self.register_buffer(f"{name}{number}", tensor.detach().clone())

    def number(self, name: str) -> Tensor:
        """Return one of the numbers."""
        return self.get_buffer(name)

    def tensors(self, name: str) -> list[Tensor]:
        """Return one of the lists."""
        return [buffer for key, buffer in self.named_buffers() if key.rstrip("0123456789") == name]


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


#: Of a Kalman filter, far above any use, so that its variance stays finite.
MAX_NOISE = 1e9


@dataclass(frozen=True, repr=False)
class AverageWithSource(Policy):
    """Move the trained weights toward the source's after each update, as ROID does.

    Attributes:
        keep: The fraction of the adapted weights, theta <- keep * theta + (1 - keep) * source; the default is ROID's.
    """

    name = "average_with_source"
    keep: float = 0.99

    def __post_init__(self) -> None:
        check_fraction("keep", self.keep)

    @override
    def after_step(self, model: AdaptiveModel, state: nn.Module, x: Tensor, logits: Tensor) -> None:
        if (step := model.last_step) is not None and step.updated:
            pairs = pair_trained(student_of(model), model.source)
            lerp_([adapted for adapted, _ in pairs], [original for _, original in pairs], 1 - self.keep**step.scale)


@dataclass(frozen=True, repr=False)
class Kalman(Policy):
    """Filter the trained weights over time after each update, as CMF does: three copies of the network in memory.

    Hidden weights h drift to the source, are corrected by the adapted weights, and pull these back.

    Attributes:
        alpha: How much of h stays when it drifts to the source.
        gamma: How much of the adapted weights stays when they are pulled to h.
        noise: Process noise of a network with 38,400 trained weights; others have proportionally more or less.
        pull_to: The ``"filtered"`` h (CMF's default, "lp") or the ``"predicted"`` one ("op").
    """

    name = "kalman"
    alpha: float = 0.99
    gamma: float = 0.99
    noise: float = 0.005
    pull_to: Literal["filtered", "predicted"] = "filtered"

    def __post_init__(self) -> None:
        check_each(check_fraction, alpha=self.alpha, gamma=self.gamma)
        check_non_negative("noise", self.noise)
        if self.noise > MAX_NOISE:
            raise ConfigError(f"noise must be at most {MAX_NOISE:g}, got {self.noise!r}")
        check_choice("pull_to", self.pull_to, ("filtered", "predicted"))

    @override
    def start(self, model: AdaptiveModel) -> nn.Module:
        originals: list[Tensor] = [original for _, original in pair_trained(student_of(model), model.source)]
        return PolicyState(originals[0], {"variance": 0.0}, hidden=originals)

    @override
    @torch.no_grad()
    def after_step(self, model: AdaptiveModel, state: PolicyState, x: Tensor, logits: Tensor) -> None:
        if not was_updated(model):
            return
        pairs = pair_trained(student_of(model), model.source)
        adapted, originals = [one for one, _ in pairs], [other for _, other in pairs]
        q = self.noise * sum(each.numel() for each in adapted) / 38_400
        hidden, variance = state.tensors("hidden"), state.number("variance")
        lerp_(hidden, originals, 1 - self.alpha**model.step_scale)
        predicted = [each.clone() for each in hidden] if self.pull_to == "predicted" else hidden
        drifted = self.alpha**2 * float(variance)
        # In a large network q may exceed 1, and the quotient is then negative.
        beta = max(0.89, (1 - q) / (drifted + 1))
        beta = 1.0 if beta >= 0.9999 else beta
        variance.fill_(beta * (drifted + q))
        lerp_(hidden, adapted, 1 - beta)
        lerp_(adapted, predicted, 1 - self.gamma**model.step_scale)


@dataclass(frozen=True, repr=False)
class FrozenTeacher(Policy):
    """Keep the teacher of a method equal to the source, and let the student predict ("intransigent teacher").

    It does not collapse on long streams, but follows changes less. Costs a pass through the student per batch.
    """

    name = "frozen_teacher"
    student_predicts = True

    @override
    def start(self, model: AdaptiveModel) -> nn.Module:
        teacher = getattr(model, "teacher", None)
        if not isinstance(teacher, nn.Module):
            raise ConfigError(f"frozen_teacher needs a method with a teacher, and {type(model).__name__} has none")
        if not {*map(id, teacher.parameters())}.isdisjoint(map(id, student_of(model).parameters())):
            raise ConfigError(
                f"frozen_teacher needs a teacher with weights of its own, and that of {type(model).__name__} has the "
                "student's"
            )
        return nn.Module()

    @override
    @torch.no_grad()
    def after_step(self, model: AdaptiveModel, state: nn.Module, x: Tensor, logits: Tensor) -> None:
        originals = dict(model.source.named_parameters())
        assert isinstance(model.teacher, nn.Module)
        for name, parameter in model.teacher.named_parameters():
            if name in originals:
                parameter.copy_(originals[name])

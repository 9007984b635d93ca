"""One step of a method, watched: how far the optimiser went, at most how far, and what the student said."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ctta.base import AdaptiveModel
from ctta.guard.health import relative_norm, trained_pairs


@dataclass
class Watched:
    """What was seen; None where nothing was."""

    update_norm: float | None = None  # relative to the norm that the trained parameters have in the source
    student_classes: Tensor | None = None  # where a teacher gives the answers


@contextmanager
def watching_step(model: AdaptiveModel, largest: float | None, *, closely: bool) -> Iterator[Watched]:
    """Within, a step that the optimiser takes is cut down to ``largest`` and, if closely watched, measured.

    By hooks of the optimiser, so that a teacher that averages students meets the shortened step.
    """
    watched = Watched()
    with ExitStack() as stack:
        if model.optimizer is not None and (closely or largest is not None):
            stack.enter_context(_limiting(model, model.optimizer, largest, watched))
        if closely and hasattr(model, "teacher") and isinstance(student := getattr(model, "student", None), nn.Module):
            stack.enter_context(_listening(student, watched))
        yield watched


@contextmanager
def _limiting(model: AdaptiveModel, optimizer: Optimizer, largest: float | None, watched: Watched) -> Iterator[None]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    originals = [original for _, original in trained_pairs(model)]
    before: list[Tensor] = []

    def remember(*_: Any) -> None:
        before[:] = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def measure(*_: Any) -> None:
        changes = [new - old for new, old in zip(parameters, before, strict=True)]
        watched.update_norm = norm = relative_norm(changes, originals)
        if largest is not None and norm > largest:
            for parameter, old, change in zip(parameters, before, changes, strict=True):
                parameter.copy_(old + change * (largest / norm))

    handles = [optimizer.register_step_pre_hook(remember), optimizer.register_step_post_hook(measure)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _listening(student: nn.Module, watched: Watched) -> Iterator[None]:
    def hear(module: nn.Module, inputs: Any, logits: Tensor) -> None:
        watched.student_classes = logits.detach().argmax(1)

    handle = student.register_forward_hook(hear)
    try:
        yield
    finally:
        handle.remove()

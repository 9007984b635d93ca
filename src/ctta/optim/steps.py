"""Steps of an optimizer: skipped if not finite, scaled, or sharpness-aware."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ctta.core.parallel import current_reducer


@contextmanager
def scale_steps(optimizer: Optimizer, scale: float) -> Iterator[None]:
    """Let the parameters go only the fraction ``scale`` of every step within the context, whatever the optimizer.

    Hooks of the optimizer do it, so that any kind of step is scaled. Its own state is updated as by a whole step.

    Args:
        optimizer: The optimizer.
        scale: The fraction; 1 for whole steps.

    Yields:
        Nothing.
    """
    if scale == 1:
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before: list[Tensor] = []

    def keep(*_: Any) -> None:
        before[:] = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def go_back(*_: Any) -> None:
        for parameter, old in zip(parameters, before, strict=True):
            parameter.lerp_(old, 1 - scale)

    handles = [optimizer.register_step_pre_hook(keep), optimizer.register_step_post_hook(go_back)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def split_groups_(optimizer: Optimizer) -> None:
    """Give every parameter of an optimizer a group, and so a learning rate, of its own.

    Args:
        optimizer: A new optimizer.
    """
    optimizer.param_groups[:] = [
        {**group, "params": [parameter]} for group in optimizer.param_groups for parameter in group["params"]
    ]


@contextmanager
def scale_rates(optimizer: Optimizer, factors: Sequence[float]) -> Iterator[None]:
    """Multiply the learning rate of each group within the context.

    Args:
        optimizer: The optimizer.
        factors: One for each group.

    Yields:
        Nothing.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, rate, factor in zip(optimizer.param_groups, rates, factors, strict=True):
            group["lr"] = rate * factor
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def step_if_finite_(optimizer: Optimizer, loss: Tensor, before_step: Callable[[], None] | None = None) -> bool:
    """Take one optimizer step, or change nothing if the loss or a gradient is not finite.

    Args:
        optimizer: The optimizer.
        loss: The mean loss over the local rows.
        before_step: Called once there are finite gradients, which it may change, before the step.

    Returns:
        Whether the step was taken.
    """
    try:
        return compute_gradients_(optimizer, loss) and _step_with_gradients_(optimizer, before_step)
    finally:
        optimizer.zero_grad()  # also after an error, or the next step would add to a partial gradient


def sharpness_aware_step_(
    optimizer: Optimizer,
    loss: Tensor,
    compute_second_loss: Callable[[], Tensor | None],
    radius: float,
    before_step: Callable[[], None] | None = None,
) -> bool:
    """Take one step with the gradient at the worst weights nearby (sharpness-aware minimization).

    The weights w climb to ``w + radius * g / |g|``, the second loss is computed there, and the optimizer steps from w
    with its gradient. g is the gradient of the first loss, and its norm is one number over all parameters.

    Args:
        optimizer: The optimizer.
        loss: The first loss, the mean over the local rows.
        compute_second_loss: Computes the loss again at the perturbed weights; None for no step.
        radius: How far to climb.
        before_step: As for :func:`step_if_finite_`, with the gradients of the second loss.

    Returns:
        Whether a step was taken. If not, because something was not finite or there was no second loss, nothing changed.
    """
    try:
        if not compute_gradients_(optimizer, loss):
            return False
        parameters = [parameter for parameter in _parameters(optimizer) if parameter.grad is not None]
        originals = [parameter.detach().clone() for parameter in parameters]
        _climb_(parameters, radius)
        optimizer.zero_grad()
        try:
            second_loss = compute_second_loss()
            is_finite = second_loss is not None and compute_gradients_(optimizer, second_loss)
        finally:
            with torch.no_grad():
                for parameter, original in zip(parameters, originals, strict=True):
                    parameter.copy_(original)  # exactly, where subtracting the perturbation would round
        return is_finite and _step_with_gradients_(optimizer, before_step)
    finally:
        optimizer.zero_grad()


def _step_with_gradients_(optimizer: Optimizer, before_step: Callable[[], None] | None) -> bool:
    """Take a step with finite gradients, unless ``before_step`` makes them non-finite; return whether it was taken."""
    if before_step is not None:
        before_step()
        if not all_finite(_gradients(optimizer)):
            return False
    optimizer.step()
    return True


@torch.no_grad()
def _climb_(parameters: list[nn.Parameter], radius: float) -> None:
    """Move the parameters by ``radius`` along their gradients; nowhere if these are zero."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    scale = radius / (nn.utils.get_total_norm(gradients) + 1e-12)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.add_(gradient * scale.to(gradient))


def compute_gradients_(optimizer: Optimizer, loss: Tensor) -> bool:
    """Compute the gradients of the batch's mean loss.

    Args:
        optimizer: The optimizer of the parameters; it takes no step.
        loss: The mean loss over the local rows.

    Returns:
        Whether the loss and the gradients are finite.
    """
    batch, parameters = current_reducer(), _parameters(optimizer)
    batch.scale_loss(loss).backward()
    batch.all_reduce_gradients_(parameters)
    return all_finite([batch.mean(loss.detach()), *_gradients(optimizer)])


def batch_gradients(optimizer: Optimizer, loss: Tensor) -> list[Tensor | None]:
    """Return the gradients of the batch's mean loss, and keep the graph for a further loss.

    Args:
        optimizer: The optimizer of the parameters; it takes no step.
        loss: The mean loss over the local rows.

    Returns:
        One gradient for each parameter in the order of the groups; None for one that the loss does not depend on.
    """
    batch, parameters = current_reducer(), _parameters(optimizer)
    try:
        batch.scale_loss(loss).backward(retain_graph=True)
        batch.all_reduce_gradients_(parameters)
        return [parameter.grad for parameter in parameters]
    finally:
        optimizer.zero_grad()


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [parameter.grad for parameter in _parameters(optimizer) if parameter.grad is not None]


def all_finite(tensors: list[Tensor]) -> bool:
    """Return whether no value is NaN or infinite.

    Args:
        tensors: Of any shapes.

    Returns:
        Whether all values of all tensors are finite.
    """
    # The 2-norm takes a ninth of the time of the maximum, which decides only where the sum of squares overflows.
    return any(bool(torch.isfinite(nn.utils.get_total_norm(tensors, order))) for order in (2.0, math.inf))

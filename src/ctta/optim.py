"""Optimizers: how they are built, how they step, and how their state is stored."""

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ctta.core.parallel import current_reducer, read_flags
from ctta.errors import ConfigError

__all__ = [
    "OptimizerFactory",
    "all_finite",
    "build_optimizer",
    "scale_rates",
    "scale_steps",
    "sharpness_aware_step_",
    "step_if_finite_",
    "with_lr",
]


class Outcome(Enum):
    """What became of an update; true if it was taken.

    It is skipped if the loss or a gradient is not finite, and empty if there was nothing to learn from.
    """

    TAKEN = "taken"
    SKIPPED = "skipped"
    EMPTY = "empty"

    def __bool__(self) -> bool:
        return self is Outcome.TAKEN


#: Builds an optimizer for a list of parameters, as ``partial(torch.optim.Adam, lr=1e-3)`` does.
OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


def build_optimizer(factory: OptimizerFactory, net: nn.Module) -> Optimizer:
    """Return an optimizer of the parameters of the network that require grad.

    Args:
        factory: Builds the optimizer.
        net: The network.

    Returns:
        The optimizer.

    Raises:
        ConfigError: No parameter requires grad, or one has 16 bits.
        TypeError: The factory is an optimizer, or builds something else.
    """
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError(
            "there is nothing to train: the network has none of the parameters that this method adapts, or they do "
            "not require grad (call net.requires_grad_(True) before wrapping it)"
        )
    if any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in parameters):
        raise ConfigError(
            "16-bit weights are too coarse for the small updates of adaptation: keep the network in float32 "
            "(net.float()) and call the model under torch.autocast"
        )
    optimizer = factory(parameters) if callable(factory) else None
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer must be a factory like functools.partial(torch.optim.Adam, lr=1e-3), since a method trains its "
            f"own copy of the network; got {factory!r}"
        )
    return optimizer


def with_lr(factory: OptimizerFactory, lr: float | None) -> OptimizerFactory:
    """Return a factory whose optimizers have this learning rate; the given factory if it is None.

    Args:
        factory: Builds an optimizer, and takes ``lr`` as a keyword.
        lr: The learning rate, or None for the factory's own.

    Returns:
        The factory.

    Raises:
        ConfigError: The learning rate is not a number that the optimizer allows, or the factory takes none.
    """
    if lr is None:
        return factory
    if isinstance(lr, bool) or not isinstance(lr, Real) or not 0 <= lr < math.inf:
        raise ConfigError(f"lr must be a number of at least 0, got {lr!r}")
    changed = partial(factory, lr=float(lr))
    try:
        changed([nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the optimizer does not take lr={lr!r}: {error}") from error
    return changed


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
    parameters = _parameters(optimizer)
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
    """Give every parameter of a new optimizer a group, and so a learning rate, of its own."""
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


def step_if_finite_(
    optimizer: Optimizer,
    loss: Tensor,
    before_step: Callable[[], None] | None = None,
    selected: Tensor | None = None,
) -> Outcome:
    """Take one optimizer step, or change nothing if the loss or a gradient is not finite.

    Args:
        optimizer: The optimizer.
        loss: The mean loss over the local rows.
        before_step: Called once there are finite gradients, which it may change, before the step.
        selected: The fraction of elements that the loss is computed from; there is no step if it is 0.

    Returns:
        What became of the step.
    """
    try:
        return compute_gradients_(optimizer, loss, selected) and _step_with_gradients_(optimizer, before_step)
    finally:
        optimizer.zero_grad()  # also after an error, or the next step would add to a partial gradient


def sharpness_aware_step_(
    optimizer: Optimizer,
    loss: Tensor,
    compute_second_loss: Callable[[], tuple[Tensor, Tensor | None]],
    radius: float,
    before_step: Callable[[], None] | None = None,
    selected: Tensor | None = None,
) -> Outcome:
    """Take one step with the gradient at the worst weights nearby (sharpness-aware minimization).

    The weights w climb to ``w + radius * g / |g|``, the second loss is computed there, and the optimizer steps from w
    with its gradient. g is the gradient of the first loss, and its norm is one number over all parameters.

    Args:
        optimizer: The optimizer.
        loss: The first loss, the mean over the local rows.
        compute_second_loss: Computes the loss again at the perturbed weights, and the fraction of elements that it is
            computed from, None for all.
        radius: How far to climb.
        before_step: As for :func:`step_if_finite_`, with the gradients of the second loss.
        selected: As for :func:`step_if_finite_`, of the first loss.

    Returns:
        What became of the step; unless it was taken, nothing changed.
    """
    try:
        if not (first := compute_gradients_(optimizer, loss, selected)):
            return first
        parameters = [parameter for parameter in _parameters(optimizer) if parameter.grad is not None]
        originals = [parameter.detach().clone() for parameter in parameters]
        _climb_(parameters, radius)
        optimizer.zero_grad()
        try:
            second = compute_gradients_(optimizer, *compute_second_loss())
        finally:
            with torch.no_grad():
                for parameter, original in zip(parameters, originals, strict=True):
                    parameter.copy_(original)  # exactly, where subtracting the perturbation would round
        return second and _step_with_gradients_(optimizer, before_step)
    finally:
        optimizer.zero_grad()


def _step_with_gradients_(optimizer: Optimizer, before_step: Callable[[], None] | None) -> Outcome:
    """Take a step with finite gradients, unless ``before_step`` makes them non-finite."""
    if before_step is not None:
        before_step()
        if not all_finite(_gradients(optimizer)):
            return Outcome.SKIPPED
    optimizer.step()
    return Outcome.TAKEN


@torch.no_grad()
def _climb_(parameters: list[nn.Parameter], radius: float) -> None:
    """Move the parameters by ``radius`` along their gradients; nowhere if these are zero."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    scale = radius / (nn.utils.get_total_norm(gradients) + 1e-12)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.add_(gradient * scale.to(gradient))


def compute_gradients_(optimizer: Optimizer, loss: Tensor, selected: Tensor | None = None) -> Outcome:
    """Compute the gradients of the batch's mean loss; return what prevents a step with them, or ``TAKEN``."""
    batch, parameters = current_reducer(), _parameters(optimizer)
    mean = batch.mean(loss.detach())
    is_empty = mean.new_zeros((), dtype=torch.bool) if selected is None else (selected <= 0) & mean.isfinite()
    if not loss.requires_grad and read_flags(is_empty)[0]:  # a constant in place of the loss of nothing
        return Outcome.EMPTY
    batch.scale_loss(loss).backward()
    batch.all_reduce_gradients_(parameters)
    is_finite, nothing = read_finite([mean, *_gradients(optimizer)], is_empty)
    return Outcome.EMPTY if nothing else Outcome.TAKEN if is_finite else Outcome.SKIPPED


def batch_gradients(optimizer: Optimizer, loss: Tensor) -> list[Tensor | None]:
    """Return the gradients of the batch's mean loss, one for each parameter, and keep the graph for a further loss.

    A parameter that the loss does not depend on has None.
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
    return read_finite(tensors)[0]


def read_finite(tensors: list[Tensor], *flags: Tensor) -> list[bool]:
    """Return whether no value is NaN or infinite, and the values of flags, all in one read.

    Args:
        tensors: Of any shapes.
        *flags: Boolean scalars.

    Returns:
        Whether all values of all tensors are finite, and the flags.
    """
    # The 2-norm takes a ninth of the time of the maximum, which decides only where the sum of squares overflows.
    is_finite, *values = read_flags(nn.utils.get_total_norm(tensors).isfinite(), *flags)
    return [is_finite or read_flags(nn.utils.get_total_norm(tensors, math.inf).isfinite())[0], *values]


#: Of options such as learning rates, far above any use: with larger ones the weights overflow within a few steps.
MAX_OPTION = 1e9


def split_state(optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the state of an optimizer in two parts: for JSON, and tensors named ``<parameter>.<name>``.

    The part for JSON has the options of the groups and numbers; a TypeError says which option is a tensor.
    """
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        for name, option in group.items():
            if isinstance(option, Tensor):
                raise TypeError(f"the optimizer's option {name!r} is a tensor, which cannot be saved: give a number")
    values = {f"{index}.{name}": value for index, part in state["state"].items() for name, value in part.items()}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in values.items() if name not in tensors}
    return {"groups": state["param_groups"], "numbers": numbers}, tensors


def restore_state_(optimizer: Optimizer, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Load the state that :func:`split_state` returned into a new optimizer; a ValueError says what does not fit."""
    new = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in new] != [group["params"] for group in plain["groups"]]:
        raise ValueError("the optimizer has other parameter groups")
    parameters = _parameters(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**plain["numbers"], **tensors}.items():
        index, _, name = key.partition(".")
        if not index.isdecimal() or int(index) >= len(parameters) or not _fits(value, parameters[int(index)]):
            raise ValueError(f"the optimizer state '{key}' does not fit the parameters")
        state.setdefault(int(index), {})[name] = value
    # Options that a newer torch has added keep their defaults.
    groups = [defaults | saved for defaults, saved in zip(new, plain["groups"], strict=True)]
    load_state_(optimizer, {"state": state, "param_groups": groups})
    _check_step(optimizer)


def _check_step(optimizer: Optimizer) -> None:
    """Raise if the next step would fail; each parameter is tried as a copy, with its state and a gradient of zero."""
    for group in optimizer.param_groups:
        for name, option in group.items():
            if isinstance(option, int | float) and not abs(option) <= MAX_OPTION:
                raise ValueError(f"its optimizer has {name}={str(option)[:20]}, beyond any use")
        for parameter in group["params"]:
            twin = nn.Parameter(parameter.detach().clone())
            twin.grad = torch.zeros_like(twin)
            trial = copy.copy(optimizer)
            trial.param_groups = [{**group, "params": [twin]}]
            trial.state = defaultdict(dict, {twin: copy.deepcopy(optimizer.state.get(parameter, {}))})
            try:
                if type(optimizer).__module__.startswith("torch.optim"):  # whose constructors check their options
                    accepted = inspect.signature(type(optimizer)).parameters
                    options = {name: value for name, value in group.items() if name in accepted}
                    type(optimizer)(**{**options, "params": [twin]})
                trial.step()
            # Whatever the arithmetic of an optimizer raises for options and state that do not fit together.
            except Exception as error:
                raise ValueError(f"its optimizer cannot take a step ({type(error).__name__}: {error})") from error
            if not all_finite([twin.detach()]):
                raise ValueError("its optimizer state or options are not finite")


def load_state_(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state, with tensors on the device and in the dtype of their parameters, but scalars in their own dtype.

    ``load_state_dict`` would also widen scalars such as NAdam's product of momenta, which then round differently.
    """
    optimizer.load_state_dict(state)
    parameters = _parameters(optimizer)
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.ndim == 0:
                loaded = optimizer.state[parameters[index]][name]
                optimizer.state[parameters[index]][name] = loaded.to(value.dtype)


def _fits(value: Any, parameter: Tensor) -> bool:
    """Return whether a value may be state of a parameter: a number, of its shape, or with some axes reduced to 1."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return True
    return value.ndim == parameter.ndim and all(
        size in (1, full) for size, full in zip(value.shape, parameter.shape, strict=True)
    )

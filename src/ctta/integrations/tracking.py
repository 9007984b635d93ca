"""Log the steps of a model to a tracker of experiments."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ctta.core.model import AdaptiveModel
from ctta.guard import Health, Monitored

#: What a tracker is: a function of values by name and of the number of the step, such as ``mlflow.log_metrics`` or
#: ``wandb.log``.
LogMetrics = Callable[[dict[str, float], int], object]


def log_steps(model: AdaptiveModel, log: LogMetrics, *, every: int = 1) -> RemovableHandle:
    """Log what each step of a model did: its loss and confidence, and its health if it is guarded.

    The values of a step are read when it is done, which waits for the device; ``every=10`` does so at each tenth.

    Args:
        model: The model. ``reset`` keeps the logging, a fork or a loaded model has none.
        log: The tracker: ``mlflow.log_metrics``, ``wandb.log``, ``log_to_tensorboard(writer)`` or a function of yours.
        every: Log each n-th batch.

    Returns:
        A handle, whose ``remove()`` ends the logging.
    """
    num_batches = 0

    def log_batch(module: nn.Module, arguments: Any, logits: Tensor) -> None:
        nonlocal num_batches
        num_batches += 1
        if num_batches % every == 0 and (values := read_metrics(model)):
            log(values, num_batches)

    return model.register_forward_hook(log_batch)


def read_metrics(model: AdaptiveModel) -> dict[str, float]:
    """Return the numbers of a model's last step by name.

    Args:
        model: The model; of one that is guarded, the health as ``health/...`` is included.

    Returns:
        The numbers that exist; empty before the first step.
    """
    step = model.unwrapped.last_step
    values = {} if step is None else _read_numbers({field.name: getattr(step, field.name) for field in fields(step)})
    if isinstance(model, Monitored):
        health: Health = model.health
        values |= {f"health/{name}": value for name, value in _read_numbers(health.as_dict()).items() if name != "step"}
    return values


def log_to_tensorboard(writer: Any, prefix: str = "ctta") -> LogMetrics:
    """Return a tracker that writes to TensorBoard.

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter``.
        prefix: Put in front of every name.

    Returns:
        The function for :func:`log_steps`.
    """

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(f"{prefix}/{name}", value, step)

    return log


def _read_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return what is a number, a scalar tensor or a truth value, as floats."""
    return {name: float(value) for name, value in values.items() if isinstance(value, bool | int | float | Tensor)}

"""Checks of what users give: each error says what was given, what was expected and what to do."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ctta.surgery import lacks_batch_dimension


def check_fraction(name: str, value: float) -> None:
    """A number from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value!r}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """One of a few words."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_batch(x: Tensor, net: nn.Module) -> None:
    """A batch of finite floating-point inputs for this network; an empty one is fine."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a batch of inputs as a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"expected floating-point inputs, got {x.dtype}: for byte images call x.float() / 255 first")
    if x.ndim < 2 or lacks_batch_dimension(net, x):
        raise ValueError(f"expected a batch of inputs, got shape {tuple(x.shape)}: for one image call x.unsqueeze(0)")
    if not torch.isfinite(x).all():
        raise ValueError(
            "the input holds NaN or infinite values; nothing was predicted or changed: drop or repair the batch"
        )

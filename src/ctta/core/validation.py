"""Checks of arguments; every error says what was given, what was expected and what to do."""

import operator
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from typing import SupportsIndex

from torch import nn

from ctta.errors import ConfigError
from ctta.nn import BatchStats, has_running_statistics
from ctta.nn.surgery import Output
from ctta.views import Views, ViewsAtOnce
from ctta.views.average import require_split_view


def check_fraction(name: str, value: float) -> None:
    """Raise a ConfigError unless a value lies between 0 and 1."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must lie between 0 and 1, got {value!r}")


def check_number(name: str, value: float) -> None:
    """Raise unless a value is a number; infinities are allowed, NaN is not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if value != value or (isinstance(value, int) and sys.float_info.max < abs(value)):
        raise ConfigError(f"{name} must be a number that a float can hold, got {value!r}")


def check_non_negative(name: str, value: float) -> None:
    """Raise unless a value is a number of at least 0."""
    check_number(name, value)
    if value < 0:
        raise ConfigError(f"{name} must be at least 0, got {value!r}")


def check_positive(name: str, value: float) -> None:
    """Raise unless a value is a number above 0."""
    check_number(name, value)
    if value <= 0:
        raise ConfigError(f"{name} must be above 0, got {value!r}")


def check_each(check: Callable[[str, float], None], **values: float) -> None:
    """Apply one of these checks to several settings by their names."""
    for name, value in values.items():
        check(name, value)


def check_output(output: Output) -> None:
    """Raise a TypeError unless a value can say where the logits are in the output of a network."""
    if isinstance(output, bool) or not (output is None or isinstance(output, str | int) or callable(output)):
        raise TypeError(f"output must be a key, an index or a function of the network's output, got {output!r}")


def check_batch_stats(value: BatchStats) -> None:
    """Raise unless a value is ``"auto"``, ``"blend"`` or lies between 0 and 1."""
    if not isinstance(value, str):
        check_fraction("batch_stats", value)
    elif value not in ("auto", "blend"):
        raise ConfigError(f"batch_stats must be 'auto', 'blend' or lie between 0 and 1, got {value!r}")


def check_integer(name: str, value: SupportsIndex | float, low: int | None = None, high: int | None = None) -> int:
    """Return ``value`` as a Python ``int``, or raise unless it is an integer within the bounds.

    Args:
        name: What to call the value in the error.
        value: Any object with ``__index__`` (numpy's integers too) except a bool.
        low: The smallest value allowed.
        high: The largest value allowed; needs ``low``.
    """
    bounds = "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"
    if isinstance(value, bool | float) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer{bounds}, got {value!r}")
    number = operator.index(value)
    if (low is not None and number < low) or (high is not None and number > high):
        raise ConfigError(f"{name} must be an integer{bounds}, got {value!r}")
    return number


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise a ConfigError unless a value is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_views_at_once(views_at_once: ViewsAtOnce, views: Views, net: nn.Module) -> None:
    """Raise unless this many views can go through the network together, each with its own batch statistics."""
    if views_at_once == "auto":
        return
    if check_integer("views_at_once", views_at_once, 1) == 1:
        return
    for view in views if isinstance(views, Sequence) else ():  # drawn views are checked once they are drawn
        require_split_view(view)
    if not has_running_statistics(net):
        raise ConfigError(
            f"views_at_once={views_at_once} needs BatchNorm layers with running statistics, and one of the network's "
            "keeps none: use views_at_once=1"
        )

"""Hyperparameters as JSON: numbers, strings, sequences, optimizers of torch, views, policies, registered settings.

Anything else (a lambda, a class of the user's) has no such form and must be given again when a file is loaded.
"""

from functools import partial
from typing import Any

import numpy as np
import torch

from ctta.policies import POLICIES
from ctta.source_stats import SourceStats
from ctta.views import AugMixViews, GeometricViews, ImageViews, ScaledView

#: Classes that a file holds as their attributes, by tag and stored name; :func:`register_settings_class` adds to it.
_SETTINGS_CLASSES: dict[tuple[str, str], type] = {
    ("view", "image_views"): ImageViews,
    ("view", "augmix_views"): AugMixViews,
    ("view", "geometric_views"): GeometricViews,
    ("view", "scaled_view"): ScaledView,
    ("statistics", "source_stats"): SourceStats,
    **{("policy", name): cls for name, cls in POLICIES.items()},
}


class UnserializableError(TypeError):
    """Raised for a value that cannot be written as JSON."""


def register_settings_class(tag: str, name: str, cls: type) -> None:
    """Let files hold objects of a class whose attributes are its constructor's arguments.

    Args:
        tag: What kind of object it is; part of the file format.
        name: Name to store it under; part of the file format.
        cls: The class.
    """
    _SETTINGS_CLASSES[tag, name] = cls


def encode(value: Any) -> Any:
    """Return a hyperparameter as JSON.

    Args:
        value: The hyperparameter.

    Returns:
        What :func:`decode` takes.

    Raises:
        UnserializableError: If it has no such form.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) in (tuple, list):
        return {"sequence": [encode(item) for item in value]}
    for (tag, name), cls in _SETTINGS_CLASSES.items():
        if type(value) is cls:
            settings = value.to_settings() if isinstance(value, SourceStats) else vars(value)
            return {tag: name, "arguments": _encode_arguments(settings)}
    factory = value if isinstance(value, partial) else partial(value) if isinstance(value, type) else None
    if factory is not None and isinstance(factory.func, type) and not factory.args:
        name = factory.func.__name__
        if getattr(torch.optim, name, None) is factory.func:
            return {"optimizer": name, "arguments": _encode_arguments(factory.keywords)}
    raise UnserializableError(repr(value))


def is_serializable(value: Any) -> bool:
    """Return whether a file can hold a hyperparameter."""
    try:
        encode(value)
    except UnserializableError:
        return False
    return True


def decode(code: Any) -> Any:
    """Return the value that :func:`encode` wrote.

    Args:
        code: Its JSON form.

    Returns:
        An equal value; sequences come back as tuples.

    Raises:
        ValueError: If it names an unknown class or optimizer.
    """
    if not isinstance(code, dict):
        return code
    if "sequence" in code:
        return tuple(decode(item) for item in code["sequence"])
    arguments = {name: decode(argument) for name, argument in code["arguments"].items()}
    (tag, name), *_ = ((key, value) for key, value in code.items() if key != "arguments")
    if tag == "optimizer":
        factory = getattr(torch.optim, name, None)
        if not (isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer)):
            raise ValueError(f"torch.optim has no optimizer {name!r}")
        return partial(factory, **arguments)
    if (tag, name) not in _SETTINGS_CLASSES:
        raise ValueError(f"unknown {tag} {name!r}")
    cls = _SETTINGS_CLASSES[tag, name]
    return cls.from_settings(**arguments) if issubclass(cls, SourceStats) else cls(**arguments)


def _encode_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: encode(argument) for name, argument in arguments.items()}

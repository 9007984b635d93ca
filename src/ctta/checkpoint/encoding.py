"""Hyperparameters as JSON: numbers and words, optimisers of torch, views and guards of this library.

Anything else (a lambda, a class of the user's) has no such form and must be given again by the user.
"""

from functools import partial
from typing import Any

import numpy as np
import torch

from ctta.guard import Admission, Thresholds
from ctta.views import ImageViews, ScaledView

VIEWS: dict[str, type[ImageViews | ScaledView]] = {"image_views": ImageViews, "scaled_view": ScaledView}
GUARDS: dict[str, type[Admission | Thresholds]] = {"admission": Admission, "thresholds": Thresholds}


class NotStorableError(TypeError):
    """The value cannot be written as JSON and has to be given again."""


def encode(value: Any) -> Any:
    """The value as JSON; raises NotStorableError."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) in (tuple, list):
        return {"sequence": [encode(item) for item in value]}
    for name, view in VIEWS.items():
        if type(value) is view:
            return {"view": name, "arguments": _encode_arguments(vars(value))}
    for name, guard in GUARDS.items():
        if type(value) is guard:
            return {"guard": name, "arguments": _encode_arguments(vars(value))}
    factory = value if isinstance(value, partial) else partial(value) if isinstance(value, type) else None
    if factory is not None and isinstance(factory.func, type) and not factory.args:
        name = factory.func.__name__
        if getattr(torch.optim, name, None) is factory.func:
            return {"optimizer": name, "arguments": _encode_arguments(factory.keywords)}
    raise NotStorableError(repr(value))


def is_storable(value: Any) -> bool:
    """Whether a file can hold this hyperparameter."""
    try:
        encode(value)
    except NotStorableError:
        return False
    return True


def decode(code: Any) -> Any:
    """The value that :func:`encode` wrote."""
    if not isinstance(code, dict):
        return code
    if "sequence" in code:
        return tuple(decode(item) for item in code["sequence"])
    arguments = {name: decode(argument) for name, argument in code["arguments"].items()}
    if "view" in code:
        return VIEWS[code["view"]](**arguments)
    if "guard" in code:
        return GUARDS[code["guard"]](**arguments)
    factory = getattr(torch.optim, code["optimizer"], None)
    if not (isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer)):
        raise ValueError(f"torch.optim has no optimiser {code['optimizer']!r}")
    return partial(factory, **arguments)


def _encode_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: encode(argument) for name, argument in arguments.items()}

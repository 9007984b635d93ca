"""Hyperparameters of a method: read back from a model, formatted, and parsed from text such as ``restore=0.005``."""

import ast
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ctta.optim import OptimizerFactory
from ctta.views import ImageViews, image_views


def read_hyperparameters(model: object) -> dict[str, Any]:
    """The constructor's arguments after the first, from the attributes of the same name."""
    _net, *names = inspect.signature(type(model)).parameters
    # ``optimizer`` is the built one, so its hyperparameter is the factory.
    attributes = {name: "optimizer_factory" if name == "optimizer" else name for name in names}
    for name, attribute in attributes.items():
        if not hasattr(model, attribute):
            raise TypeError(f"{type(model).__name__} must store its argument {name!r} as self.{name}")
    return {name: getattr(model, attribute) for name, attribute in attributes.items()}


def format_hyperparameters(values: dict[str, Any]) -> str:
    """As one would type them; an optimiser factory as ``Adam(lr=0.001)``.

    >>> format_hyperparameters({"optimizer": partial(dict, lr=0.1), "decay": 0.999})
    'optimizer=dict(lr=0.1), decay=0.999'
    """
    return ", ".join(f"{name}={format_value(value)}" for name, value in values.items())


def format_value(value: Any) -> str:
    """One value as one would type it; the same in every process."""
    factory = partial(value) if isinstance(value, type) else value
    if isinstance(value, tuple | list):
        return f"({', '.join(format_value(item) for item in value)})"
    if inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if not isinstance(factory, partial):
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))  # an address would differ in every process
    return f"{factory.func.__name__}({format_hyperparameters(factory.keywords)})"


def parse_hyperparameters(
    method: type[nn.Module], texts: Iterable[str], given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Keyword arguments of a method from texts such as ``restore=0.005``.

    Beside the method's own names there are ``lr=1e-4`` and, for anything else about the optimiser,
    ``optimizer.momentum=0.9``; ``optimizer=SGD`` is one of torch's, and ``views=8`` so many random views of the given
    kind.

    Args:
        method: the class that will be given them.
        texts: each ``NAME=VALUE``, the value as in Python or a plain word.
        given: settings that stand in for the method's defaults, as a recipe's; ``lr`` then changes its optimiser.

    >>> from ctta.methods import CoTTA
    >>> parse_hyperparameters(CoTTA, ["restore=0.005", "gate=element", "lr=1e-4"])["optimizer"].keywords
    {'lr': 0.0001}
    """
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    } | dict(given or {})
    settings: dict[str, Any] = {}
    of_optimizer: dict[str, Any] = {}
    for text in texts:
        name, equals, value_text = (part.strip() for part in text.partition("="))
        if not (name and equals and value_text):
            raise ValueError(f"a setting reads NAME=VALUE, such as restore=0.005, got {text!r}")
        value = _value(value_text)
        if "optimizer" in defaults and (name == "lr" or name.startswith("optimizer.")):
            of_optimizer[name.removeprefix("optimizer.")] = value
        elif name not in defaults:
            known = [*defaults, *(["lr"] if "optimizer" in defaults else [])]
            raise ValueError(f"{method.__name__} has no setting {name!r}; it has {', '.join(known) or 'none'}")
        else:
            settings[name] = _suited(name, value, defaults[name])
    if of_optimizer:
        settings["optimizer"] = _with_arguments(settings.get("optimizer", defaults["optimizer"]), of_optimizer)
    return settings


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a word, such as gate=element


def _suited(name: str, value: Any, default: Any) -> Any:
    """The value in the form that the constructor takes; a number where the default is one."""
    if name == "optimizer":
        optimizer = getattr(torch.optim, str(value), None)
        if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
            raise ValueError(f"optimizer is the name of one of torch.optim's, such as SGD, got {value!r}")
        return partial(optimizer)
    if name == "views":
        if type(value) is not int or value < 0:
            raise ValueError(f"views is a number of random views, 0 for none, got {value!r}")
        if not value:
            return ()
        if isinstance(default, tuple) and default:  # random ones turn images, and cannot bring label maps back whole
            raise ValueError(f"views are {len(default)} fixed ones here: leave the setting out, or give 0 for none")
        return replace(default, num_views=value) if isinstance(default, ImageViews) else image_views(value)
    if isinstance(default, int | float) and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{name} is a number such as {default}, got {value!r}")
    return value


def _with_arguments(factory: OptimizerFactory, arguments: dict[str, Any]) -> OptimizerFactory:
    """The factory with these arguments, checked on a single weight before a network is loaded."""
    changed = partial(factory, **arguments)
    try:
        changed([torch.nn.Parameter(torch.zeros(1))])
    except TypeError as error:
        raise ValueError(f"the optimiser does not take {', '.join(arguments)}: {error}") from error
    return changed

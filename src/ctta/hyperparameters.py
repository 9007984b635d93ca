"""Reading hyperparameters back from a model, and showing them."""

import inspect
import re
from functools import partial
from typing import Any


def read_hyperparameters(model: object) -> dict[str, Any]:
    """The constructor's arguments after the first, from the attributes of the same name."""
    _net, *names = inspect.signature(type(model)).parameters
    # ``optimizer`` is the built one, so its hyperparameter is the factory.
    attributes = {name: "optimizer_factory" if name == "optimizer" else name for name in names}
    for name, attribute in attributes.items():
        if not hasattr(model, attribute):
            raise TypeError(f"{type(model).__name__} must store its argument {name!r} as self.{name}")
    return {name: getattr(model, attribute) for name, attribute in attributes.items()}


def show_hyperparameters(values: dict[str, Any]) -> str:
    """As one would type them; an optimiser factory as ``Adam(lr=0.001)``.

    >>> show_hyperparameters({"optimizer": partial(dict, lr=0.1), "decay": 0.999})
    'optimizer=dict(lr=0.1), decay=0.999'
    """
    return ", ".join(f"{name}={shown(value)}" for name, value in values.items())


def shown(value: Any) -> str:
    """One value as one would type it; the same in every process."""
    factory = partial(value) if isinstance(value, type) else value
    if isinstance(value, tuple | list):
        return f"({', '.join(shown(item) for item in value)})"
    if inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if not isinstance(factory, partial):
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))  # an address would differ in every process
    return f"{factory.func.__name__}({show_hyperparameters(factory.keywords)})"
